"""Copies of fragments in CPU memory after a step, and the answers to the syncer's requests for values.

The syncer requests a fragment as it was after a named step, and learns about that step only after its end. So a learner
copies after every step the fragments that the next rounds will request, and keeps a few copies of each.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from diloco_jax.protocol.effects import Drop, Effects, Send, Stage, Unstage
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, FragmentValue, GlobalFragment, PullRequest, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.turns import Turns

# Copies of one fragment: the grace window spans one step, and the request's way spans another.
STAGED_STEPS_MAX = 3


@dataclass(slots=True)
class Stager:
    """The copies that a learner holds, the rounds that wait for one, and the work that its values still contain.

    A value that is sent names the first sample whose work it still contains. What remains of the work before an
    adoption depends on `adopt_mode`:

        "overwrite"   nothing
        "rebase"      the work since the learner staged the value that was merged; nothing if none was merged
        "blend"       a share of all work
    """

    effects: Effects
    learner_id: str
    incarnation: int
    config: ProtocolConfig
    # Which fragment is due when.
    turns: Turns
    anchors: Anchors
    adopt_mode: str
    # Fragment -> size of its encoded value.
    payload_bytes: Mapping[int, int]
    # The first round that may still request a value.
    next_round: int = 1
    # Fragment -> round that requested it before a copy existed.
    wanted: dict[int, int] = field(default_factory=dict)
    # Fragment -> report of each copy, oldest first.
    staged: dict[int, list[StepReport]] = field(default_factory=lambda: defaultdict(list))
    # Fragment -> newest round that a copy was sent for, and the samples of that copy.
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Fragment -> number of samples whose work adoption has overwritten.
    since: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.since = [0] * self.config.num_fragments

    def due(self, first_round: int) -> tuple[int, ...]:
        """Return the fragments that the rounds from `first_round` on will request."""
        return self.turns.due_within(first_round, self.config.overlap_steps or 1)

    def stage_due(self, now: StepReport, first_round: int) -> None:
        """Stage what the rounds from `first_round` on will request, and free the copies of other fragments."""
        fragments = self.due(first_round)
        for fragment_id in list(self.staged):
            if fragment_id not in fragments:
                self._unstage(fragment_id)
        self._stage(fragments, now)

    def _stage(self, fragments: Iterable[int], now: StepReport) -> None:
        for fragment_id in fragments:
            copies = self.staged[fragment_id]
            copies.append(now)
            self.effects.append(Stage(fragment_id, now.local_step))
            if len(copies) > STAGED_STEPS_MAX:
                self.effects.append(Unstage(fragment_id, copies.pop(0).local_step))

    def _unstage(self, fragment_id: int) -> None:
        for copy in self.staged.pop(fragment_id):
            self.effects.append(Unstage(fragment_id, copy.local_step))

    def unstage_all(self) -> None:
        """Free every copy."""
        for fragment_id in list(self.staged):
            self._unstage(fragment_id)

    def answer_wanted(self, now: StepReport) -> None:
        """Send, after a step, the values that were requested before a copy existed."""
        for fragment_id, global_step in sorted(self.wanted.items()):
            copies = self.staged.get(fragment_id)
            if not copies or copies[-1].local_step != now.local_step:
                self._stage((fragment_id,), now)
            self._send(global_step, fragment_id, self.staged[fragment_id][-1])
        self.wanted.clear()

    def on_pull(self, message: PullRequest) -> None:
        """Send the copy of the requested step, or the next newer one; without a copy, send after the next step."""
        global_step, fragment_id = message.global_step, message.fragment_id
        adopted, wanted = self.anchors.adopted, self.wanted
        if global_step >= self.next_round:
            self.next_round = global_step + 1
        if not 0 <= fragment_id < len(adopted):
            self.effects.append(Drop(SYNCER, f"pull of unknown fragment {fragment_id}, there are {len(adopted)}"))
            return
        if global_step <= adopted[fragment_id].version or global_step <= wanted.get(fragment_id, 0):
            # The request is a duplicate, or its round is over.
            return
        for copy in self.staged.get(fragment_id, ()):
            if copy.local_step >= message.local_step:
                self._send(global_step, fragment_id, copy)
                return
        wanted[fragment_id] = global_step
        if len(wanted) > max(1, self.config.overlap_steps):
            # No more rounds than this are in flight, so the oldest one is over.
            del wanted[min(wanted, key=wanted.__getitem__)]

    def on_global(self, message: GlobalFragment, samples: int) -> None:
        """Free the copies and forget the request that a newer global value, about to be adopted, makes void."""
        fragment_id, version = message.fragment_id, message.version
        sent_round, sent_samples = self.sent.get(fragment_id, (version + 1, 0))
        if sent_round <= version:
            # The round of the sent copy is over. A round that is not over may still merge its copy.
            del self.sent[fragment_id]
        merged = sent_round == message.merged_round
        excluded = sent_round <= version and not merged
        if self.adopt_mode == "rebase" and merged:
            self.since[fragment_id] = sent_samples
        elif self.adopt_mode != "blend" or excluded or self.anchors.adopted[fragment_id].version == NO_VERSION:
            self.since[fragment_id] = samples
        if fragment_id in self.staged:
            self._unstage(fragment_id)
        if self.wanted and version >= self.wanted.get(fragment_id, version + 1):
            del self.wanted[fragment_id]

    def _send(self, global_step: int, fragment_id: int, copy: StepReport) -> None:
        self.sent[fragment_id] = (global_step, copy.samples)
        self.effects.append(Send(SYNCER, self._value(global_step, fragment_id, copy)))

    def _value(self, global_step: int, fragment_id: int, copy: StepReport) -> FragmentValue:
        adopted, size = copy.adopted[fragment_id], self.payload_bytes.get(fragment_id, 0)
        steps, tokens = copy.local_step - adopted.local_step, copy.tokens - adopted.tokens
        asked = (self.learner_id, self.incarnation, global_step, fragment_id, copy.local_step)
        data = (copy.samples, size, self.since[fragment_id])
        return FragmentValue(*asked, steps, tokens, adopted.version, *data)
