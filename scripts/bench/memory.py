"""Measure the peak memory of a syncer through rounds, a snapshot and a failover, beside the figure of `diloco plan`.

A syncer in a separate process has a model of a few large tensors. Its four learners compute nothing: they are threads
of this process with the real machine of a learner and the real link. They report steps, answer every pull with the same
int4 values and read every version. One file has the global values for all of them, because a restarted syncer requests
the values that its snapshot lacks. The wire is int4 in both directions.

The syncer writes snapshots during the rounds. It is killed (SIGKILL) a third of a cycle after its first snapshot, and
restarted in the same folder. Every fragment has five rounds, and a last snapshot ends the run. `value` is the largest
VmHWM of the two processes over the plan's figure. Rounds per second count from the first to the last version of a
process. Their bound is that of the bench `merge`, the bytes of a round at the rate of a copy in memory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.layout import value_digest, whole
from diloco_jax.protocol.effects import Finish, Send
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import NO_VERSION, AnchorValue, FragmentValue, GlobalFragment
from diloco_jax.runtime.records.checkpoint import complete
from diloco_jax.runtime.records.files import ADDRESS_FILE, CHECKPOINTS
from diloco_jax.runtime.records.signals import give_memory_back
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.budget.needs import kinds_of, outline, syncer_needs
from diloco_jax.training.data.corpus import load_source
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.link import Delivery, Link, TransportError

ROOT = Path(__file__).resolve().parents[2]
BARS = {"peak_bytes": 16 * 2**30, "plan": 0.10}
# The number of rounds of each fragment.
ROUNDS = 5
COLUMNS = 1024
PATIENCE_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.2e9)
    parser.add_argument("--fragments", type=int, default=24, help="fragments and tensors")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of a learner's step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # Four learners in this process read whole values at once.
    give_memory_back()
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-memory-") as folder:
        result = Bench(Path(folder), arguments).run()
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    peaks = " and ".join(size(peak) for peak in result["peaks_bytes"])
    rates = " and ".join(f"{rate:.3g}" for rate in result["rounds_per_s"])
    sys.stdout.write(
        f"{result['parameters']:.3g} parameters: peaks of {peaks} in two processes, the plan has "
        f"{size(result['plan_bytes'])} (x {result['value']:.3f}); {rates} rounds per second, a copy of "
        f"{size(result['round_bytes'])} would make {result['copies_per_s']:.3g}; snapshots {result['snapshots']}\n"
    )


class World:
    """The global values of all learners in a file; the first learner that receives a version reads it for all."""

    def __init__(self, file: Path, plan: FragmentPlan) -> None:
        self.layouts = [whole(fragment) for fragment in plan.fragments]
        self.payloads = [random_payload(layout) for layout in self.layouts]
        self.keys_shapes = [fragment.keys_shapes for fragment in plan.fragments]
        sizes = np.cumsum([0, *(layout.size for layout in self.layouts)])
        values = np.memmap(file, np.float32, "w+", shape=(int(sizes[-1]),))
        self._flats = [values[start:stop] for start, stop in pairwise(sizes)]
        self._versions = [NO_VERSION] * len(self.layouts)
        self._locks = [threading.Lock() for _ in self.layouts]
        # The arrival time and the epoch of each version.
        self.merged: list[tuple[float, int]] = []

    def read(self, message: GlobalFragment, payload: Any) -> bool:
        """Read a version; False if its base is missing or its digest is wrong."""
        number = message.fragment_id
        with self._locks[number]:
            if self._versions[number] >= message.version:
                return True
            views = self.layouts[number].views(self._flats[number])
            if message.base == NO_VERSION:
                self._flats[number][:] = np.frombuffer(payload, np.float32)
            elif message.base == self._versions[number]:
                for key, delta in codec.decode(payload, self.keys_shapes[number], "int4").items():
                    views[key] += delta
            else:
                return False
            self._versions[number] = message.version
            self.merged += [(time.monotonic(), message.epoch)] * (message.version > 0)
            return value_digest(views) == message.digest

    def value(self, number: int) -> memoryview:
        """Copy a fragment's value."""
        with self._locks[number]:
            return memoryview(self._flats[number].tobytes())


