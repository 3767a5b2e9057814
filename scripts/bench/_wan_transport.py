"""`wan transport`: which share of a link's rate arrives as payload.

The program at the two ends is plain sockets (_wan_socket.py), which show what the link itself can carry.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _wan_lab import SYNCER, Lab, LabError, Wan
from _wan_results import result, rounded

PORT = 7000
WINDOW_BYTES = 4 << 20
PROFILES = {
    "100mbit": Wan(rate_bit_s=100e6),
    "1gbit": Wan(rate_bit_s=1e9),
    "1gbit-60ms": Wan(rate_bit_s=1e9, one_way_s=0.03, mtu=9000, window_bytes=WINDOW_BYTES),
}


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", default=",".join(PROFILES), help=f"some of {', '.join(PROFILES)}")
    parser.add_argument("--streams", default="1,8,16", help="numbers of connections, separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a transfer at the full rate")
    parser.add_argument("--repeats", type=int, default=3)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All profiles with all numbers of connections; the value is that of the last profile with the most."""
    streams = [int(word) for word in arguments.streams.split(",")]
    rows: list[dict[str, Any]] = []
    shares: list[float] = []
    for name in arguments.profiles.split(","):
        wan = PROFILES[name]
        mib = max(1, round(wan.rate_bit_s * arguments.seconds / 8 / (1 << 20)))
        with Lab(["island-0"], wan) as lab:
            _listen(lab)
            samples: dict[int, list[dict[str, float]]] = {count: [] for count in streams}
            for _ in range(arguments.repeats):
                for count in streams:
                    samples[count].append(_transfer(lab, count, mib))
        for count, found in samples.items():
            shares = [sample["share"] for sample in found]
            row = {"profile": name, "connections": count, "share": statistics.median(shares)}
            row |= {"low": min(shares), "high": max(shares)}
            for key in ("mbit_per_s", "delay_cores", "sender_cpu_s_per_gb", "headers", "drops"):
                row[key] = statistics.median(sample[key] for sample in found)
            rows.append(rounded(row))
    unit = f"of the link's rate, {rows[-1]['profile']}, {rows[-1]['connections']} connections, plain sockets"
    return result("wan_transport", shares, unit, rows=rows)


def _program(*words: object) -> list[object]:
    return [sys.executable, Path(__file__).with_name("_wan_socket.py"), *words]


def _listen(lab: Lab) -> None:
    child = lab.spawn("listen", SYNCER, _program("listen", f"{lab.address(SYNCER)}:{PORT}"), stdout=subprocess.PIPE)
    assert child.stdout is not None
    if child.stdout.readline() != b"ready\n":
        raise LabError("the listening end did not start, see above")


def _transfer(lab: Lab, connections: int, mib: int) -> dict[str, float]:
    """One transfer from the island to the syncer's site."""
    before, cpu_s, began_s = lab.traffic("island-0"), lab.delay_cpu_s(), time.monotonic()
    words = ("connect", f"{lab.address(SYNCER)}:{PORT}", "--streams", connections, "--mib", mib)
    child = lab.spawn("connect", "island-0", _program(*words), stdout=subprocess.PIPE)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise LabError("the sending end did not finish, see above")
    told = json.loads(line)
    lab.stop("connect")
    after, wall_s = lab.traffic("island-0"), time.monotonic() - began_s
    bit_s = 8 * told["bytes"] / told["seconds"]
    return {
        "share": bit_s / lab.wan.rate_bit_s,
        "mbit_per_s": bit_s / 1e6,
        "delay_cores": (lab.delay_cpu_s() - cpu_s) / wall_s,
        "sender_cpu_s_per_gb": told["cpu_s"] / told["bytes"] * 1e9,
        "headers": (after.up - before.up) / told["bytes"] - 1,
        "drops": after.drops - before.drops,
    }
