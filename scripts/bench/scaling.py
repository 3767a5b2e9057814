"""Measure the cost of more learners for the syncer.

Each case is a syncer without its machine (listener, merge, outer step, encoded delta) and a process of stub learners,
which answer each request over loopback with the same int4 values. All cases run at once and are measured in turn, so
that each run compares them under equal conditions; ratios are taken within a run. CPU time is that of the syncer's
process without learners.

With --control the bench measures the loop of a real syncer instead, with a tiny model, a quorum of one, no grace
window, and stub learners that share another process and make a step each second. Cases run one after another, in turn
for each run. The results are rounds per second and CPU time per round, which should be at most linear in the learners.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _control import Loop, cpu_of, measure_loop

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan, plan_fragments
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, Hello, PullRequest
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.model.arithmetic import Arithmetic, make_setup
from diloco_jax.runtime.model.global_model import GlobalModel, make_model
from diloco_jax.runtime.syncer.listening import SyncerStart, open_listener
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.settings.run import RunConfig, SyncerConfig
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from diloco_jax.transport.session.description import Description

FRAGMENTS = 2
WAIT_S = 30.0
FINGERPRINT = (("run", "scaling"),)


class Measured(NamedTuple):
    """Durations of some rounds."""

    wall_s: float
    cpu_s: float
    rss_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of learners")
    parser.add_argument("--elements", type=int, default=4 << 20, help="elements of one fragment")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in each measurement of a run")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--control", type=int, nargs="*", help="learners of a real syncer, such as 8 32 64 128")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step of these learners")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement of these learners")
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    if arguments.control:
        return show(control_results(arguments), arguments)
    cases = sorted(set(arguments.learners))
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(cases, Path(folder), arguments)
    return show(results(cases, measured, arguments), arguments)


def show(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    for result in found:
        if arguments.json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            sys.stdout.write("{name}: {value:.4g} {unit} ({low:.4g} to {high:.4g}, {runs} runs)\n".format(**result))


def measure(cases: list[int], folder: Path, arguments: argparse.Namespace) -> dict[int, list[Measured]]:
    """Measure all numbers of learners in turn for each run."""
    processes = multiprocessing.get_context("forkserver")
    # All processes share these imports.
    processes.set_forkserver_preload([GlobalModel.__module__, open_listener.__module__])
    pipes: dict[int, Connection] = {}
    for case in cases:
        ours, theirs = processes.Pipe()
        processes.Process(target=serve, args=(case, folder, arguments.elements, theirs)).start()
        address = ours.recv()
        processes.Process(target=learn, args=(case, address, arguments.elements), daemon=True).start()
        pipes[case] = ours
    measured: dict[int, list[Measured]] = {case: [] for case in cases}
    # The first run warms up.
    for run in range(-1, arguments.runs):
        for case in cases if run % 2 else cases[::-1]:
            pipes[case].send(arguments.rounds)
            found = Measured(*pipes[case].recv())
            measured[case] += [found] * (run >= 0)
    for pipe in pipes.values():
        pipe.send(0)
    return measured


def control_results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the loop of a real syncer for each number of learners, and return an object per quantity."""
    loops: dict[int, list[Loop]] = {learners: [] for learners in arguments.control}
    for run in range(arguments.runs):
        for learners in arguments.control if run % 2 else arguments.control[::-1]:
            loops[learners].append(measure_loop(learners, arguments.step_s, arguments.seconds))
    found, first = [], loops[min(loops)]
    for learners, rows in loops.items():
        common = {"learners": learners, "step_s": arguments.step_s}
        found.append(row(f"rounds_{learners}_learners", "1/s", [each.rounds / each.wall_s for each in rows], common))
        cpu = [1e3 * each.cpu_s / max(1, each.rounds) for each in rows]
        found.append(row(f"syncer_cpu_per_round_{learners}_learners", "ms", cpu, common))
        base = [1e3 * each.cpu_s / max(1, each.rounds) / min(loops) for each in first]
        ratios = [mine / learners / theirs for mine, theirs in zip(cpu, base, strict=True)]
        found.append(row(f"syncer_cpu_per_round_and_learner_{learners}_vs_{min(loops)}", "ratio", ratios, common))
        merged = [each.parts / max(1, each.rounds) for each in rows]
        found.append(row(f"values_per_round_{learners}_learners", "values", merged, common))
        found.append(row(f"stubs_cpu_{learners}_learners", "cores", [e.stubs_cpu_s / e.wall_s for e in rows], common))
    return found


