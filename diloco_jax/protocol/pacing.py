"""The settings of the algorithm, and the moving average of its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from diloco_jax.protocol.turns import Groups, Periods, Turns, fits, groups_of

LEARNERS_MAX_LIMIT = 4096
# Learners look so many global steps ahead after every step.
OVERLAP_STEPS_MAX = 10_000
RECOVERY_TURNS_MAX = 1000
WAIT_STEPS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """The numbers of the algorithm, which learners and syncer share (paper, section 5.1, for the defaults)."""

    sync_every: Periods = 24
    """H: global steps between two merges of the same fragment. Or by class of tensor, such as {mlp: 4, rest: 24}: mlp,
    attention, embedding, norm, or patterns of whole paths such as '*/experts_*'. The first class that names a tensor
    counts; rest has all other tensors. Each period divides the next longer one. Raise it if your link is too narrow, as
    diloco plan shows. Lower it for a better loss: islands drift apart less, and traffic grows."""
    sync_later: dict[int, Periods] = field(default_factory=dict)
    """Other periods from a global step on, such as {2000: 12, 8000: {mlp: 4, rest: 24}}; sync_every applies before
    the first of them. Set it to merge more often late in the run."""
    num_fragments: int = 24
    """P: fragments of the model, at most H. P = H moves one fragment in every step, and 1 moves the whole model at
    once, as in DiLoCo. With periods by class: the limit of all classes; each class gets as many as make the bytes of a
    step even. Lower it if fragments get smaller than 100 kB."""
    class_fragments: tuple[int, ...] = ()
    """Fragments of each class, in the order of sync_every; classes with equal periods count as one. The numbers add up
    to num_fragments. Empty: chosen by size. Leave it empty unless you repeat a run of another release, or compare
    divisions; the choice by size makes the bytes of all steps about equal."""
    overlap_steps: int = 2
    """tau: inner steps that a round may take while training continues; as many rounds are in flight. 0: learners
    wait. Raise it if rounds take longer than this on your link; they then merge older values."""
    wait_steps: float = 0.0
    """Longest wait of a learner for the fragment of the open round, between its report and its next step, as a share of
    its usual step; at most 10. 0: it never waits, and adopts a fragment one or two steps late. It waits only while most
    fragments arrive within this limit. With overlap_steps 0 learners always wait, so this must be 0. Set it, for
    example to 0.5, if tokens are scarce and time is not. Raise it if fragments arrive after the limit; islands then
    give up more time for fresh values."""
    quorum: int = 1
    """K: learners that must have finished a step before a round may close. M waits for all islands. Raise it if one
    island must not move the model alone. With M nothing is merged while an island is disconnected."""
    grace_steps_max: float = 1.0
    """Cap of the grace window in inner steps: how long a round whose quorum is met waits for other islands, as far as
    overlap_steps leaves time (Eq. 3 of the paper). For islands that are about as fast as the others a round waits up to
    one step (at least 0.1 s) even if there is no time left, while fewer than three quarters of them have reported.
    Raise it if slow islands miss rounds. With 0 and K = 1 a round merges the island that reports first."""
    ema_decay: float = 0.9
    """Decay of the averages of step, quorum and sync time, in [0, 1). Lower it if the averages follow a change too
    late."""
    silence_s: float = 15.0
    """A connected learner without a sign of life for so many seconds counts as lost. Heartbeats continue while a step
    compiles. Raise it if working islands count as lost; rounds then wait longer for an island that hangs."""
    heartbeat_s: float = 2.0
    """Seconds between two heartbeats of a learner, at most half of silence_s. Lower it together with silence_s if a
    hanging island must be noticed sooner. Each heartbeat is a small message to the syncer, and a write to a bucket:
    raise it if steps are long and requests cost too much."""
    resend_s: float = 2.0
    """Seconds until a request without an answer (hello, pull) is repeated. A round that keeps the next one from opening
    then ends without the missing values, and their islands are asked less often. Raise it if answers take longer than
    this. Through a bucket it is at least four times transport.poll_s."""
    pull_timeout_s: float = 30.0
    """Seconds that a round waits for a requested value at most; then it merges without that value. A round that keeps
    the next one from opening waits less (resend_s). Raise it if a fragment takes longer than this on a slow link,
    because its value is then excluded."""
    anchor_history: int = 2
    """Versions of a fragment that the syncer keeps. A value against an older version is refused, and its sender gets
    the newest one. Each version takes memory of the syncer. With 1, values in transit during a merge may be lost. Raise
    it if values of slow islands are often refused as too old and the syncer has memory to spare."""
    learners_max: int = 64
    """Most learners that the syncer accepts at a time. Raise it for more islands; a higher limit costs nothing."""
    lease_ahead_steps: int = 64
    """Steps of data that a learner gets in advance. If it has used them up without a syncer, it reads samples that were
    leased earlier, in another order; these steps count for no lease. Raise it if the leases reach an island later than
    half of these steps take. A lost learner gives this data back, and it is read again."""
    release_s: float = 60.0
    """Seconds until the unfinished data of a lost learner goes to others. A new incarnation frees it at once. Raise it
    if islands return later than this, because their data is otherwise read twice."""
    snapshot_every: int = 0
    """Global steps between two snapshots of the run; 0: one at the end. Set it for every run that you do not want to
    lose: if all processes fail, the steps since the last snapshot are lost."""
    restore_s: float = 15.0
    """Seconds that a restarted syncer waits, once a learner is back, for others that may hold newer versions. Raise it
    if islands need longer to reconnect, because their newer versions are otherwise lost."""
    recover_from_peers: bool = True
    """Learners that join later get parameters and inner optimizer state from a healthy learner. false: no
    learner asks for a state or gives one. Set it to false if links are too slow for a whole state, or if moments must
    not leave their site."""
    recovery_attempts: int = 3
    """States that a joining learner tries to get, each within recovery_turns, before it starts without one. Lower it if
    an island should start without moments instead of waiting."""
    recovery_turns: int = 10
    """Limit of the transfer of a state, as a multiple of sync_every (H; the longest period) global steps. The receiver
    makes no steps meanwhile. Raise it if a large state does not arrive in time; diloco plan shows how long it takes."""
    strikes_max: int = 3
    """Unusable values (NaN, infinite, wildly large) in a row that expel a learner. Lower it if you do not trust the
    islands."""
    tokens_per_step_factor_max: float = 64.0
    """Limits one inner step of an island: its weight in a merge (tokens squared) is at most so many times that of a
    step with the islands' median of tokens, and its tokens count towards train.tokens up to so many times the median;
    0: no limit. It keeps one wrong counter from deciding a merge or ending a run. Raise it if islands have more than 8
    times the median of tokens per step (64 is 8 squared), because they otherwise weigh less than they trained."""
    unmerged_rounds_max: int = 96
    """Rounds in a row without a value of a live learner that raise an alarm, because its work is lost. Raise it if slow
    islands raise the alarm without a fault."""

    def __post_init__(self) -> None:
        # Reading the groups checks the periods.
        groups = self.groups
        shortest = min(min(phase.periods) for phase in groups.phases)
        turns = f"at most sync_every = {shortest}, so that every fragment has a separate global step"
        overlaps = not self.by_class or self.overlap_steps < shortest
        limits = [
            ("num_fragments", self.num_fragments >= 1, "at least 1"),
            ("num_fragments", self.by_class or self.num_fragments <= shortest, turns),
            ("class_fragments", not self.class_fragments or self._deals(groups), self._deal_limit(groups)),
            ("overlap_steps", overlaps, f"less than the shortest period, {shortest}"),
            ("overlap_steps", 0 <= self.overlap_steps <= OVERLAP_STEPS_MAX, f"0 to {OVERLAP_STEPS_MAX}"),
            (
                "wait_steps",
                not (self.lockstep and self.wait_steps),
                "0 if overlap_steps is 0: then learners always wait",
            ),
            ("wait_steps", 0 <= self.wait_steps <= WAIT_STEPS_MAX, f"0 to {WAIT_STEPS_MAX}"),
            ("quorum", 1 <= self.quorum <= self.learners_max, f"1 to learners_max = {self.learners_max}"),
            ("ema_decay", 0 <= self.ema_decay < 1, "at least 0 and below 1"),
            ("silence_s", self.silence_s >= 2 * self.heartbeat_s, f"at least 2 heartbeats, {2 * self.heartbeat_s}"),
            ("anchor_history", 1 <= self.anchor_history <= 16, "1 to 16"),
            ("learners_max", 1 <= self.learners_max <= LEARNERS_MAX_LIMIT, f"1 to {LEARNERS_MAX_LIMIT}"),
            ("recovery_attempts", 1 <= self.recovery_attempts <= 100, "1 to 100"),
            ("recovery_turns", 1 <= self.recovery_turns <= RECOVERY_TURNS_MAX, f"1 to {RECOVERY_TURNS_MAX}"),
        ]
        for name in ("heartbeat_s", "resend_s", "pull_timeout_s", "release_s", "restore_s"):
            limits.append((name, getattr(self, name) > 0, "above 0"))
        factor = self.tokens_per_step_factor_max
        limits.append(("tokens_per_step_factor_max", factor == 0 or 1 <= factor < inf, "at least 1, or 0 for no limit"))
        least = {
            "grace_steps_max": 0,
            "snapshot_every": 0,
            "lease_ahead_steps": 2,
            "strikes_max": 1,
        }
        for name, number in {**least, "unmerged_rounds_max": 1}.items():
            limits.append((name, getattr(self, name) >= number, f"at least {number}"))
        for name, ok, limit in limits:
            if not ok:
                raise ValueError(
                    f"protocol.{name} is {getattr(self, name)}, but must be {limit}; "
                    "change it in the config or on the command line"
                )

    def _deals(self, groups: Groups) -> bool:
        counts = self.class_fragments
        whole = len(counts) == len(groups.classes) and min(counts) >= 0 and sum(counts) == self.num_fragments
        return whole and fits(counts, groups, self.num_fragments)

    def _deal_limit(self, groups: Groups) -> str:
        return (
            f"{len(groups.classes)} numbers, for {', '.join('+'.join(names) for names in groups.classes)}, which add "
            f"up to num_fragments = {self.num_fragments} and leave each fragment a separate global step"
        )

    @property
    def groups(self) -> Groups:
        """Return the classes of tensors that share periods, and the periods of each phase."""
        return groups_of(self.sync_every, self.sync_later)

    @property
    def turns(self) -> Turns:
        """Return the table of turns, if the fragments of each class are known."""
        return Turns(self.sync_every, self.num_fragments, self.sync_later, self.class_fragments)

    def with_fragments(self, counts: tuple[int, ...]) -> ProtocolConfig:
        """Return these settings for a model whose classes of tensors have `counts` fragments."""
        if len(counts) < 2:
            return self
        return replace(self, num_fragments=sum(counts), class_fragments=tuple(counts))

    @property
    def by_class(self) -> bool:
        """True if classes of tensors differ in their periods, so that no fragment has tensors of two classes."""
        return len(self.groups.classes) > 1

    def check_steps(self, total_steps: int) -> None:
        """Check that a run is long enough for every phase; a ValueError names setting, value and remedy."""
        for phase in self.groups.phases:
            if phase.first_step >= total_steps:
                raise ValueError(
                    f"protocol.sync_later begins at global step {phase.first_step}, but the run has {total_steps}; "
                    "leave it out, or raise train.steps"
                )

    @property
    def words(self) -> str:
        """Describe what determines the table of turns; the processes of a run compare this text."""
        later = f" later {self.sync_later}" if self.sync_later else ""
        counts = "+".join(map(str, self.class_fragments)) or self.num_fragments
        return f"H={self.sync_every}{later} P={counts} tau={self.overlap_steps}"

    def agreed(self, words: str) -> ProtocolConfig:
        """Return these settings with the numbers of fragments that a run's processes agreed on.

        Args:
            words: the property `words` of their settings.

        Raises:
            ValueError: the text has no numbers of fragments.
        """
        if not self.by_class or self.class_fragments:
            return self
        counts = words.rpartition(" P=")[2].partition(" ")[0].split("+")
        if not all(count.isdecimal() for count in counts):
            raise ValueError("the tape does not say how many fragments each class of tensors has; is it this config's?")
        return self.with_fragments(tuple(map(int, counts)))

    @property
    def lockstep(self) -> bool:
        """True if learners stop at a due step until its fragment is back: synchronous DiLoCo."""
        return self.overlap_steps == 0

    @property
    def transfer_steps_max(self) -> int:
        """Return how many global steps the transfer of a state may take."""
        return self.recovery_turns * self.groups.gap_max

    @property
    def own_state_age_max(self) -> int:
        """Return the greatest age of a usable saved state in global steps; the newest save may not have ended."""
        return max(self.groups.gap_max, self.snapshot_age_max)

    @property
    def snapshot_age_max(self) -> int:
        """Return the greatest usual age of the newest snapshot in global steps: the save after it may still run."""
        return 2 * self.snapshot_every

    def snapshot_due(self, before: int, step: int) -> bool:
        """Return whether a multiple of snapshot_every is above global step `before`, and at most `step`."""
        every = self.snapshot_every
        return every > 0 and step // every > before // every


def ema(average: float | None, sample: float, decay: float) -> float:
    """Return an exponential moving average after another sample; it starts at its first sample."""
    return sample if average is None else decay * average + (1.0 - decay) * sample
