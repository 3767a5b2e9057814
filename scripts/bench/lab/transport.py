"""`wan transport`: the share of a link's rate that arrives as payload.

Two programs take turns at the two ends: plain sockets (socket_rate.py), which show the rate of the link itself, and the
transport of diloco_jax (transport.py). Payloads go up, from an island to the syncer, or down.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.network import SYNCER, Lab, Wan
from lab.results import result, rounded

BENCH = Path(__file__).parents[1]
WAIT_S = 60.0
# A payload takes this time at the link's rate; several payloads are in flight.
PAYLOAD_S = 0.25
PROGRAMS = {
    "socket": ("lab/socket_rate.py", 7000),
    "transport": ("transport.py", 7001),
}
WINDOW_BYTES = 4 << 20
PROFILES = {
    "100mbit": Wan(rate_bit_s=100e6),
    "1gbit": Wan(rate_bit_s=1e9),
    "1gbit-60ms": Wan(rate_bit_s=1e9, one_way_s=0.03, mtu=9000, window_bytes=WINDOW_BYTES),
}


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument(
        "--connections", nargs="+", type=int, default=[1, 8], help="numbers of connections or of stripes"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a transfer")
    parser.add_argument(
        "--down", action="store_true", help="transport: payloads go to the island; sockets always send up"
    )
    parser.add_argument("--repeats", type=int, default=3)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all profiles with all programs and numbers of connections; `value` is that of the last row."""
    programs, counts = arguments.programs, arguments.connections
    rows: list[dict[str, Any]] = []
    shares: list[float] = []
    for name in arguments.profiles:
        samples: dict[tuple[str, int], list[dict[str, float]]] = {}
        with Lab(["island-0"], PROFILES[name]) as lab:
            for program in programs:
                _listen(lab, program)
            for _ in range(arguments.repeats):
                for key in itertools.product(programs, counts):
                    samples.setdefault(key, []).append(_transfer(lab, *key, arguments))
        for (program, count), found in samples.items():
            shares = [sample["share"] for sample in found]
            row = {"profile": name, "program": program, "connections": count, "share": statistics.median(shares)}
            row |= {"low": min(shares), "high": max(shares)}
            for what in ("mbit_per_s", "delay_cores", "sender_cpu_s", "link_mb", "drops"):
                row[what] = statistics.median(sample[what] for sample in found)
            rows.append(rounded(row))
            sys.stderr.write(f"{rows[-1]}\n")
    last = rows[-1]
    unit = f"of the link's rate, {last['profile']}, {last['connections']} connections, {last['program']}"
    return result("wan_transport", shares, unit, rows=rows, down=arguments.down)


def _listen(lab: Lab, program: str) -> None:
    script, port = PROGRAMS[program]
    address = f"{lab.address(SYNCER)}:{port}"
    lab.spawn(f"listen {program}", SYNCER, [sys.executable, BENCH / script, "--listen", address])


def _transfer(lab: Lab, program: str, connections: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Make one transfer between the island and the syncer's site, and return its figures."""
    script, port = PROGRAMS[program]
    command = [sys.executable, BENCH / script, "--connect", f"{lab.address(SYNCER)}:{port}", "--json"]
    command += ["--stripes", connections, "--seconds", arguments.seconds]
    if program == "transport":
        command += ["--payload-mb", max(0.1, lab.wan.rate_bit_s * PAYLOAD_S / 8e6)]
        command += ["--down"] if arguments.down else []
    before, delay_s, began_s = lab.traffic("island-0"), lab.delay_cpu_s(), time.monotonic()
    children_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    lab.spawn("connect", "island-0", command, stdout=subprocess.PIPE)
    printed = json.loads(lab.output("connect", arguments.seconds + WAIT_S))
    used, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began_s
    after = lab.traffic("island-0")
    moved = max(after.up - before.up, after.down - before.down)
    return {
        "share": 8 * printed["value"] / lab.wan.rate_bit_s,
        "mbit_per_s": 8 * printed["value"] / 1e6,
        "delay_cores": (lab.delay_cpu_s() - delay_s) / wall_s,
        "sender_cpu_s": used.ru_utime + used.ru_stime - children_s.ru_utime - children_s.ru_stime,
        "link_mb": moved / 1e6,
        "drops": after.drops - before.drops,
    }
