"""Which fragments a learner copies to host memory after a step, and how it answers the syncer's requests for values.

The syncer asks for a fragment as it was after a named step, and learns of that step only when it is over. So the
fragments that the next rounds will ask for are copied after every step, and a few copies of each are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.protocol.effects import Adopt, Drop, Effect, Send, Stage, Unstage
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
    Adopted,
    AnchorRequest,
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    PullRequest,
)
from diloco_jax.protocol.pacing import ProtocolConfig, Schedule

STAGED_STEPS_MAX = 3  # copies of one fragment: the grace window spans one step, the pull's way another


class Counters(NamedTuple):
    """Where a learner stood when it staged fragments."""

    local_step: int
    tokens: int
    adopted: tuple[Adopted, ...]  # per fragment
    samples: int


class Stager:
    """The part of the learner's machine that copies fragments, sends them, and takes new ones.

    A value that is sent says from which sample on it holds what samples taught: adopting a global value leaves of the
    work before it nothing ("overwrite"), what was done since the value was staged that went into it ("rebase"; nothing
    if none did), or a share of everything ("blend").

    Args:
        learner_id: its name.
        incarnation: its life.
        config: the numbers of the algorithm.
        adopt_mode: one of these.
        payload_bytes: fragment -> size of its encoded value.
    """

    def __init__(
        self,
        learner_id: str,
        incarnation: int,
        config: ProtocolConfig,
        adopt_mode: str,
        payload_bytes: Mapping[int, int],
    ) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.global_step = 0  # newest known; in lockstep the schedule's own count
        self.local_step = 0
        self.tokens = 0
        self.samples = 0  # of its leases that are trained on
        self.epoch = 0  # newest life of the syncer that is known
        self.adopted: tuple[Adopted, ...] = (Adopted(),) * config.num_fragments
        self.digests = [0] * config.num_fragments
        self._epochs = [0] * config.num_fragments  # lives of the syncer that these values are of
        self._payload_bytes = payload_bytes
        self._config = config
        self._lockstep = config.lockstep
        self._schedule = Schedule(config.sync_every, config.num_fragments)
        self._staged: dict[int, list[Counters]] = {}  # fragment -> of each copy, oldest first
        self._adopt_mode = adopt_mode
        self._since = [0] * config.num_fragments  # samples whose work adoption has overwritten
        self._sent: dict[int, tuple[int, int]] = {}  # fragment -> newest round that a copy was sent for, its samples
        self._wanted: dict[int, int] = {}  # fragment -> round that asked for it before any copy existed
        self._next_round = 1
        self._connected = False

    def _stage_due(self, effects: list[Effect]) -> None:
        """Stage what the next rounds will ask for, and let go of what they will not."""
        if self._lockstep:
            fragments = self._schedule.due_within(self.global_step, 1)
        else:
            fragments = self._schedule.due_within(self._next_round, self._config.overlap_steps)
        for fragment_id in list(self._staged):
            if fragment_id not in fragments:
                self._unstage(fragment_id, effects)
        counters = self._counters()
        for fragment_id in fragments:
            self._stage(fragment_id, counters, effects)

    def _counters(self) -> Counters:
        return Counters(self.local_step, self.tokens, self.adopted, self.samples)

    def _stage(self, fragment_id: int, counters: Counters, effects: list[Effect]) -> None:
        copies = self._staged.setdefault(fragment_id, [])
        copies.append(counters)
        effects.append(Stage(fragment_id, self.local_step))
        if len(copies) > STAGED_STEPS_MAX:
            effects.append(Unstage(fragment_id, copies.pop(0).local_step))

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        for copy in self._staged.pop(fragment_id, ()):
            effects.append(Unstage(fragment_id, copy.local_step))

    def _unstage_all(self) -> list[Effect]:
        effects: list[Effect] = []
        for fragment_id in list(self._staged):
            self._unstage(fragment_id, effects)
        return effects

    def _answer_wanted(self, effects: list[Effect]) -> None:
        for fragment_id, global_step in sorted(self._wanted.items()):
            copies = self._staged.get(fragment_id)
            if not copies or copies[-1].local_step != self.local_step:
                self._stage(fragment_id, self._counters(), effects)
            effects.append(self._value(global_step, fragment_id, self._staged[fragment_id][-1]))
        self._wanted.clear()

    def on_pull(self, message: PullRequest, now_s: float) -> list[Effect]:
        """Answer with the copy of the asked step, or the next newer one; without any, after the next step."""
        global_step, fragment_id = message.global_step, message.fragment_id
        if global_step >= self._next_round:
            self._next_round = global_step + 1
        if not 0 <= fragment_id < len(self.adopted):
            return [Drop(SYNCER, f"pull of unknown fragment {fragment_id}, there are {len(self.adopted)}")]
        if global_step <= self.adopted[fragment_id].version or global_step <= self._wanted.get(fragment_id, 0):
            return []  # a duplicate, or of a round that is over
        for copy in self._staged.get(fragment_id, ()):
            if copy.local_step >= message.local_step:
                return [self._value(global_step, fragment_id, copy)]
        self._wanted[fragment_id] = global_step
        if len(self._wanted) > max(1, self._config.overlap_steps):  # more are never in flight: the oldest is over
            del self._wanted[min(self._wanted, key=self._wanted.__getitem__)]
        return []

    def on_anchor_request(self, message: AnchorRequest, now_s: float) -> list[Effect]:
        """A restarted syncer lacks a global value that is held here, or was replaced by a newer one since."""
        del now_s
        fragment_id, version = message
        held = self.adopted[fragment_id].version if 0 <= fragment_id < len(self.adopted) else NO_VERSION
        if not 0 <= version <= held:
            return [Drop(SYNCER, f"version {version} of fragment {fragment_id} is not held (any more)")]
        digest = self.digests[fragment_id]
        return [Send(SYNCER, AnchorValue(self.learner_id, self.incarnation, fragment_id, held, digest, 0))]

    def _adopt(self, message: GlobalFragment) -> list[Effect]:
        """Take a newer global value: the fragment's counters begin again."""
        fragment_id, version = message.fragment_id, message.version
        adopted = list(self.adopted)
        sent_round, samples = self._sent.get(fragment_id, (version + 1, 0))
        if sent_round <= version:
            del self._sent[fragment_id]  # its round is over; one that is not may still merge it
        merged = sent_round == message.merged_round
        left_out = sent_round <= version and not merged
        if self._adopt_mode == "rebase" and merged:
            self._since[fragment_id] = samples
        elif self._adopt_mode != "blend" or left_out or adopted[fragment_id].version == NO_VERSION:
            self._since[fragment_id] = self.samples
        adopted[fragment_id] = Adopted(version, self.local_step, self.tokens)
        self.adopted = tuple(adopted)
        self._epochs[fragment_id], self.digests[fragment_id] = message.epoch, message.digest
        if message.epoch > self.epoch:
            self.epoch = message.epoch
        if version > self.global_step:
            self.global_step = version
        effects: list[Effect] = [Adopt(fragment_id, version)]
        self._unstage(fragment_id, effects)
        if fragment_id in self._wanted and version >= self._wanted[fragment_id]:
            del self._wanted[fragment_id]
        return effects

    def _value(self, global_step: int, fragment_id: int, copy: Counters) -> Send:
        adopted = copy.adopted[fragment_id]
        self._sent[fragment_id] = (global_step, copy.samples)
        value = FragmentValue(
            self.learner_id,
            self.incarnation,
            global_step,
            fragment_id,
            copy.local_step,
            copy.local_step - adopted.local_step,
            copy.tokens - adopted.tokens,
            adopted.version,
            copy.samples,
            self._payload_bytes.get(fragment_id, 0),
            self._since[fragment_id],
        )
        return Send(SYNCER, value)
