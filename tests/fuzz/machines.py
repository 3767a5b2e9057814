"""Both machines, driven by bytes: each byte of an input chooses a message, a field or an event of the driver.

Messages are well-formed, as the wire sees to it, but may say anything. A peer's fault is data: no message may make a
machine raise.
"""

import json
import math
import typing
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.effects import AdoptState, Merge, Send
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.evaluations import EvaluationPlan
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
    silence_s=8.0,
    heartbeat_s=2.0,
    snapshot_every=5,
    learners_max=8,
)
LEARNER_TYPES: tuple[Any, ...] = typing.get_args(m.LearnerMessage)
SYNCER_TYPES: tuple[Any, ...] = typing.get_args(m.SyncerMessage)
NAMES = ("a", "b", "c", "x" * 100)
ODD_NUMBERS = (9, 17, 100, 1 << 20, 1 << 40, COUNTER_MAX, 0, 1)


class Source:
    """Choices read from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)
        self.over = False
        # These numbers have a meaning for the machine now.
        self.hints = [0]

    def byte(self) -> int:
        value = next(self._data, None)
        self.over = value is None
        return value or 0

    def number(self, least: int = 0) -> int:
        """Draw a number: mostly a meaningful or small one, sometimes the largest or smallest that the wire allows."""
        byte = self.byte()
        if byte >= 240:
            return ODD_NUMBERS[byte % 8]
        if byte >= 100:
            return self.hints[byte % len(self.hints)]
        return -1 if least < 0 and byte >= 90 else byte % 8

    def name(self) -> str:
        byte = self.byte()
        return NAMES[byte % 2] if byte < 200 else NAMES[byte % 4] if byte < 250 else ""

    def rows(self, row: Callable[[], Any]) -> tuple[Any, ...]:
        """One for each fragment, or sometimes another number of them."""
        byte = self.byte()
        return tuple(row() for _ in range(FRAGMENTS if byte < 220 else byte % 5))


FIELDS: dict[str, Callable[[Source], Any]] = {
    "learner_id": Source.name,
    "scores": lambda source: source.rows(lambda: m.Metric("accuracy", source.number() / 4)),
    "receiver": Source.name,
    "donor": Source.name,
    "incarnation": lambda source: 1 + (source.byte() >= 220),
    "fingerprint": lambda source: FINGERPRINT if source.byte() < 240 else (("model", "other"),),
    "adopted": lambda source: source.rows(lambda: m.Adopted(source.number(-1), source.number(), source.number())),
    "arrived": lambda source: source.rows(lambda: m.Arrived(source.number(), source.number(), source.number(-1) / 4)),
    "versions": lambda source: source.rows(lambda: source.number(-1)),
    "digests": lambda source: source.rows(source.number),
    "version": lambda source: source.number(-1),
    "base_version": lambda source: source.number(-1),
}
TYPES: dict[type, Callable[[Source], Any]] = {
    str: lambda source: "reason",
    float: lambda source: source.number() / 4,
    int: Source.number,
    bool: lambda source: source.byte() < 200,
}


def message_of(kind: Any, source: Source) -> m.Message:
    """A message of a class, its fields chosen by the source; `unpack` of the wire has the last word."""
    hints = typing.get_type_hints(kind)
    values = {name: (FIELDS.get(name) or TYPES[hint])(source) for name, hint in hints.items()}
    if kind is m.Hello:
        values["digests"] = (values["digests"] + (0,) * FRAGMENTS)[: len(values["versions"])]
        values["versions"] = values["versions"][: len(values["digests"])]
    made: m.Message = kind(**values)
    return made


def through_the_wire(message: m.Message) -> m.Message | None:
    """The message as it arrives, or None where the wire stops it."""
    try:
        frame = pb.Frame.FromString(wire.pack_body(message))
        return wire.unpack_body(frame, str(frame.WhichOneof("body")))
    except ValueError:
        return None


def new_syncer() -> Syncer:
    syncer = Syncer(CONFIG, 50, FINGERPRINT, plan=EvaluationPlan(8.0, 3))
    syncer.on_begin((1, 2, 3), 0.0)
    return syncer


def greeting(name: str, incarnation: int = 1) -> m.Hello:
    return m.Hello(name, incarnation, FINGERPRINT, (0,) * FRAGMENTS, (1, 2, 3), 1, 4, 0)


class Honest:
    """Learner that follows the protocol, so that inputs reach far; its messages may be changed on their way."""

    def __init__(self, name: str) -> None:
        self.report = m.StepReport(name, 1, 0, 0, 0, (m.Adopted(0, 0, 0),) * FRAGMENTS, 0.5, 2.0, 0, 0)
        self.asked: list[m.Message] = []

    def hear(self, message: m.Message) -> None:
        report = self.report
        if isinstance(message, m.GlobalFragment):
            held = m.Adopted(message.version, report.local_step, report.tokens)
            adopted = tuple(held if p == message.fragment_id else old for p, old in enumerate(report.adopted))
            self.report = report._replace(adopted=adopted, global_step=message.global_step)
        elif isinstance(message, m.Lease):
            self.report = report._replace(granted=message.first_sample + message.stop - message.start)
        elif isinstance(message, m.PullRequest | m.AnchorRequest | m.StatePull | m.Evaluate):
            self.asked = [*self.asked[-5:], message]

    def step(self) -> m.StepReport:
        old = self.report
        self.report = old._replace(local_step=old.local_step + 1, tokens=old.tokens + 64, samples=old.samples + 4)
        return self.report

    def answer(self) -> m.Message:
        report = self.report
        name, incarnation, step = report.learner_id, report.incarnation, report.local_step
        asked = self.asked.pop(0) if self.asked else None
        if isinstance(asked, m.PullRequest):
            base, samples = report.adopted[asked.fragment_id], report.samples
            steps, tokens = step - base.local_step, report.tokens - base.tokens
            round_ = (asked.global_step, asked.fragment_id)
            return m.FragmentValue(
                name, incarnation, *round_, asked.local_step, steps, tokens, base.version, samples, 8
            )
        if isinstance(asked, m.AnchorRequest):
            return m.AnchorValue(name, incarnation, asked.fragment_id, asked.version, 5, 8)
        if isinstance(asked, m.Evaluate):
            versions = tuple(held.version for held in report.adopted)
            return m.Score(name, incarnation, asked.number, 0, versions, 2.0, 3.0, 64, (), 0.5, "")
        if isinstance(asked, m.StatePull):
            return m.StateChunk(name, incarnation, asked.receiver, step, asked.part, 6, 9, 8)
        return m.StateRequest(name, incarnation, report.global_step, "", 0, 0)


def changed(message: m.Message, source: Source) -> m.Message:
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
            if isinstance(effect, Send):
                # Every message that the machine wants to send can be packed.
                wire.pack_body(effect.message)
                if effect.peer in learners:
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
    said: m.Message | None = None
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
        return syncer.on_message(typing.cast(m.LearnerMessage, heard), now_s) if heard is not None else []
    if event < 200:
        return syncer.on_tick(now_s)
    if event < 230 and merges:
        excluded = tuple(each.learner_id for each in merges[0].contributions[: max(0, source.byte() - 200) % 3])
        return syncer.on_merged(merges.pop(0).global_step, source.number(), excluded, now_s)
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


def run_learner(data: bytes) -> None:
    """A learner that is connected; then messages, steps, ticks and lost links in any order."""
    source = Source(data)
    machine = Learner("a", 1, CONFIG, FINGERPRINT, step_samples=4)
    now_s, connected = 0.0, True
    effects = machine.on_connected(now_s)
    begun = source.byte()
    # The machine gets as far as training, or as far as requesting a state in a run that is under way.
    if begun < 200:
        clock = 0 if begun < 100 else 7
        for message in (
            m.Welcome(clock, (clock,) * FRAGMENTS, 1),
            *(m.GlobalFragment(clock, p, clock, 1, 1 + p, 8) for p in range(FRAGMENTS)),
            m.Lease(0, 0, 256),
        ):
            effects += machine.on_message(message, now_s)
    wanted: list[m.StateRequest] = []
    while True:
        for effect in list(effects):
            if isinstance(effect, AdoptState):
                effects += machine.on_state_adopted(source.byte() < 200, now_s)
            elif isinstance(effect, Send) and isinstance(effect.message, m.StateRequest):
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


def learner_event(
    machine: Learner, wanted: list[m.StateRequest], source: Source, event: int, now_s: float
) -> list[Any]:
    """One input of the machine, chosen by the source."""
    said: m.Message | None = None
    if event < 130:
        said = message_of(SYNCER_TYPES[event % len(SYNCER_TYPES)], source)
    elif event < 180 and wanted:
        ask = wanted.pop(0)
        said = changed(m.StateChunk(ask.donor or "b", 1, "a", ask.donor_step or 9, ask.part, 6, 9, 8), source)
    if said is not None:
        heard = through_the_wire(said)
        return machine.on_message(typing.cast(m.SyncerMessage, heard), now_s) if heard is not None else []
    if event < 225 and machine.examination.running:
        found = m.Score("", 0, 0, 0, (), source.number() / 4, math.nan, 64, (), 0.5, "")
        return machine.on_evaluated(found, now_s)
    if event < 225 and machine.may_step():
        batch = machine.take_batch()
        return machine.on_step(64, 0.5, 1.0, now_s, samples_end=batch.end)
    if event < 235:
        return machine.on_tick(now_s)
    machine.on_corrupt(now_s)
    return []


EXAMPLES: tuple[m.Message, ...] = tuple(
    message._replace(learner_id="a", incarnation=1)
    if hasattr(message, "learner_id") and not isinstance(message, m.StateChunk)
    else message
    for message in (
        m.Heartbeat("a", 1),
        greeting("a"),
        m.StateChunk("a", 1, "b", 3, 0, 2, 99, 10),
        m.StepReport("a", 1, 1, 64, 0, (m.Adopted(0, 0, 0),) * FRAGMENTS, 0.5, 2.0, 4, 256),
        *(
            message_of(kind, Source(bytes([step]) * 40))
            for kind in (*LEARNER_TYPES, *SYNCER_TYPES)
            for step in (0, 1, 3)
            if kind not in (m.Hello, m.StateChunk)
        ),
    )
)
_EXPERIENCE = bytes(range(7, 250, 9)) * 3
# Both learners step and answer, and a merge ends.
_ROUNDS = bytes([1, 0, 0, 1, 1, 0, 0, 70, 0, 0, 71, 0, 0, 201, 0, 0])
SYNCER_SEEDS = (
    bytes(40),
    _ROUNDS * 6,
    _ROUNDS * 2 + bytes([1, 251, 1, 0, 0, 1, 183, 1, 182, 0, 71, 0, 0, 70, 0]) + _ROUNDS,
    bytes([1, 1]) * 30,
    _EXPERIENCE,
    bytes(reversed(_EXPERIENCE)),
)
# It recovers a donor's state, and then trains.
_STATE = bytes([150]) + bytes([1, 170, 0]) * 8 + bytes([1, 200]) * 20
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