class Stub(threading.Thread):
    """A learner without a model: its machine, its link, and steps of a given length."""

    def __init__(
        self, name: str, config: RunConfig, agreed: Any, world: World, dialler: Dialler, step_s: float
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._world, self._dialler, self._step_s = world, dialler, step_s
        sizes = {n: layout.payload_bytes("int4") for n, layout in enumerate(world.layouts)}
        self._machine = Learner(name, 1, config.protocol, agreed, payload_bytes=sizes, evaluates=False)
        self.over = False

    def run(self) -> None:
        """Train until the end of the run, and reconnect after each broken link."""
        while not self.over:
            try:
                link = self._dialler.connect(self._machine.epoch)
            except TransportError:
                time.sleep(0.2)
                continue
            self._execute(link, self._machine.on_connected(time.monotonic()))
            self._serve(link)
            link.close(1.0)

    def _serve(self, link: Link) -> None:
        machine, ends_s = self._machine, time.monotonic() + self._step_s
        while not self.over:
            delivery = link.receive(max(0.0, min(0.5, ends_s - time.monotonic())))
            if delivery is not None:
                if delivery.kind == "disconnected":
                    machine.on_disconnected(time.monotonic())
                    return
                self._execute(link, self._received(delivery))
            now_s = time.monotonic()
            if now_s >= ends_s:
                ends_s = now_s + self._step_s
                if machine.may_step():
                    end = machine.take_batch().end
                    self._execute(link, machine.on_step(1000, self._step_s, 1.0, now_s, samples_end=end))
                self._execute(link, machine.on_tick(now_s))

    def _received(self, delivery: Delivery) -> list[Any]:
        machine, message, now_s = self._machine, delivery.message, time.monotonic()
        if isinstance(message, GlobalFragment):
            if not machine.wants(message, now_s):
                return []
            if not self._world.read(message, delivery.payload):
                machine.on_corrupt(now_s)
                return []
            machine.on_read(message, now_s)
        return machine.on_message(message, now_s)  # type: ignore[arg-type]

    def _execute(self, link: Link, effects: list[Any]) -> None:
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Finish):
                self.over = True
            elif isinstance(effect, Send):
                message, payload = effect.message, memoryview(b"")
                if isinstance(message, FragmentValue):
                    payload = self._world.payloads[message.fragment_id]
                elif isinstance(message, AnchorValue):
                    payload = self._world.value(message.fragment_id)
                    message = message._replace(payload_bytes=payload.nbytes)
                try:
                    link.send(message, payload)  # type: ignore[arg-type]
                except (TransportError, OSError):
                    # The link also delivers the disconnection.
                    return


