"""Measure transfers and runs over wide-area links that are emulated on one machine (docs/benchmarks.md).

The bench builds network namespaces for islands and a syncer with links of a chosen rate and delay. It needs Linux and
root.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

# This must happen before any import of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lab import planned, traffic, transport, versus_data_parallel, versus_torchft
from lab.network import LabError, RunFailed, check_root
from lab.results import show

BENCHES = {
    "transport": (transport.add_words, transport.measure, "share of a link's rate that arrives"),
    "bytes": (traffic.add_bytes_words, traffic.measure_bytes, "bytes per global step and learner"),
    "slow": (traffic.add_slow_words, traffic.measure_slow, "a run over links of 10 Mbit/s"),
    "utilisation": (
        traffic.add_utilisation_words,
        traffic.measure_utilisation,
        "share of time in inner steps as links become narrower",
    ),
    "downlink": (
        traffic.add_downlink_words,
        traffic.measure_downlink,
        "share of values that arrive within tau steps on slow downlinks",
    ),
    "planned": (
        planned.add_words,
        planned.measure,
        "times and bytes of rounds and of a join beside those of diloco plan",
    ),
    "vs_data_parallel": (
        versus_data_parallel.add_words,
        versus_data_parallel.measure,
        "time and loss beside one synchronous job over the same links",
    ),
    "vs_torchft": (
        versus_torchft.add_words,
        versus_torchft.measure,
        "time beside torchft's DiLoCo over the same links",
    ),
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
    # After SIGTERM the lab still cleans up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        check_root()
        with tempfile.TemporaryDirectory(prefix="diloco-wan-") as temporary:
            outcome = arguments.measure(arguments, arguments.keep.resolve() if arguments.keep else Path(temporary))
    except (LabError, RunFailed) as error:
        raise SystemExit(f"wan: {error} (--keep FOLDER keeps logs)") from None
    except FileExistsError as error:
        raise SystemExit(f"wan: {error.filename} is from an earlier bench; choose another --keep folder") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    show(outcome, arguments.json)


if __name__ == "__main__":
    main()
