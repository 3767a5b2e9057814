"""A real syncer with a tiny model, and stub learners that report, answer pulls and read global fragments.

The stubs of a case share one process and one event loop, because a thread per connection would cost more than the
syncer.
"""

import asyncio
import json
import multiprocessing
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.kinds import Kind
from diloco_jax.protocol.messages import (
    Adopted,
    FragmentValue,
    Heartbeat,
    Hello,
    Message,
    StepReport,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.records.files import ADDRESS_FILE, STATUS_FILE
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig, TrainConfig
from diloco_jax.transport import wire
from diloco_jax.transport.link import TransportConfig, split_address
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.stream import lane_header
from diloco_jax.transport.session.stripe import GREETING

FRAGMENTS = 6
WIDTH = 64
POLL_S = 0.1
START_S = 180.0
LEAVE_S = 10.0
SETTLE_S = 3.0


class Loop(NamedTuple):
    """Figures of a syncer during a measurement."""

    wall_s: float
    rounds: int
    parts: int
    cpu_s: float
    stubs_cpu_s: float


class TinyModel:
    """The description of a model for a SyncerRun, with one matrix for each fragment."""

    corpus = ""
    shapes = {f"layer_{number}/kernel": (WIDTH, WIDTH) for number in range(FRAGMENTS)}
    kinds = dict.fromkeys(shapes, Kind("matrix"))

    def initial_parameters(self) -> Any:
        """Yield the initial values."""
        return ((path, np.zeros(shape, np.float32)) for path, shape in self.shapes.items())


def config_of(grace_steps: float = 0.0) -> RunConfig:
    """Return settings with a quorum of one and no grace window, so that every report may close a round."""
    protocol = ProtocolConfig(
        sync_every=FRAGMENTS, num_fragments=FRAGMENTS, grace_steps_max=grace_steps, learners_max=512
    )
    transport = TransportConfig(stripes=1, connections_max=4096)
    return replace(
        RunConfig(protocol=protocol, transport=transport, name="control"), train=TrainConfig(steps=10**9), trackers=()
    )


def serve(folder: Path) -> None:
    """Run a syncer in this process until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    model: Any = TinyModel()
    SyncerRun(config_of(), folder, stop, model).run()


class Stubs:
    """Stub learners of one process, each with a session of a control and a bulk connection."""

    def __init__(self, address: str, learners: int, step_s: float) -> None:
        self.config = config_of()
        run = resolve(self.config, TinyModel.shapes, TinyModel.kinds)
        self.fingerprint = run.fingerprint("")
        self.address, self.step_s = address, step_s
        self.payloads = payloads_of(self.config, run.plan)
        self.names = [f"stub-{number:03d}" for number in range(learners)]

    async def run(self) -> None:
        """Run all learners until they are cancelled."""
        await asyncio.gather(*(self._learn(number, name) for number, name in enumerate(self.names)))

    async def _learn(self, number: int, name: str) -> None:
        await asyncio.sleep(number * 0.02)
        stub = _Stub(self, name)
        try:
            await stub.open()
            await asyncio.gather(
                stub.read(stub.read_control()), stub.read(stub.read_bulk()), stub.step(number / len(self.names))
            )
        finally:
            await stub.close()


class _Stub:
    def __init__(self, owner: Stubs, name: str) -> None:
        self.owner, self.name = owner, name
        header = pb.Header(run_id="control", incarnation=1, session=time.monotonic_ns(), stripes=1)
        self.header = lane_header(header, pb.LANE_CONTROL, 0, name)
        self.packed = wire.pack_header(self.header)
        self.adopted = [Adopted(-1, 0, 0)] * FRAGMENTS
        # The adopted versions after the newest step.
        self.staged = self.adopted
        self.arrived: list[tuple[int, int, float]] = []
        self.local_step = self.granted = self.sent = self.global_step = 0
        self.bulk: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Open both streams, and greet."""
        options = [*calls.channel_options(self.owner.config.transport), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(self.owner.address, options)
        metadata = (calls.header_metadata(self.header),)
        self.control = self.channel.stream_stream(f"/{calls.SERVICE}/{calls.OPEN}")(metadata=metadata)
        ticket = dict(await self.control.initial_metadata())[calls.TICKET_KEY]
        self.frames, self.bulk = await asyncio.open_connection(*split_address(self.owner.address))
        self.bulk.write(GREETING + ticket + b"\0")
        # The first frame means that the session is open.
        assert await self.control.read() is not grpc.aio.EOF
        none = (-1,) * FRAGMENTS
        await self.tell(Hello(self.name, 1, self.owner.fingerprint, none, (0,) * FRAGMENTS, 0, 1, 0))

    async def close(self) -> None:
        """Close both connections."""
        await self.channel.close()
        if self.bulk is not None:
            self.bulk.close()

    async def tell(self, message: Message) -> None:
        """Send a control message."""
        await self.control.write(wire.control_frame(self.packed, wire.pack_body(message)))

    async def step(self, phase: float) -> None:
        """Report a step every `step_s` seconds."""
        await asyncio.sleep(phase * self.owner.step_s)
        due_s = time.monotonic()
        while True:
            if self.granted and all(each.version >= 0 for each in self.adopted):
                self.local_step, self.staged = self.local_step + 1, list(self.adopted)
                arrived = tuple((p, version, time.monotonic() - at_s) for p, version, at_s in self.arrived)
                self.arrived.clear()
                report = StepReport(
                    self.name, 1, self.local_step, self.local_step * 128, self.global_step, tuple(self.adopted),
                    self.owner.step_s, 2.0, min(self.local_step, self.granted), self.granted, arrived,
                )  # fmt: skip
                await self.tell(report)
            else:
                await self.tell(Heartbeat(self.name, 1))
            due_s += self.owner.step_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def read_control(self) -> AsyncIterator[bytes]:
        """Yield control frames."""
        while (raw := await self.control.read()) is not grpc.aio.EOF:
            yield raw

    async def read_bulk(self) -> AsyncIterator[bytes]:
        """Yield the heads of bulk frames."""
        while True:
            prefix = wire.read_prefix(await self.frames.readexactly(wire.PREFIX_BYTES))
            yield await self.frames.readexactly(prefix.head_bytes)
            await self.frames.readexactly(prefix.data_bytes)

    async def read(self, heads: AsyncIterator[bytes]) -> None:
        """Answer pulls, and keep the versions that arrive."""
        async for head in heads:
            frame = pb.Frame.FromString(head)
            body = frame.WhichOneof("body")
            if body == "global_fragment":
                value = frame.global_fragment
                self.global_step = max(self.global_step, value.global_step)
                self.adopted[value.fragment_id] = Adopted(value.version, self.local_step, self.local_step * 128)
                self.arrived.append((value.fragment_id, value.version, time.monotonic()))
            elif body == "lease":
                lease = frame.lease
                self.granted = max(self.granted, lease.first_sample + lease.stop - lease.start)
            elif body == "pull_request":
                await self.answer(frame.pull_request)

    async def answer(self, pull: Any) -> None:
        """Send a fragment's value."""
        assert self.bulk is not None
        self.sent += 1
        held, payload = self.staged[pull.fragment_id], self.owner.payloads[pull.fragment_id]
        steps, tokens = pull.local_step - held.local_step, pull.local_step * 128 - held.tokens
        counters = (pull.local_step, max(1, steps), max(128, tokens), held.version, pull.local_step, len(payload))
        value = FragmentValue(self.name, 1, pull.global_step, pull.fragment_id, *counters)
        views = [memoryview(payload)]
        for piece in wire.pieces(self.sent, wire.pack_body(value), views, 1 << 20):
            self.bulk.writelines(wire.bulk_frame(wire.piece_head(piece), piece.views, checked=True))
            await self.bulk.drain()


def payloads_of(config: RunConfig, plan: FragmentPlan) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [
        codec.encode(
            {key: rng.normal(0, 1e-3, shape).astype(np.float32) for key, shape in fragment.keys_shapes},
            config.wire.up,
        )
        for fragment in plan.fragments
    ]


def learn(address: str, learners: int, step_s: float) -> None:
    """Run stub learners until the process is ended."""
    asyncio.run(Stubs(address, learners, step_s).run())


def measure_loop(learners: int, step_s: float, seconds: float) -> Loop:
    """Start a syncer and stubs, wait until all of them train, and measure for this many seconds."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        syncer = processes.Process(target=serve, args=(folder,))
        syncer.start()
        stubs = None
        try:
            await_status(folder, lambda _: (folder / ADDRESS_FILE).exists())
            address = (folder / ADDRESS_FILE).read_text(encoding="utf-8")
            stubs = processes.Process(target=learn, args=(address, learners, step_s), daemon=True)
            stubs.start()
            await_status(folder, lambda told: live_of(told) == learners)
            time.sleep(SETTLE_S)
            pids = [each.pid for each in (syncer, stubs) if each.pid is not None]
            before, began_s, cpu_s = read(folder), time.perf_counter(), [cpu_of(pid) for pid in pids]
            time.sleep(seconds)
            after, wall_s, used_s = read(folder), time.perf_counter() - began_s, [cpu_of(pid) for pid in pids]
            if live_of(after) < learners:
                raise TimeoutError(f"only {live_of(after)} of {learners} learners are live after {seconds:g} s")
        finally:
            if stubs is not None:
                stubs.kill()
            syncer.terminate()
            syncer.join(LEAVE_S)
            syncer.kill()
    rounds = after["global_step"] - before["global_step"]
    parts = [told["contributors_per_round"] * told["global_step"] for told in (before, after)]
    cpu = [later - earlier for earlier, later in zip(cpu_s, used_s, strict=True)]
    return Loop(wall_s, rounds, round(parts[1] - parts[0]), *cpu)


def read(folder: Path) -> dict[str, Any]:
    """Read the status of a syncer."""
    return dict(json.loads((folder / STATUS_FILE).read_text(encoding="utf-8")))


def live_of(told: dict[str, Any]) -> int:
    """Count the learners that train."""
    return sum(row["state"] == "active" for row in told["learners"])


def await_status(folder: Path, ready: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a condition holds for a syncer's status."""
    until_s = time.monotonic() + START_S
    while not ((folder / STATUS_FILE).exists() and ready(read(folder))):
        if time.monotonic() > until_s:
            raise TimeoutError(f"the syncer in {folder} was not ready within {START_S:g} s")
        time.sleep(POLL_S)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process from its CPU clock, because /proc counts in ticks of 10 ms."""
    # This is clock_getcpuclockid(3) of Linux.
    return time.clock_gettime((~pid << 3) | 2)