def results(
    cases: list[int], measured: Mapping[int, list[Measured]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one object per case and quantity."""
    payload_bytes = payload_of(arguments.elements).nbytes
    other, found = cases[0], []
    for learners in cases:
        merged = payload_bytes * learners * arguments.rounds
        common = {"learners": learners, "payload_bytes": payload_bytes}
        label, rows = f"{learners}_learners", measured[learners]
        found.append(row(f"merged_rate_{label}", "B/s", [merged / each.wall_s for each in rows], common))
        cpu = [each.cpu_s / merged * 1e6 for each in rows]
        found.append(row(f"syncer_cpu_per_merged_mb_{label}", "s/MB", cpu, common))
        found.append(row(f"syncer_rss_{label}", "B", [float(each.rss_bytes) for each in rows], common))
        if learners == other:
            continue
        base = payload_bytes * other * arguments.rounds
        pairs = list(zip(rows, measured[other], strict=True))
        ratios = [(mine.cpu_s / merged) / (theirs.cpu_s / base) for mine, theirs in pairs]
        found.append(row(f"syncer_cpu_per_merged_mb_{label}_vs_{other}_learners", "ratio", ratios, common))
        growth = [(mine.rss_bytes - theirs.rss_bytes) / (learners - other) for mine, theirs in pairs]
        found.append(row(f"syncer_rss_per_learner_above_{other}_{label}", "B", growth, common))
    return found


def row(name: str, unit: str, values: list[float], common: Mapping[str, Any]) -> dict[str, Any]:
    result = {"name": name, "value": statistics.median(values), "unit": unit, "low": min(values), "high": max(values)}
    return {**result, "runs": len(values), "cores": os.cpu_count(), **common}


def plan_of(elements: int) -> FragmentPlan:
    """Return a plan of embeddings and matrices; half of each fragment may be cut, and half must stay whole."""
    width = 1 << 9
    shapes = {f"embed_{n}": (elements // width // 2, width) for n in range(2)}
    shapes |= {f"layer_{n}/kernel": (elements // width // 8, width) for n in range(8)}
    return plan_fragments(shapes, FRAGMENTS)


def payload_of(elements: int, fragment_id: int = 0) -> np.ndarray:
    """Return an encoded value of a fragment; all have the same size."""
    rng = np.random.default_rng(fragment_id)
    shapes = plan_of(elements).fragments[fragment_id].keys_shapes
    values = {key: rng.normal(0, 1e-3, shape).astype(np.float32) for key, shape in shapes}
    return np.frombuffer(codec.encode(values, "int4"), np.uint8)


def config_of() -> RunConfig:
    base = RunConfig(protocol=ProtocolConfig(sync_every=FRAGMENTS, num_fragments=FRAGMENTS), name="scaling")
    transport = replace(base.transport, stripes=1)
    return replace(base, syncer=SyncerConfig(merge_threads=1), transport=transport)


def serve(learners: int, folder: Path, elements: int, pipe: Connection) -> None:
    """Run a syncer in this process that makes as many rounds as the pipe requests, until it requests 0."""
    config, plan = config_of(), plan_of(elements)
    run, own = ResolvedRun(config, plan), folder / str(learners)
    own.mkdir()
    zeros = ((path, np.zeros(shape, np.float32)) for path, shape in plan.shapes.items())
    model = make_model(run, zeros, Arithmetic(make_setup(run)))
    listener = open_listener(config, own, SyncerStart("fresh", 1, threading.Event(), FINGERPRINT, Description("", "")))
    pipe.send(listener.address)
    names = [f"stub-{number}" for number in range(learners)]
    receive(listener, Hello, len(names))
    step = 0
    while rounds := pipe.recv():
        began_s, cpu_s = time.perf_counter(), cpu_of(os.getpid())
        for _ in range(rounds):
            step += 1
            play(step, names, model, listener)
        wall_s = time.perf_counter() - began_s
        pipe.send((wall_s, cpu_of(os.getpid()) - cpu_s, rss_of(os.getpid())))
    listener.close(0.0)


def play(step: int, names: list[str], model: GlobalModel, listener: GrpcListener) -> None:
    """Make one round."""
    fragment_id = step % FRAGMENTS
    base = model.versions[fragment_id]
    for name in names:
        listener.send(name, PullRequest(step, fragment_id, step))
    values = receive(listener, FragmentValue, len(names))
    parts = tuple(Contribution(name, step, 1, 1, base, 1) for name in sorted(names))
    merged = model.merge(Merge(step, fragment_id, parts), values)
    assert merged.state is not None, merged.excluded
    model.publish(merged)
    message = GlobalFragment(step, fragment_id, step, 1, merged.state.digest, 0, base)
    for name in names:
        listener.send(name, message, model.payload(fragment_id, base))


def receive(listener: GrpcListener, kind: type, count: int) -> dict[str, Any]:
    """Receive messages of a class from `count` learners, and return their payloads."""
    found: dict[str, Any] = {}
    until_s = time.monotonic() + WAIT_S
    while len(found) < count:
        delivery = listener.receive(1.0)
        if delivery is not None and isinstance(delivery.message, kind):
            found[delivery.peer] = delivery.payload
        if time.monotonic() > until_s:
            raise TimeoutError(f"{len(found)} of {count} learners answered within {WAIT_S:g} s")
    return found


def rss_of(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def learn(learners: int, address: str, elements: int) -> None:
    """Run stub learners in threads of this process; they answer every pull at once with the same bytes."""
    payloads = [payload_of(elements, fragment_id).data for fragment_id in range(FRAGMENTS)]
    threads = [
        threading.Thread(target=answer, args=(f"stub-{number}", address, payloads)) for number in range(learners)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answer(name: str, address: str, payloads: list[memoryview]) -> None:
    transport = replace(config_of().transport, address=address)
    dialler = Dialler(transport, run_id="scaling", learner_id=name, incarnation=1)
    link = dialler.connect(0)
    link.send(Hello(name, 1, FINGERPRINT, (-1,) * FRAGMENTS, (0,) * FRAGMENTS, 0, 1, 0))
    while True:
        delivery = link.receive(1.0)
        if delivery is None:
            continue
        if delivery.kind == "disconnected":
            link.close(0.0)
            return
        if isinstance(delivery.message, PullRequest):
            step, fragment_id, _ = delivery.message
            payload = payloads[fragment_id]
            link.send(FragmentValue(name, 1, step, fragment_id, step, 1, 1, 0, 1, payload.nbytes), payload)


if __name__ == "__main__":
    main()
