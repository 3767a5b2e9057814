"""Copies of fragments in host memory after a step, and the answers to the syncer's requests for values.

The syncer asks for a fragment as it was after a named step, and learns of that step only when it is over. So the
fragments that the next rounds will ask for are copied after every step, and a few copies of each are kept.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from diloco_jax.protocol.effects import Drop, Effect, Send, Stage, Unstage
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, FragmentValue, GlobalFragment, PullRequest, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.turns import Schedule

STAGED_STEPS_MAX = 3  # copies of one fragment: the grace window spans one step, the pull's way another


@dataclass(slots=True)
class Stager:
    """The copies that a learner holds, the rounds that wait for one, and the work that its values still hold.

    A value that is sent says from which sample on it holds what samples taught: adopting a global value leaves of the
    work before it nothing ("overwrite"), what was done since the value was staged that went into it ("rebase"; nothing
    if none did), or a share of everything ("blend").
    """

    learner_id: str
    incarnation: int
    config: ProtocolConfig
    schedule: Schedule  # which fragment is due when
    anchors: Anchors
    adopt_mode: str  # one of these
    payload_bytes: Mapping[int, int]  # fragment -> size of its encoded value
    next_round: int = 1  # the first that may still ask for a value
    wanted: dict[int, int] = field(default_factory=dict)  # fragment -> round that asked before any copy existed
    # fragment -> report of each copy, oldest first
    staged: dict[int, list[StepReport]] = field(default_factory=lambda: defaultdict(list))
    # fragment -> newest round that a copy was sent for, its samples
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    since: list[int] = field(init=False)  # fragment -> samples whose work adoption has overwritten

    def __post_init__(self) -> None:
        self.since = [0] * self.config.num_fragments

    def stage_due(self, now: StepReport, first_round: int, effects: list[Effect]) -> None:
        """Stage what the rounds from this one on will ask for, and let go of what they will not."""
        fragments = self.schedule.due_within(first_round, self.config.overlap_steps or 1)
        for fragment_id in list(self.staged):
            if fragment_id not in fragments:
                self._unstage(fragment_id, effects)
        self._stage(fragments, now, effects)

    def _stage(self, fragments: Iterable[int], now: StepReport, effects: list[Effect]) -> None:
        for fragment_id in fragments:
            copies = self.staged[fragment_id]
            copies.append(now)
            effects.append(Stage(fragment_id, now.local_step))
            if len(copies) > STAGED_STEPS_MAX:
                effects.append(Unstage(fragment_id, copies.pop(0).local_step))

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        for copy in self.staged.pop(fragment_id):
            effects.append(Unstage(fragment_id, copy.local_step))

    def unstage_all(self) -> list[Effect]:
        """Let go of every copy."""
        effects: list[Effect] = []
        for fragment_id in list(self.staged):
            self._unstage(fragment_id, effects)
        return effects

    def answer_wanted(self, now: StepReport, effects: list[Effect]) -> None:
        """After a step: send what was asked for before any copy existed."""
        for fragment_id, global_step in sorted(self.wanted.items()):
            copies = self.staged.get(fragment_id)
            if not copies or copies[-1].local_step != now.local_step:
                self._stage((fragment_id,), now, effects)
            effects.append(self._value(global_step, fragment_id, self.staged[fragment_id][-1]))
        self.wanted.clear()

    def on_pull(self, message: PullRequest) -> list[Effect]:
        """Answer with the copy of the asked step, or the next newer one; without any, after the next step."""
        global_step, fragment_id = message.global_step, message.fragment_id
        adopted, wanted = self.anchors.adopted, self.wanted
        if global_step >= self.next_round:
            self.next_round = global_step + 1
        if not 0 <= fragment_id < len(adopted):
            return [Drop(SYNCER, f"pull of unknown fragment {fragment_id}, there are {len(adopted)}")]
        if global_step <= adopted[fragment_id].version or global_step <= wanted.get(fragment_id, 0):
            return []  # a duplicate, or of a round that is over
        for copy in self.staged.get(fragment_id, ()):
            if copy.local_step >= message.local_step:
                return [self._value(global_step, fragment_id, copy)]
        wanted[fragment_id] = global_step
        if len(wanted) > max(1, self.config.overlap_steps):  # more are never in flight: the oldest is over
            del wanted[min(wanted, key=wanted.__getitem__)]
        return []

    def on_global(self, message: GlobalFragment, samples: int, effects: list[Effect]) -> None:
        """A newer global value is about to be adopted: what was staged and asked for is over."""
        fragment_id, version = message.fragment_id, message.version
        sent_round, sent_samples = self.sent.get(fragment_id, (version + 1, 0))
        if sent_round <= version:
            del self.sent[fragment_id]  # its round is over; one that is not may still merge it
        merged = sent_round == message.merged_round
        left_out = sent_round <= version and not merged
        if self.adopt_mode == "rebase" and merged:
            self.since[fragment_id] = sent_samples
        elif self.adopt_mode != "blend" or left_out or self.anchors.adopted[fragment_id].version == NO_VERSION:
            self.since[fragment_id] = samples
        if fragment_id in self.staged:
            self._unstage(fragment_id, effects)
        if self.wanted and version >= self.wanted.get(fragment_id, version + 1):
            del self.wanted[fragment_id]

    def _value(self, global_step: int, fragment_id: int, copy: StepReport) -> Send:
        adopted, size = copy.adopted[fragment_id], self.payload_bytes.get(fragment_id, 0)
        self.sent[fragment_id] = (global_step, copy.samples)
        steps, tokens = copy.local_step - adopted.local_step, copy.tokens - adopted.tokens
        asked = (self.learner_id, self.incarnation, global_step, fragment_id, copy.local_step)
        data = (copy.samples, size, self.since[fragment_id])
        return Send(SYNCER, FragmentValue(*asked, steps, tokens, adopted.version, *data))
