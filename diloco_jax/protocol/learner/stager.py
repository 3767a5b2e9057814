"""Copies of fragments in host memory after a step, and the answers to the syncer's requests for values.

The syncer asks for a fragment as it was after a named step, and learns of that step only when it is over. So the
fragments that the next rounds will ask for are copied after every step, and a few copies of each are kept.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from diloco_jax.protocol.effects import Drop, Effect, Send, Stage, Unstage
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, FragmentValue, GlobalFragment, PullRequest, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.turns import Schedule

STAGED_STEPS_MAX = 3  # copies of one fragment: the grace window spans one step, the pull's way another


class Stager:
    """The copies that a learner holds, the rounds that wait for one, and the work that its values still hold.

    A value that is sent says from which sample on it holds what samples taught: adopting a global value leaves of the
    work before it nothing ("overwrite"), what was done since the value was staged that went into it ("rebase"; nothing
    if none did), or a share of everything ("blend").

    Args:
        schedule: which fragment is due when.
        adopt_mode: one of these.
        payload_bytes: fragment -> size of its encoded value.
    """

    def __init__(
        self,
        learner_id: str,
        incarnation: int,
        config: ProtocolConfig,
        schedule: Schedule,
        anchors: Anchors,
        adopt_mode: str,
        payload_bytes: Mapping[int, int],
    ) -> None:
        self.next_round = 1  # the first that may still ask for a value
        self.wanted: dict[int, int] = {}  # fragment -> round that asked for it before any copy existed
        self._learner_id = learner_id
        self._incarnation = incarnation
        self._config = config
        self._schedule = schedule
        self._anchors = anchors
        self._adopt_mode = adopt_mode
        self._payload_bytes = payload_bytes
        self._staged: dict[int, list[StepReport]] = defaultdict(list)  # fragment -> that of each copy, oldest first
        self._since = [0] * config.num_fragments  # samples whose work adoption has overwritten
        self._sent: dict[int, tuple[int, int]] = {}  # fragment -> newest round that a copy was sent for, its samples

    def stage_due(self, now: StepReport, first_round: int, effects: list[Effect]) -> None:
        """Stage what the rounds from this one on will ask for, and let go of what they will not."""
        fragments = self._schedule.due_within(first_round, self._config.overlap_steps or 1)
        for fragment_id in list(self._staged):
            if fragment_id not in fragments:
                self._unstage(fragment_id, effects)
        self._stage(fragments, now, effects)

    def _stage(self, fragments: Iterable[int], now: StepReport, effects: list[Effect]) -> None:
        for fragment_id in fragments:
            copies = self._staged[fragment_id]
            copies.append(now)
            effects.append(Stage(fragment_id, now.local_step))
            if len(copies) > STAGED_STEPS_MAX:
                effects.append(Unstage(fragment_id, copies.pop(0).local_step))

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        for copy in self._staged.pop(fragment_id):
            effects.append(Unstage(fragment_id, copy.local_step))

    def unstage_all(self) -> list[Effect]:
        """Let go of every copy."""
        effects: list[Effect] = []
        for fragment_id in list(self._staged):
            self._unstage(fragment_id, effects)
        return effects

    def answer_wanted(self, now: StepReport, effects: list[Effect]) -> None:
        """After a step: send what was asked for before any copy existed."""
        for fragment_id, global_step in sorted(self.wanted.items()):
            copies = self._staged.get(fragment_id)
            if not copies or copies[-1].local_step != now.local_step:
                self._stage((fragment_id,), now, effects)
            effects.append(self._value(global_step, fragment_id, self._staged[fragment_id][-1]))
        self.wanted.clear()

    def on_pull(self, message: PullRequest) -> list[Effect]:
        """Answer with the copy of the asked step, or the next newer one; without any, after the next step."""
        global_step, fragment_id = message.global_step, message.fragment_id
        adopted, wanted = self._anchors.adopted, self.wanted
        if global_step >= self.next_round:
            self.next_round = global_step + 1
        if not 0 <= fragment_id < len(adopted):
            return [Drop(SYNCER, f"pull of unknown fragment {fragment_id}, there are {len(adopted)}")]
        if global_step <= adopted[fragment_id].version or global_step <= wanted.get(fragment_id, 0):
            return []  # a duplicate, or of a round that is over
        for copy in self._staged.get(fragment_id, ()):
            if copy.local_step >= message.local_step:
                return [self._value(global_step, fragment_id, copy)]
        wanted[fragment_id] = global_step
        if len(wanted) > max(1, self._config.overlap_steps):  # more are never in flight: the oldest is over
            del wanted[min(wanted, key=wanted.__getitem__)]
        return []

    def on_global(self, message: GlobalFragment, samples: int, effects: list[Effect]) -> None:
        """A newer global value is about to be adopted: what was staged and asked for is over.

        Args:
            effects: to which those that free copies are added.
        """
        fragment_id, version = message.fragment_id, message.version
        sent_round, sent_samples = self._sent.get(fragment_id, (version + 1, 0))
        if sent_round <= version:
            del self._sent[fragment_id]  # its round is over; one that is not may still merge it
        merged = sent_round == message.merged_round
        left_out = sent_round <= version and not merged
        if self._adopt_mode == "rebase" and merged:
            self._since[fragment_id] = sent_samples
        elif self._adopt_mode != "blend" or left_out or self._anchors.adopted[fragment_id].version == NO_VERSION:
            self._since[fragment_id] = samples
        if fragment_id in self._staged:
            self._unstage(fragment_id, effects)
        if self.wanted and version >= self.wanted.get(fragment_id, version + 1):
            del self.wanted[fragment_id]

    def _value(self, global_step: int, fragment_id: int, copy: StepReport) -> Send:
        adopted, size = copy.adopted[fragment_id], self._payload_bytes.get(fragment_id, 0)
        self._sent[fragment_id] = (global_step, copy.samples)
        steps, tokens = copy.local_step - adopted.local_step, copy.tokens - adopted.tokens
        value = FragmentValue(
            self._learner_id,
            self._incarnation,
            global_step,
            fragment_id,
            copy.local_step,
            steps,
            tokens,
            adopted.version,
            copy.samples,
            size,
            self._since[fragment_id],
        )
        return Send(SYNCER, value)
