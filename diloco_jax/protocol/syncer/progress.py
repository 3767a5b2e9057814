"""The progress of a run: the clock that all parts of the syncer's machine share, and notes that bear its time."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from diloco_jax.protocol.claims import LEAPS, plausible_tokens
from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.member import Member
from diloco_jax.protocol.membership import Membership


class Budget(NamedTuple):
    """A run's end in merged tokens, and how many of them are one step of its learning-rate schedule."""

    tokens: int = 0  # 0: no budget; the run ends, and its schedule goes, by global steps
    step_tokens: int = 1


NO_BUDGET = Budget()
# Name of the limits in a fingerprint; their text begins with the steps of the learning-rate schedule.
GLOBAL_STEPS = "global steps"


class Limits(NamedTuple):
    """The limits at which a run is complete, whichever it reaches first."""

    # Global steps; 0 for no limit, which needs `tokens`.
    steps: int
    # Merged tokens; 0 for no limit.
    tokens: int
    # Text of the limits in the fingerprint (GLOBAL_STEPS), which learners and syncer must share.
    told: str = ""

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
    """The syncer's life, and what the run has come to in it.

    Merged tokens: when a round closes, each member has reported so many tokens since its start. They are merged when
    the round has merged the member's value, except those that were merged before and those from before the member
    adopted the version under that value. So each token counts once, whichever fragments it went into.

    With a token budget the run is complete once the merged tokens reach it, or after `total_steps`. No round opens
    while those in flight may reach it, so what is merged beyond the budget is less than one round's tokens.
    """

    total_steps: int  # global steps after which the run is complete; 0, with a budget only: as many as that needs
    budget: Budget = NO_BUDGET
    factor: float = 0.0  # protocol.tokens_per_step_factor_max
    reach: int = 0  # global steps that the schedule goes on for without a merge: the longest way from one to the next
    epoch: int = 1  # which life of the syncer this is
    rewound: int = 0  # the life in which the run was last put back to a snapshot
    global_step: int = 0  # closed rounds
    merged_rounds: int = 0
    merged_parts: int = 0  # values in them
    merged_step: int = 0  # newest of these rounds
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
        """Say if the run goes on to this global step when so many tokens are merged, or may soon be."""
        return self.limits.allow(global_step, tokens)

    @property
    def limits(self) -> Limits:
        """Return the limits at which the run is complete, without their text in the fingerprint."""
        return Limits(self.total_steps, self.budget.tokens)

    def limit(self, limits: Limits) -> None:
        """Set the limits at which the run is complete."""
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

    @property
    def value_tokens_max(self) -> int:
        """Return the most tokens that one value counts towards the budget, so that no single value completes a run."""
        tokens, step_tokens = self.budget
        return max(tokens // LEAPS, int(self.factor * step_tokens)) if self.factor else tokens

    @property
    def schedule_lead(self) -> int:
        """Steps by which the learning-rate schedule is ahead of the global step, or behind; 0 without a budget.

        At a merged round the schedule is at merged tokens / budget.step_tokens. From there it goes on with the global
        steps, for rounds are rare where fragments are few, until the next merge sets it right.
        """
        tokens, step_tokens = self.budget
        if not tokens:
            return 0
        return min(self.merged_tokens, tokens) // step_tokens - max(self.merged_step, self.global_step - self.reach)

    @property
    def expected_steps(self) -> int:
        """Global steps of the whole run, if every one from now on merges a step's tokens."""
        tokens, step_tokens = self.budget
        if not tokens:
            return self.total_steps
        steps = self.global_step - min(0, self.merged_tokens - tokens) // step_tokens  # rounded up
        return min(steps, self.total_steps) if self.total_steps else steps

    def note(
        self, kind: str, fragment_id: int, members: tuple[str, ...], reason: str, global_step: int | None = None
    ) -> Note:
        """Make a note of this moment, or of the round of `global_step`."""
        return Note(kind, self.global_step if global_step is None else global_step, fragment_id, members, reason)
