"""Real machines joined by a fake wire without time: a message arrives when the test says so, in the order it was sent.

The pair also plays the drivers' part of the contract, and fails the test when a machine breaks it: a kept payload is
freed exactly once, adopted versions only grow, nothing without a step is merged, rounds in flight stay bounded, and
a tick never leaves a deadline that has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.protocol.learner import STOPPED, Learner
from diloco_jax.protocol.messages import (
    SYNCER,
    Adopt,
    Discard,
    Drop,
    Effect,
    FragmentValue,
    Heartbeat,
    Merge,
    Message,
    Note,
    Refuse,
    Send,
    Stage,
    Unstage,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.protocol.tape import TapedSyncer, replay
from tests.protocol.prose import effect_text, message_text

FINGERPRINT = (("model", "abc"), ("sync_every", "2"))
# Two fragments that take turns, learners that beat their hearts seldom: short transcripts.
SMALL: dict[str, Any] = {"sync_every": 2, "num_fragments": 2, "heartbeat_s": 5.0, "lease_s": 20.0, "resend_s": 10.0}
TICKS_MAX = 1000


class Pair:
    """One syncer, any number of learners, and the wire between them.

    Args:
        total_steps: global steps of the run.
        fingerprint: what the syncer was built from; learners have FINGERPRINT unless they say otherwise.
        says_copies: whether `lines` tells of staged copies; the story is easier to follow without.
        config: settings that differ from SMALL and the defaults.
    """

    def __init__(
        self,
        *,
        total_steps: int = 100,
        fingerprint: tuple[tuple[str, str], ...] = FINGERPRINT,
        says_copies: bool = False,
        **config: Any,
    ) -> None:
        self.config = ProtocolConfig(**SMALL | config)
        self._new_syncer: Callable[[], Syncer] = lambda: Syncer(self.config, total_steps, fingerprint)
        self.syncer = self._new_syncer()
        self.tape: list[str] = []
        self._taped = TapedSyncer(self.syncer, self.tape.append)
        self.now_s = 0.0
        self.learners: dict[str, Learner] = {}
        self.linked: set[str] = set()
        self.held: set[str] = set()  # whose wire holds what is sent: "a", or "a:StepReport" for one kind of message
        self.holds_merges = False
        self.merging: list[int] = []  # rounds whose merge the driver has begun
        self.wire: deque[tuple[str, str, Message]] = deque()  # sender, receiver, message
        self.sent: list[tuple[str, str, Message]] = []  # everything that was ever sent
        self.effects: list[Effect] = []  # everything that the syncer asked for
        self.history: list[list[Effect]] = []  # the same, input by input
        self.adoptions: list[tuple[str, int, int]] = []  # learner, fragment, version
        self.lines: list[str] = []  # what happened, as prose
        self._says_copies = says_copies
        self._payloads: set[tuple[int, str]] = set()
        self._adopted: dict[tuple[Learner, int], int] = {}

    # ---- commands -------------------------------------------------------------------------------------------------

    def join(self, *names: str, incarnation: int = 1, fingerprint: tuple[tuple[str, str], ...] = FINGERPRINT) -> None:
        """Start learners and let them connect; one that runs under the same name is gone."""
        for name in names:
            self._unlink(name)
            self.learners[name] = Learner(name, incarnation, self.config, fingerprint)
            self._link(name)
        self.deliver()

    def step(self, *names: str, step_s: float = 1.0, tokens: int = 10) -> None:
        """Each learner that may finishes one inner step; then everything that is not held is delivered."""
        for name in names:
            learner = self.learners[name]
            if not learner.may_step():
                self._say(f"{name} may not step: it is {learner.state}")
                continue
            effects = learner.on_step(tokens, step_s, 2.5, self.now_s)
            self._say(f"{name} finishes step {learner.local_step}")
            self._run_learner(name, effects)
        self.deliver()

    def wait(self, seconds: float) -> None:
        """Let time pass: every deadline on the way gets its tick."""
        end_s = self.now_s + seconds
        for _ in range(TICKS_MAX):
            due = [d for d in self._deadlines() if d <= end_s]
            if not due:
                self.now_s = end_s
                return
            self.now_s = max(self.now_s, min(due))
            self._run_syncer(self._taped.on_tick(self.now_s))
            deadline_s = self.syncer.next_deadline_s()
            assert deadline_s is None or deadline_s > self.now_s, "the driver would spin"
            for name in sorted(self.linked):
                self._run_learner(name, self.learners[name].on_tick(self.now_s))
            self.deliver()
        raise AssertionError(f"{TICKS_MAX} ticks within {seconds} s")

    def deliver(self) -> None:
        """Move messages until nothing is under way but what is held."""
        waiting: deque[tuple[str, str, Message]] = deque()
        while self.wire:
            sender, receiver, message = self.wire.popleft()
            name = receiver if sender == SYNCER else sender
            if name in self.held or f"{name}:{type(message).__name__}" in self.held:
                waiting.append((sender, receiver, message))
            else:
                self.arrive(sender, receiver, message)
        self.wire = waiting

    def arrive(self, sender: str, receiver: str, message: Message) -> None:
        """Hand one message to its receiver, in or out of turn."""
        if not isinstance(message, Heartbeat):
            self._say_arrival(sender, receiver, message)
        if receiver == SYNCER:
            effects = self._taped.on_message(message, self.now_s)  # type: ignore[arg-type]
            if isinstance(message, FragmentValue) and not any(
                isinstance(e, Drop) and e.peer == sender for e in effects
            ):
                key = (message.global_step, sender)
                assert key not in self._payloads, f"a second payload of {sender} for round {message.global_step}"
                self._payloads.add(key)
            self._run_syncer(effects)
        else:
            learner = self.learners[receiver]
            self._run_learner(receiver, learner.on_message(message, self.now_s))  # type: ignore[arg-type]

    def merge(self) -> None:
        """Finish the merges that were held."""
        while self.merging:
            self._run_syncer(self._taped.on_merged(self.merging.pop(0), self.now_s))
            self.deliver()

    def cut(self, *names: str, reason: str = "connection reset") -> None:
        """The link breaks; both sides learn of it, what was under way is lost."""
        for name in names:
            self._unlink(name)
            self._run_learner(name, self.learners[name].on_disconnected(self.now_s))
            self._lose(name, reason)
        self.deliver()

    def crash(self, *names: str, reason: str = "connection reset") -> None:
        """The learner is dead; only the syncer is there to notice."""
        for name in names:
            self._unlink(name)
            learner = self.learners.pop(name)
            self._lose(learner.learner_id, reason, learner.incarnation)
        self.deliver()

    def connect(self, *names: str) -> None:
        """The same learners, with what they hold, dial again."""
        for name in names:
            self._link(name)
        self.deliver()

    def leave(self, *names: str, reason: str = "asked to") -> None:
        for name in names:
            self._run_learner(name, self.learners[name].leave(reason, self.now_s))
        self.deliver()

    def lose_wire(self, name: str) -> list[Message]:
        """Everything under way from and to the learner is lost, without anybody noticing."""
        lost = [message for sender, receiver, message in self.wire if name in (sender, receiver)]
        for message in lost:
            if not isinstance(message, Heartbeat):  # they come by themselves and would drown the rest
                self._say(f"never arrives: {message_text(message)}")
        self.wire = deque(item for item in self.wire if name not in item[:2])
        return lost

    # ---- what tests ask -------------------------------------------------------------------------------------------

    def merges(self) -> list[Merge]:
        return [effect for effect in self.effects if isinstance(effect, Merge)]

    def notes(self, kind: str) -> list[Note]:
        return [effect for effect in self.effects if isinstance(effect, Note) and effect.kind == kind]

    def drops(self) -> list[str]:
        return [effect.reason for effect in self.effects if isinstance(effect, Drop)]

    def messages(self, kind: type[Message], name: str = "") -> list[Any]:
        """Messages of one kind that were sent, by or to the learner if one is named."""
        return [m for sender, receiver, m in self.sent if isinstance(m, kind) and name in ("", sender, receiver)]

    def contributors(self) -> list[tuple[str, ...]]:
        """Who was merged, round by round."""
        return [tuple(part.learner_id for part in merge.parts) for merge in self.merges()]

    def check_replay(self) -> None:
        """A fresh syncer that is fed the tape asks for the same, input by input."""
        assert list(replay(self.tape, self._new_syncer())) == self.history

    # ---- the drivers ----------------------------------------------------------------------------------------------

    def _link(self, name: str) -> None:
        assert name not in self.linked, f"{name} is connected"
        self.linked.add(name)
        self._run_learner(name, self.learners[name].on_connected(self.now_s))

    def _unlink(self, name: str) -> None:
        self.linked.discard(name)
        self.lose_wire(name)

    def _lose(self, name: str, reason: str, incarnation: int | None = None) -> None:
        incarnation = self.learners[name].incarnation if incarnation is None else incarnation
        self._run_syncer(self._taped.on_disconnect(name, incarnation, reason, self.now_s))

    def _run_learner(self, name: str, effects: list[Effect]) -> None:
        learner = self.learners[name]
        for effect in effects:
            if isinstance(effect, Send):
                self._send(name, effect.peer, effect.message)
                continue
            if isinstance(effect, Adopt):
                key = (learner, effect.fragment_id)
                assert effect.version > self._adopted.get(key, -1), f"{name} went back to version {effect.version}"
                self._adopted[key] = effect.version
                self.adoptions.append((name, effect.fragment_id, effect.version))
            self._say_effect(name, effect)
        if learner.state == STOPPED:
            self.linked.discard(name)

    def _run_syncer(self, effects: list[Effect]) -> None:
        self.history.append(effects)
        self.effects += effects
        merged_now: list[int] = []
        for effect in effects:
            if isinstance(effect, Send):
                self._send(SYNCER, effect.peer, effect.message)
                continue
            self._say_effect(SYNCER, effect)
            if isinstance(effect, Merge):
                assert all(part.steps >= 1 and part.tokens >= 1 for part in effect.parts), effect
                self._free(effect.global_step, {part.learner_id for part in effect.parts})
                self.merging.append(effect.global_step)
                merged_now.append(effect.global_step)
            elif isinstance(effect, Discard):
                self._free(effect.global_step, set())
        in_flight = len(self.syncer._rounds)
        assert in_flight <= max(1, self.config.overlap_steps), f"{in_flight} rounds in flight"
        if not self.holds_merges:
            for global_step in merged_now:
                self.merging.remove(global_step)
                self._run_syncer(self._taped.on_merged(global_step, self.now_s))

    def _free(self, global_step: int, expected: set[str]) -> None:
        held = {name for step, name in self._payloads if step == global_step}
        assert held == expected, f"round {global_step}: payloads of {held} are held, {expected} are merged"
        self._payloads -= {(global_step, name) for name in held}

    def _send(self, sender: str, receiver: str, message: Message) -> None:
        name = receiver if sender == SYNCER else sender
        self.sent.append((sender, receiver, message))
        if name in self.linked or (isinstance(message, Refuse) and name in self.learners):
            self.wire.append((sender, receiver, message))

    def _deadlines(self) -> Iterator[float]:
        machines = [self.syncer, *(self.learners[name] for name in self.linked)]
        for machine in machines:
            deadline_s = machine.next_deadline_s()
            if deadline_s is not None:
                yield deadline_s

    # ---- prose ----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.lines.append(text)

    def _say_effect(self, name: str, effect: Effect) -> None:
        if self._says_copies or not isinstance(effect, Stage | Unstage):
            self._say(f"    {name} {effect_text(effect)}")

    def _say_arrival(self, sender: str, receiver: str, message: Message) -> None:
        self._say(f"{sender} -> {receiver}: {message_text(message)}")