class SyncerProcess(NamedTuple):
    """One process of the syncer."""

    process: subprocess.Popen[bytes]
    peaks: list[int]

    def watch(self) -> None:
        """Record the largest memory so far."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
            self.peaks.extend(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        except OSError:
            return


class Bench:
    """One run of the bench in a folder."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._run_dir, self._arguments = folder, folder / "run", arguments
        self._file = folder / "config.yaml"
        count = arguments.fragments
        rows = round(arguments.parameters / count / COLUMNS)
        settings = {
            "name": "memory",
            "islands": {"count": arguments.learners},
            "train": {"steps": ROUNDS * count, "eval_every": 0, "final_eval_batches": 1, "seq_len": 32},
            "model": {
                "module": "_large_model:LargeModel",
                "args": {"tensors": count, "rows": rows, "columns": COLUMNS},
            },
            "protocol": {"sync_every": count, "num_fragments": count, "overlap_steps": 2, "quorum": 1}
            | {"snapshot_every": 2 * count, "recover_from_peers": False, "silence_s": 120.0, "pull_timeout_s": 120.0},
            "outer": {"learning_rate": 0.7, "momentum": 0.9},
            "trackers": [],
        }
        self._file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        sys.path.insert(0, str(ROOT / "scripts" / "bench"))
        self._config = load(self._file)
        found = outline(self._config, kinds_of(self._config)[0])
        self._resolved, self._parameters = found.run, rows * COLUMNS * count
        self._plan_bytes = sum(syncer_needs(found.run)[0])
        self._world = World(folder / "values", found.run.plan)
        corpus = load_source(self._config.data, self._config.train.seq_len).corpus
        self._agreed = found.run.fingerprint(corpus)

    def run(self) -> dict[str, Any]:
        """Run the syncer, kill it, run it again until the end, and return the result."""
        config, checkpoints = self._config, self._run_dir / CHECKPOINTS
        first = self._start()
        self._until(first, lambda: (self._run_dir / ADDRESS_FILE).exists())
        address = (self._run_dir / ADDRESS_FILE).read_text(encoding="utf-8")
        transport = replace(config.transport, address=address)
        stubs = []
        for name in config.islands.names:
            dialler = Dialler(transport, run_id=config.name, learner_id=name, incarnation=1)
            stubs.append(Stub(name, config, self._agreed, self._world, dialler, self._arguments.step_s))
            stubs[-1].start()
        count = self._arguments.fragments
        self._until(first, lambda: complete(checkpoints) and len(self._world.merged) >= 2 * count + count // 3)
        first.watch()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        second = self._start()
        # A syncer that ends with status 0 has completed the run, even if a stub lost its link before that.
        self._until(second, lambda: all(stub.over for stub in stubs) or second.process.poll() == 0)
        for stub in stubs:
            stub.over = True
        second.watch()
        second.process.kill()
        second.process.wait()
        return self._result([max(first.peaks), max(second.peaks)], [path.name for path in complete(checkpoints)])

    def _start(self) -> SyncerProcess:
        words = ["syncer", str(self._file), "--run-dir", str(self._run_dir), "--syncer.merge_threads", "0"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "bench")])
        environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        with (self._folder / "syncer.log").open("ab") as log:
            command = [sys.executable, "-m", "diloco_jax", *words]
            return SyncerProcess(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT), [])

    def _until(self, syncer: SyncerProcess, reached: Any) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            # Before `reached`, which may depend on a process that ends meanwhile.
            status = syncer.process.poll()
            if reached():
                return
            syncer.watch()
            if status is not None or time.monotonic() > ends_s:
                log = (self._folder / "syncer.log").read_text(encoding="utf-8")[-3000:]
                syncer.process.kill()
                how = f"status {syncer.process.returncode}, {len(self._world.merged)} versions"
                raise SystemExit(f"{log}\nthe syncer ended or was too slow: {how}")
            time.sleep(0.1)

    def _result(self, peaks: list[int], snapshots: list[str]) -> dict[str, Any]:
        largest = max(layout.size for layout in self._world.layouts)
        up, down = (self._resolved.payload_bytes(form)[0] for form in (self._config.wire.up, self._config.wire.down))
        round_bytes = self._arguments.learners * up + down + 2 * 3 * 4 * largest
        rates = []
        for epoch in (1, 2):
            times_s = [at_s for at_s, of in self._world.merged if of == epoch]
            # A short-lived process has one merge or none.
            span_s = times_s[-1] - times_s[0] if times_s else 0.0
            rates.append((len(times_s) - 1) / span_s if span_s > 0 else 0.0)
        return {
            "name": "memory",
            "value": max(peaks) / self._plan_bytes,
            "unit": "peak over plan",
            "low": min(peaks) / self._plan_bytes,
            "high": max(peaks) / self._plan_bytes,
            "runs": len(peaks),
            "parameters": self._parameters,
            "peaks_bytes": peaks,
            "plan_bytes": self._plan_bytes,
            "per_parameter_bytes": max(peaks) / self._parameters,
            "rounds_per_s": rates,
            "round_bytes": round_bytes,
            "copies_per_s": copy_bytes_per_s(largest) / round_bytes,
            "snapshots": snapshots,
            "passed": max(peaks) < BARS["peak_bytes"] and abs(max(peaks) / self._plan_bytes - 1) <= BARS["plan"],
        }


def random_payload(layout: Any) -> memoryview:
    """Return int4 values like those of a learner."""
    payload = np.random.default_rng(1).integers(0, 256, layout.payload_bytes("int4"), np.uint8)
    for place in layout.places("int4"):
        payload[place.scales : place.codes].view(np.float32)[:] = 1e-4
    return payload.data


def copy_bytes_per_s(elements: int) -> float:
    """Return the bytes per second that a copy in memory reads and writes."""
    source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    taken_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        np.copyto(target, source)
        taken_s.append(time.perf_counter() - began_s)
    return 2 * source.nbytes / min(taken_s)


if __name__ == "__main__":
    main()
