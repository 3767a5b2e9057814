"""Both machines, driven by bytes: each byte of an input chooses a message, a field or an event of the driver.

Messages are well-formed, as the wire sees to it, but may say anything. A peer's fault is data: no message may make a
machine raise.
"""

from __future__ import annotations

import json
import math
import typing
from typing import Any

from diloco_jax.protocol.effects import AdoptState, Merge, Send
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.protocol.messages import (
    Adopted,
    AnchorRequest,
    AnchorValue,
    Arrived,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    LearnerMessage,
    Lease,
    Message,
    PullRequest,
    StatePart,
    StatePull,
    StateRequest,
    StepReport,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.transport import wire
from diloco_jax.transport.limits import COUNTER_MAX
from diloco_jax.transport.proto import diloco_pb2 as pb

FRAGMENTS = 3
FINGERPRINT = (("model", "m"),)
CONFIG = ProtocolConfig(
    sync_every=6,
    num_fragments=FRAGMENTS,
    overlap_steps=2,
    lease_s=8.0,
    heartbeat_s=2.0,
    snapshot_every=5,
    learners_max=8,
)
LEARNER_TYPES: tuple[Any, ...] = typing.get_args(LearnerMessage)
SYNCER_TYPES: tuple[Any, ...] = typing.get_args(SyncerMessage)
NAMES = ("a", "b", "c", "x" * 100)
ODD_NUMBERS = (9, 17, 100, 1 << 20, 1 << 40, COUNTER_MAX, 0, 1)


class Source:
    """Choices read from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)
        self.over = False
        self.hints = [0]  # numbers that mean something to the machine now

    def byte(self) -> int:
        value = next(self._data, None)
        self.over = value is None
        return value or 0

    def number(self, least: int = 0) -> int:
        """Mostly one that means something, or a small one; sometimes one at an end of what the wire lets through."""
        byte = self.byte()
        if byte >= 240:
            return ODD_NUMBERS[byte % 8]
        if byte >= 100:
            return self.hints[byte % len(self.hints)]
        return -1 if least < 0 and byte >= 90 else byte % 8

    def name(self) -> str:
        byte = self.byte()
        return NAMES[byte % 2] if byte < 200 else NAMES[byte % 4] if byte < 250 else ""

    def count(self) -> int:
        byte = self.byte()
        return FRAGMENTS if byte < 220 else byte % 5


def message_of(kind: Any, source: Source) -> Message:
    """A message of a class, its fields chosen by the source; `unpack` of the wire has the last word."""
    values: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if name in ("learner_id", "receiver", "donor"):
            values[name] = source.name()
        elif name == "incarnation":
            values[name] = 1 + (source.byte() >= 220)
        elif name == "fingerprint":
            values[name] = FINGERPRINT if source.byte() < 240 else (("model", "other"),)
        elif name == "adopted":
            rows = [(source.number(-1), source.number(), source.number()) for _ in range(source.count())]
            values[name] = tuple(Adopted(*row) for row in rows)
        elif name == "arrived":
            values[name] = tuple(
                Arrived(source.number(), source.number(), source.number(-1) / 4) for _ in range(source.count())
            )
        elif name in ("versions", "digests"):
            least = -1 if name == "versions" else 0
            values[name] = tuple(source.number(least) for _ in range(source.count()))
        elif hint is str:
            values[name] = "reason"
        elif hint is float:
            values[name] = source.number() / 4
        else:
            values[name] = source.number(-1 if name in ("version", "base_version") else 0)
    if kind is Hello:
        values["digests"] = (values["digests"] + (0,) * FRAGMENTS)[: len(values["versions"])]
        values["versions"] = values["versions"][: len(values["digests"])]
    made: Message = kind(**values)
    return made


def through_the_wire(message: Message) -> Message | None:
    """The message as it arrives, or None where the wire stops it."""
    try:
        frame = pb.Frame.FromString(wire.pack_body(message))
        return wire.unpack_body(frame, str(frame.WhichOneof("body")))
    except ValueError:
        return None


# ---- the syncer's -----------------------------------------------------------------------------------------------


def new_syncer() -> Syncer:
    syncer = Syncer(CONFIG, 50, FINGERPRINT)
    syncer.on_begin((1, 2, 3), 0.0)
    return syncer


def greeting(name: str, incarnation: int = 1) -> Hello:
    return Hello(name, incarnation, FINGERPRINT, (0,) * FRAGMENTS, (1, 2, 3), 1, 4, 0)


class Honest:
    """A learner that keeps to the protocol, so that inputs get somewhere; its words may be changed on their way."""

    def __init__(self, name: str) -> None:
        self.report = StepReport(name, 1, 0, 0, 0, (Adopted(0, 0, 0),) * FRAGMENTS, 0.5, 2.0, 0, 0)
        self.asked: list[Message] = []

    def hear(self, message: Message) -> None:
        report = self.report
        if isinstance(message, GlobalFragment):
            held = Adopted(message.version, report.local_step, report.tokens)
            adopted = tuple(held if p == message.fragment_id else old for p, old in enumerate(report.adopted))
            self.report = report._replace(adopted=adopted, global_step=message.global_step)
        elif isinstance(message, Lease):
            self.report = report._replace(granted=message.first_sample + message.stop - message.start)
        elif isinstance(message, PullRequest | AnchorRequest | StatePull):
            self.asked = [*self.asked[-5:], message]

    def step(self) -> StepReport:
        old = self.report
        self.report = old._replace(local_step=old.local_step + 1, tokens=old.tokens + 64, samples=old.samples + 4)
        return self.report

    def answer(self) -> Message:
        report = self.report
        name, incarnation, step = report.learner_id, report.incarnation, report.local_step
        asked = self.asked.pop(0) if self.asked else None
        if isinstance(asked, PullRequest):
            base, samples = report.adopted[asked.fragment_id], report.samples
            steps, tokens = step - base.local_step, report.tokens - base.tokens
            round_ = (asked.global_step, asked.fragment_id)
            return FragmentValue(name, incarnation, *round_, asked.local_step, steps, tokens, base.version, samples, 8)
        if isinstance(asked, AnchorRequest):
            return AnchorValue(name, incarnation, asked.fragment_id, asked.version, 5, 8)
        if isinstance(asked, StatePull):
            versions = tuple(held.version for held in report.adopted)
            return StatePart(name, incarnation, asked.receiver, step, versions, asked.part, 6, 9, 8)
        return StateRequest(name, incarnation, report.global_step, "", 0, 0)


def changed(message: Message, source: Source) -> Message:
    """Mostly the message as it is; sometimes one number of it is another."""
    byte = source.byte()
    numbers = [field for field in message._fields if type(getattr(message, field)) is int and field != "incarnation"]
    return message if byte < 200 or not numbers else message._replace(**{numbers[byte % len(numbers)]: source.number()})


def run_syncer(data: bytes, syncer: TapedSyncer | None = None) -> TapedSyncer:
    """Two learners greet; then messages, ticks, lost links, ends of merges and restarts in any order."""
    source = Source(data)
    syncer = syncer or TapedSyncer(new_syncer(), lambda line: None)
    machine, now_s = syncer.syncer, 0.0
    learners = {name: Honest(name) for name in NAMES[:2]}
    effects: list[Any] = [e for name in learners for e in syncer.on_message(greeting(name), now_s)]
    merges: list[Merge] = []
    while True:
        for effect in effects:
            if isinstance(effect, Send) and effect.peer in learners:
                learners[effect.peer].hear(effect.message)
        merges += [effect for effect in effects if isinstance(effect, Merge)]
        deadline_s = machine.next_deadline_s()
        assert deadline_s is None or math.isfinite(deadline_s)
        machine.waiting_for(now_s)
        if source.over:
            break
        now_s += source.byte() % 16 / 4
        source.hints = [machine.global_step, *machine.versions, learners["a"].report.local_step]
        effects = syncer_event(syncer, learners, merges, source, now_s)
    assert len(machine.membership.members) <= CONFIG.learners_max
    return syncer


def syncer_event(
    syncer: TapedSyncer, learners: dict[str, Honest], merges: list[Merge], source: Source, now_s: float
) -> list[Any]:
    """One input of the machine, chosen by the source."""
    machine, event = syncer.syncer, source.byte()
    said: Message | None = None
    if event < 70:
        said = changed(learners[NAMES[event % 2]].step(), source)
    elif event < 120:
        said = changed(learners[NAMES[event % 2]].answer(), source)
    elif event < 180:
        said = message_of(LEARNER_TYPES[event % len(LEARNER_TYPES)], source)
    elif event < 185:
        said = greeting(NAMES[event % 2])
    if said is not None:
        heard = through_the_wire(said)
        return syncer.on_message(typing.cast(LearnerMessage, heard), now_s) if heard is not None else []
    if event < 200:
        return syncer.on_tick(now_s)
    if event < 230 and merges:
        left_out = tuple(part.learner_id for part in merges[0].parts[: max(0, source.byte() - 200) % 3])
        return syncer.on_merged(merges.pop(0).global_step, source.number(), left_out, now_s)
    if event < 240:
        return syncer.on_disconnect(source.name(), 1 + (source.byte() >= 220), "lost", now_s)
    if event < 250:
        before = json.dumps(machine.state())
        machine.restore(json.loads(before))
        assert json.dumps(machine.state()) == before
        return []
    merges.clear()
    held = tuple(max(0, version - source.byte() % 3) for version in machine.versions)
    return syncer.on_restart(held, (5,) * FRAGMENTS, -1, now_s)


# ---- the learner's ----------------------------------------------------------------------------------------------


def run_learner(data: bytes) -> None:
    """A learner that is connected; then messages, steps, ticks and lost links in any order."""
    source = Source(data)
    machine = Learner("a", 1, CONFIG, FINGERPRINT, step_samples=4)
    now_s, connected = 0.0, True
    effects = machine.on_connected(now_s)
    begun = source.byte()
    if begun < 200:  # it gets as far as training, in a run that is under way: as far as asking for a state
        clock = 0 if begun < 100 else 7
        for message in (
            Welcome(clock, (clock,) * FRAGMENTS, 1),
            *(GlobalFragment(clock, p, clock, 1, 1 + p, 8) for p in range(FRAGMENTS)),
            Lease(0, 0, 256),
        ):
            effects += machine.on_message(message, now_s)
    wanted: list[StateRequest] = []
    while True:
        for effect in list(effects):
            if isinstance(effect, AdoptState):
                effects += machine.on_state_adopted(source.byte() < 200, now_s)
            elif isinstance(effect, Send) and isinstance(effect.message, StateRequest):
                wanted = [*wanted[-7:], effect.message]
        machine.next_deadline_s()
        if source.over or machine.state == STOPPED:
            break
        now_s += source.byte() % 16 / 4
        source.hints = [machine.global_step, machine.local_step, *(held.version for held in machine.adopted)]
        event = source.byte()
        if event >= 240:
            effects = machine.on_disconnected(now_s) if connected else machine.on_connected(now_s)
            connected = not connected
        else:
            effects = learner_event(machine, wanted if connected else [], source, event if connected else 235, now_s)


def learner_event(machine: Learner, wanted: list[StateRequest], source: Source, event: int, now_s: float) -> list[Any]:
    """One input of the machine, chosen by the source."""
    said: Message | None = None
    if event < 130:
        said = message_of(SYNCER_TYPES[event % len(SYNCER_TYPES)], source)
    elif event < 180 and wanted:
        ask = wanted.pop(0)
        versions = tuple(held.version for held in machine.adopted)
        said = changed(StatePart(ask.donor or "b", 1, "a", ask.donor_step or 9, versions, ask.part, 6, 9, 8), source)
    if said is not None:
        heard = through_the_wire(said)
        return machine.on_message(typing.cast(SyncerMessage, heard), now_s) if heard is not None else []
    if event < 225 and machine.may_step():
        batch = machine.take_batch()
        return machine.on_step(64, 0.5, 1.0, now_s, samples_end=batch.end)
    if event < 235:
        return machine.on_tick(now_s)
    machine.on_corrupt(now_s)
    return []


# ---- seeds ------------------------------------------------------------------------------------------------------

EXAMPLES: tuple[Message, ...] = tuple(
    message._replace(learner_id="a", incarnation=1)
    if hasattr(message, "learner_id") and not isinstance(message, StatePart)
    else message
    for message in (
        Heartbeat("a", 1),
        greeting("a"),
        StatePart("a", 1, "b", 3, (0, 1, 2), 0, 2, 99, 10),
        StepReport("a", 1, 1, 64, 0, (Adopted(0, 0, 0),) * FRAGMENTS, 0.5, 2.0, 4, 256),
        *(
            message_of(kind, Source(bytes([step]) * 40))
            for kind in (*LEARNER_TYPES, *SYNCER_TYPES)
            for step in (0, 1, 3)
            if kind not in (Hello, StatePart)
        ),
    )
)
_EXPERIENCE = bytes(range(7, 250, 9)) * 3
_ROUNDS = bytes([1, 0, 0, 1, 1, 0, 0, 70, 0, 0, 71, 0, 0, 201, 0, 0])  # both step and answer, a merge ends
SYNCER_SEEDS = (
    bytes(40),
    _ROUNDS * 6,
    _ROUNDS * 2 + bytes([1, 251, 1, 0, 0, 1, 183, 1, 182, 0, 71, 0, 0, 70, 0]) + _ROUNDS,
    bytes([1, 1]) * 30,
    _EXPERIENCE,
    bytes(reversed(_EXPERIENCE)),
)
_STATE = bytes([150]) + bytes([1, 170, 0]) * 8 + bytes([1, 200]) * 20  # takes a donor's state over, then trains
LEARNER_SEEDS = (
    _STATE,
    _STATE[:7] + bytes([1, 250, 1, 251]) + _STATE[1:],
    bytes(40),
    bytes([0, 2, 1]) * 20,
    _EXPERIENCE,
    bytes([4, 10, 0, 0, 1, 0]) * 10,
)


def _recorded(data: bytes) -> tuple[bytes, bytes]:
    """The tape and the state of a syncer that went through an input."""
    lines: list[str] = []
    taped = TapedSyncer(new_syncer(), lines.append)
    run_syncer(data, taped)
    return "\n".join(lines).encode(), json.dumps(taped.syncer.state()).encode()


TAPE_SEEDS, SNAPSHOT_SEEDS = (tuple(kind) for kind in zip(*(_recorded(seed) for seed in SYNCER_SEEDS), strict=True))
