"""Measure the disk space of tapes for a week, and the cost of reading them.

The two machines run in the simulator with steps of one second and a round at each step. Their lines get the digits of
real clocks, losses and step times, and counters as after half a week. The lines are written like those of a run, in
compressed segments; the size of a round gives the size of a week. A run may need space for two more segments, the
newest one and the one that is being compressed. The audit reads the tapes as the simulator wrote them.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.records import segments
from diloco_jax.runtime.records.segments import closed_segments
from diloco_jax.runtime.records.tape_file import TapeFile, last_time_s, read_lines
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.tapes import LearnerTapes
from diloco_jax.tools.replay.audit import audit

WEEK_S = 604_800
# The number of steps, rounds and seconds before the first line.
BEFORE = WEEK_S // 2
STEP_TOKENS, STEP_SAMPLES = 8192, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=WEEK_S / 50, help="length of the simulated run")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for result in measure(Path(folder), arguments):
            plain = "{name}: {value:.4g} {unit}".format(**result)
            sys.stdout.write((json.dumps(result) if arguments.json else plain) + "\n")


def measure(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    protocol = ProtocolConfig(sync_every=arguments.fragments, num_fragments=arguments.fragments, snapshot_every=100)
    scenario = Scenario(
        config=protocol,
        learners=arguments.learners,
        total_steps=1 << 40,
        step_samples=(STEP_SAMPLES, STEP_SAMPLES),
        sample_tokens=STEP_TOKENS // STEP_SAMPLES,
        payload_bytes=1 << 20,
        seed=1,
    )
    cluster = Cluster(scenario)
    tapes = LearnerTapes(cluster)
    cluster.watch(tapes)
    cluster.run(arguments.seconds)
    rounds, digits = cluster.syncer.global_step, random.Random(1)
    lines = [syncer_line(line, digits) for line in cluster.syncer_node.tape]
    yield from sizes("syncer", folder / "tape.jsonl", lines, rounds)
    own = [[learner_line(line, digits) for line in each] for each in tapes.lines.values()]
    taken = [list(sizes("learner", folder / f"{number}.jsonl", each, rounds)) for number, each in enumerate(own)]
    yield figure("tapes of all learners, a week", sum(each[1]["value"] for each in taken), "MB")
    yield from reading(folder / "tape.jsonl")
    tapes.save(folder / "simulated")
    began_s = time.process_time()
    audit(folder / "simulated", protocol, scenario.total_steps)
    total = len(lines) + sum(map(len, own))
    yield figure("audit of a million lines", (time.process_time() - began_s) / total * 1e6, "s of CPU")


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    """Return a result of one measurement."""
    return {"name": name, "value": value, "unit": unit, "low": value, "high": value, "runs": 1}


def syncer_line(line: str, digits: random.Random) -> str:
    """Give a line of the simulator the digits of a real one, half a week later."""
    fields = json.loads(line)
    kind, fields[1] = fields[0], round(BEFORE + fields[1] + 1e-3 * digits.random(), 6)
    if kind == "StepReport":
        fields[4:7] = fields[4] + BEFORE, fields[5] + BEFORE * STEP_TOKENS, fields[6] + BEFORE
        fields[7] = [[v + BEFORE, s + BEFORE, t + BEFORE * STEP_TOKENS] for v, s, t in fields[7]]
        fields[8:10] = round(fields[8] * digits.gauss(1.0, 0.01), 6), float(f"{digits.gauss(2.5, 0.05):.7g}")
        fields[10:12] = (number + BEFORE * STEP_SAMPLES for number in fields[10:12])
        fields[12] = [[fragment_id, version + BEFORE, ago_s] for fragment_id, version, ago_s in fields[12]]
    elif kind == "FragmentValue":
        for at in (4, 6, 9):
            fields[at] += BEFORE
        fields[10] += BEFORE * STEP_SAMPLES
    elif kind in ("merged", "snapshot"):
        fields[2] += BEFORE
        fields += [f"{digits.getrandbits(128):032x}"] if kind == "snapshot" else []
    return json.dumps(fields, separators=(",", ":"))


def learner_line(line: str, digits: random.Random) -> str:
    """Give a line of a simulated learner's tape the digits of a real one, half a week later."""
    fields = json.loads(line)
    if fields[0] == "step":
        reads = [[start + BEFORE * STEP_SAMPLES * 4, stop + BEFORE * STEP_SAMPLES * 4] for start, stop in fields[3]]
        loss = float(str(np.float32(digits.gauss(2.5, 0.05))))
        fields[1:5] = fields[1] + BEFORE, fields[2] + BEFORE, reads, loss
    elif fields[0] == "adopt":
        fields[2], fields[5] = fields[2] + BEFORE, fields[5] + BEFORE
    elif fields[0] == "sent":
        fields[2:4] = (number + BEFORE for number in fields[2:4])
    return json.dumps(fields, separators=(",", ":"))


def sizes(whose: str, path: Path, lines: Iterable[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Write a tape, and yield its sizes."""
    written: Counter[str] = Counter()
    for line in lines:
        written[json.loads(line)[0]] += len(line) + 1
    total = written.total()
    tape = TapeFile(path, threading.Event(), lambda: None, min(segments.SEGMENT_BYTES, total // 3))
    began_s = time.process_time()
    for line in lines:
        tape.write(line)
    tape._file._packer.wait()
    took_s = time.process_time() - began_s
    tape.close()
    closed = closed_segments(path)
    share = sum(segment.path.stat().st_size for segment in closed) / closed[-1].end
    yield figure(f"{whose}'s tape, a round", total * share / rounds, "bytes")
    yield figure(f"{whose}'s tape, a week", total * share / rounds * WEEK_S / 1e6, "MB")
    yield figure(f"{whose}'s tape, a round before it is compressed", total / rounds, "bytes")
    yield figure(f"{whose}'s tape: writing and compressing a round", took_s / rounds * 1e6, "us of CPU")
    for kind, size in written.most_common(4):
        yield figure(f"{whose}'s tape: lines of {kind}, a round, not compressed", size / rounds, "bytes")


def reading(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the costs of a restart from a snapshot 100 rounds before the end of the tape."""
    began_s = time.process_time()
    last_time_s(path)
    tape = TapeFile(path, threading.Event(), lambda: None)
    yield figure("opening the tape, its newest segment hashed", time.process_time() - began_s, "s of CPU")
    began_s = time.process_time()
    count = sum(1 for _ in read_lines(path, max(0, tape.position - 300_000)))
    yield figure(f"reading its last {count} lines", time.process_time() - began_s, "s of CPU")
    began_s = time.process_time()
    count = sum(1 for _ in read_lines(path))
    yield figure("reading a million lines", (time.process_time() - began_s) / count * 1e6, "s of CPU")
    tape.close()


if __name__ == "__main__":
    main()
