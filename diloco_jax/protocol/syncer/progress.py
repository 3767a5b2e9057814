"""Clock, limits and newest versions of a run; all parts of the syncer's machine share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any, NamedTuple

from diloco_jax.protocol.claims import LEAPS, plausible_tokens
from diloco_jax.protocol.effects import Contribution, Effects, Note, Send
from diloco_jax.protocol.member import Held, Member, Sent
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment, Hello
from diloco_jax.protocol.pacing import ProtocolConfig

# How often a version is sent to one member as a delta. A member that still lacks it cannot use deltas.
STEPS_MAX = 2


class Budget(NamedTuple):
    """The end of a run in merged tokens, and how many of them are one step of its learning-rate schedule."""

    # 0 for no budget; the end of the run and its schedule then depend on global steps.
    tokens: int = 0
    step_tokens: int = 1


NO_BUDGET = Budget()
# Name of the limits in a fingerprint; their text starts with the steps of the learning-rate schedule.
GLOBAL_STEPS = "global steps"


class Limits(NamedTuple):
    """The limits of a run, which is complete when it reaches the first of them."""

    # Global steps; 0 for no limit, which needs `tokens`.
    steps: int
    # Merged tokens; 0 for no limit.
    tokens: int
    # The limits as text: the entry GLOBAL_STEPS of the fingerprint, which must be equal on both sides.
    text: str = ""

    def allow(self, global_step: int, tokens: int) -> bool:
        """Return whether the run continues to this global step when so many tokens are merged."""
        if self.tokens and tokens >= self.tokens:
            return False
        return not self.steps or global_step <= self.steps

    def above(self, other: "Limits") -> bool:
        """Return whether these limits are of the same kind as others and none is lower."""
        higher = not self.steps or 0 < other.steps <= self.steps
        return bool(self.tokens) == bool(other.tokens) and self.tokens >= other.tokens and higher


@dataclass(slots=True)
class Progress:
    """Counters of a run: closed rounds, merged rounds and merged tokens.

    Merged tokens: when a round closes, each member has reported a number of tokens since its start. They count as
    merged when the round has merged the member's value, except tokens that were merged before, and tokens from before
    the member adopted the version under that value. So each token counts once, whichever fragments it went into.

    With a token budget the run is complete once the merged tokens reach it, or after `total_steps`. No round opens
    while the rounds in flight may reach the budget, so less than one round's tokens are merged beyond it.
    """

    # Limit of global steps; 0, with a budget only, for as many as the budget needs.
    total_steps: int
    budget: Budget = NO_BUDGET
    # The setting protocol.tokens_per_step_factor_max.
    factor: float = 0.0
    # The schedule continues for so many global steps without a merge: the longest way from one merge to the next.
    reach: int = 0
    # The present epoch of the syncer, from 1, and the epoch that last put the run back to a snapshot.
    epoch: int = 1
    rewound: int = 0
    # Closed rounds.
    global_step: int = 0
    merged_rounds: int = 0
    # Values in the merged rounds.
    merged_parts: int = 0
    # The newest merged round.
    merged_step: int = 0
    merged_tokens: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        if self.total_steps < (0 if self.budget.tokens else 1):
            raise ValueError(f"total_steps is {self.total_steps}, but a run needs at least 1 global step")

    def state(self) -> dict[str, Any]:
        counts = [self.global_step, self.merged_rounds, self.merged_parts, self.finished]
        merged = [self.merged_step, self.merged_tokens]
        return {"epoch": [self.epoch, self.rewound], "counts": counts, "merged": merged}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.rewound = state["epoch"]
        self.global_step, self.merged_rounds, self.merged_parts, self.finished = state["counts"]
        self.merged_step, self.merged_tokens = state["merged"]

    def allows(self, global_step: int, tokens: int) -> bool:
        """Return whether the run continues to this global step when so many tokens are merged, or may soon be."""
        return self.limits.allow(global_step, tokens)

    @property
    def limits(self) -> Limits:
        """Return the limits of the run, without their text in the fingerprint."""
        return Limits(self.total_steps, self.budget.tokens)

    def limit(self, limits: Limits) -> None:
        """Set the limits of the run."""
        self.total_steps, self.budget = limits.steps, self.budget._replace(tokens=limits.tokens)

    def plausible(self, tokens: int, steps: int, member: Member, membership: Membership) -> int:
        """Return the part of `tokens` that `steps` inner steps of a member can plausibly have had (claims.py)."""
        if member.total_steps > 0 and tokens * member.total_steps <= member.total_tokens * steps:
            # The usual case: a step had no more tokens than the member's earlier steps on average.
            return tokens
        usual = membership.usual_step_tokens(member)
        if usual == inf and self.budget.tokens:
            usual = float(self.budget.step_tokens)
        return plausible_tokens(tokens, steps, usual, self.factor)

    def weighed(self, contributions: Sequence[Contribution], membership: Membership) -> tuple[Contribution, ...]:
        """Return contributions with at most the tokens that they may weigh in a merge.

        A weight is tokens^2 / steps. So that no step weighs more than `factor` times a usual one, it counts for at most
        sqrt(factor) times the usual tokens.
        """
        usual = membership.usual_step_tokens()
        if usual == inf and self.budget.tokens:
            usual = float(self.budget.step_tokens)
        factor = sqrt(self.factor)
        return tuple(
            [each._replace(tokens=plausible_tokens(each.tokens, each.steps, usual, factor)) for each in contributions]
        )

    @property
    def value_tokens_max(self) -> int:
        """Return the most tokens that one value counts towards the budget, so that no single value completes a run."""
        tokens, step_tokens = self.budget
        return max(tokens // LEAPS, int(self.factor * step_tokens)) if self.factor else tokens

    @property
    def schedule_lead(self) -> int:
        """Return by how many steps the learning-rate schedule is ahead of the global step; 0 without a budget.

        The lead is negative when the schedule is behind. At a merged round the schedule is at merged tokens /
        budget.step_tokens. From there it advances with the global steps until the next merge corrects it, because
        merges are rare where fragments are few.
        """
        tokens, step_tokens = self.budget
        if not tokens:
            return 0
        return min(self.merged_tokens, tokens) // step_tokens - max(self.merged_step, self.global_step - self.reach)

    @property
    def expected_steps(self) -> int:
        """Return the global steps of the whole run, if each one from now on merges the tokens of one schedule step."""
        tokens, step_tokens = self.budget
        if not tokens:
            return self.total_steps
        # The floor division of a negative number rounds the remaining steps up.
        steps = self.global_step - min(0, self.merged_tokens - tokens) // step_tokens
        return min(steps, self.total_steps) if self.total_steps else steps

    def note(
        self, kind: str, fragment_id: int, members: tuple[str, ...], reason: str, global_step: int | None = None
    ) -> Note:
        """Make a note of this moment, or of the round `global_step`."""
        return Note(kind, self.global_step if global_step is None else global_step, fragment_id, members, reason)


@dataclass(slots=True)
class Downstream:
    """The newest version of each fragment, and its way to each learner: as a whole value, or as a delta."""

    effects: Effects
    config: ProtocolConfig
    progress: Progress
    # Fragment -> size of its encoded global value.
    payload_bytes: Mapping[int, int]
    # Fragment -> size of the delta to its newest version. A fragment that is missing is always sent whole.
    delta_bytes: Mapping[int, int]
    # The newest version of each fragment, and its digest.
    versions: list[int] = field(init=False)
    digests: list[int] = field(init=False)
    # For each fragment, the versions that the syncer keeps as bases of learners' values.
    history: list[list[int]] = field(init=False)
    # Fragment -> the base of the delta to its newest version.
    bases: dict[int, Held] = field(default_factory=dict)
    # The message that was sent last.
    newest: GlobalFragment | None = None

    def __post_init__(self) -> None:
        count = self.config.num_fragments
        self.versions, self.digests, self.history = [0] * count, [0] * count, [[0] for _ in range(count)]

    def renew(self, fragment_id: int, version: int, digest: int) -> None:
        """Take a version that was merged; a delta leads to it from the version before."""
        self.bases[fragment_id] = Held(self.versions[fragment_id], self.digests[fragment_id])
        self.versions[fragment_id], self.digests[fragment_id] = version, digest
        history = self.history[fragment_id]
        history.append(version)
        del history[: -self.config.anchor_history]

    def replace(self, fragment_id: int, version: int, digest: int) -> None:
        """Continue from this version, whatever was there."""
        self.versions[fragment_id], self.digests[fragment_id] = version, digest
        self.history[fragment_id] = [version]

    def forget_steps(self) -> None:
        """Forget deltas and older versions, which were lost with the process that held them."""
        self.bases.clear()
        self.history = [[version] for version in self.versions]

    def missing(self, hello: Hello) -> list[int]:
        """Return the fragments whose value at the learner is not the newest one."""
        held = zip(hello.versions, hello.digests, self.versions, self.digests, strict=True)
        return [p for p, (theirs, bits, ours, our_bits) in enumerate(held) if theirs != ours or bits != our_bits]

    def send(self, member: Member, fragment_id: int, wait_steps: int = 0, broadcast_s: float | None = None) -> None:
        """Send the newest version: as a delta to a member that will hold its base by then, else whole.

        Args:
            wait_steps: the version counts as lost after so many steps of the member without it; 0 for what the overlap
                allows.
            broadcast_s: time of the broadcast after the merge, if this is part of it.
        """
        message = self._message(member, fragment_id, wait_steps or self.config.overlap_steps + 1, broadcast_s)
        self.effects.append(Send(member.learner_id, message))

    def _message(self, member: Member, fragment_id: int, wait_steps: int, broadcast_s: float | None) -> GlobalFragment:
        down, version, digest = member.down, self.versions[fragment_id], self.digests[fragment_id]
        size, base, steps = self.payload_bytes.get(fragment_id, 0), NO_VERSION, STEPS_MAX
        if fragment_id in self.delta_bytes:
            sent, will_hold = down.sent.get(fragment_id), down.will_hold[fragment_id]
            before = sent.steps if sent is not None and sent.version == version else 0
            if before < STEPS_MAX and self.bases.get(fragment_id) == will_hold:
                size, base, steps = self.delta_bytes[fragment_id], will_hold.version, before + 1
            down.will_hold[fragment_id] = Held(version, digest)
        down.sent[fragment_id] = Sent(version, steps, member.local_step, wait_steps, broadcast_s)
        merged_round = member.credit.merged_round.get(fragment_id, NO_VERSION)
        now = self.progress
        lead = now.schedule_lead
        value = (now.global_step, fragment_id, version, now.epoch, digest, size, base, merged_round, lead)
        message = self.newest
        if message is None or message != value:
            # Nearly all members of a broadcast get the same message, so it is made once.
            message = self.newest = GlobalFragment(*value)
        return message

    def repair(self, member: Member, fragment_id: int) -> None:
        """Repeat a broadcast that was lost: the learner started a step after it was due, and still lacks it.

        A step that started before the arrival reports the old version, hence one step more than the overlap. Each
        repetition waits twice as long, because on a slow link the value is in transit and not lost.
        """
        if not member.adopted or member.adopted[fragment_id].version >= self.versions[fragment_id]:
            return
        sent, base = member.down.sent.get(fragment_id), self.bases.get(fragment_id)
        if sent is not None and member.local_step > sent.local_step + sent.wait_steps:
            if base is not None and member.adopted[fragment_id].version == base.version:
                # Whole values would fill a slow link forever, so the member gets the delta again.
                member.down.will_hold[fragment_id] = base
            self.send(member, fragment_id, 2 * sent.wait_steps)

    def state(self) -> dict[str, Any]:
        return {
            "versions": list(self.versions),
            "digests": list(self.digests),
            "bases": [[fragment_id, *base] for fragment_id, base in self.bases.items()],
            "history": [list(history) for history in self.history],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.versions, self.digests = list(state["versions"]), list(state["digests"])
        self.bases = {fragment_id: Held(*base) for fragment_id, *base in state["bases"]}
        self.history = [list(history) for history in state["history"]]
