"""Wide-area networks on one machine: what arrives, what a run moves, and what narrow links cost (docs/benchmarks.md).

Builds network namespaces for islands and a syncer with links of a chosen rate and delay; needs Linux and root.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX

import _wan_torchft
import _wan_traffic
import _wan_transport
import _wan_versus
from _wan_lab import LabError, RunFailed, check_root
from _wan_results import show

BENCHES = {
    "transport": (_wan_transport.add_words, _wan_transport.measure, "share of a link's rate that arrives"),
    "bytes": (_wan_traffic.add_bytes_words, _wan_traffic.measure_bytes, "bytes per global step and learner"),
    "slow": (_wan_traffic.add_slow_words, _wan_traffic.measure_slow, "a run over links of 10 Mbit/s"),
    "utilisation": (
        _wan_traffic.add_utilisation_words,
        _wan_traffic.measure_utilisation,
        "share of time in inner steps as links become narrower",
    ),
    "vs_data_parallel": (
        _wan_versus.add_words,
        _wan_versus.measure,
        "time and loss beside one synchronous job over the same links",
    ),
    "vs_torchft": (_wan_torchft.add_words, _wan_torchft.measure, "time beside torchft's DiLoCo over the same links"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="benches", required=True, metavar="BENCH")
    for name, (add_words, measure, text) in BENCHES.items():
        command = commands.add_parser(name, help=text, description=measure.__doc__)
        command.set_defaults(measure=measure)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--keep", type=Path, help="folder that keeps logs and files; default: a temporary one")
        add_words(command)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the lab cleans up
    try:
        check_root()
        with tempfile.TemporaryDirectory(prefix="diloco-wan-") as temporary:
            outcome = arguments.measure(arguments, arguments.keep.resolve() if arguments.keep else Path(temporary))
    except (LabError, RunFailed) as error:
        raise SystemExit(f"wan: {error} (--keep FOLDER keeps logs)") from None
    except FileExistsError as error:
        raise SystemExit(f"wan: {error.filename} is of an earlier bench; choose another --keep folder") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    show(outcome, arguments.json)


if __name__ == "__main__":
    main()
