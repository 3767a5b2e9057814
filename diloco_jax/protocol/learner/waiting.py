"""A learner's wait between two inner steps for a global fragment that is on its way.

A learner that does not wait adopts a fragment one or two steps after the values that it merged. With
`protocol.wait_steps` it waits, for at most this share of its usual step. It waits once per round, from its report until
the round is over: its fragment is adopted, a message shows that the round has closed without one, or the limit has
passed.

A learner does not wait while rounds usually take longer than the limit from a request to their end. Otherwise a wait
may still be in vain, because other learners are slow: it ends at the limit, or with a round that did not request this
learner's value. Such waits must not cost a share of every step:

    waiting   the time of waits in vain adds up, and any other wait takes RETURN of the limit back; at PATIENCE a pause
              begins
    paused    no waits for a number of rounds, which doubles from pause to pause; then waiting starts again

The first waits in vain are useful: learners of equal speed may report at any distance from each other, and each wait
moves an early learner closer to the others. A paused learner continues to measure. After QUICK rounds in a row whose
wait would not have been in vain, it waits again.
"""

from math import inf

from diloco_jax.protocol.pacing import ProtocolConfig, ema
from diloco_jax.protocol.turns import Turns

# In usual steps. A learner of the same speed is at most one step ahead of the others.
PATIENCE = 1.5
# Share of the limit.
RETURN = 0.25
QUICK = 8
# A step counts as at most so many usual ones.
SAMPLE_MAX = 2.0
# Decay of the usual time from a request to the end of its round.
DECAY = 0.7
# Rounds of the first pause, and of the longest one.
PAUSE_MIN, PAUSE_MAX = 8, 256


class FragmentWait:
    """The waits of one incarnation of a learner: their limit, and whether they are worth it."""

    def __init__(self, config: ProtocolConfig, turns: Turns) -> None:
        self._config = config
        self._turns = turns
        # The longest wait as a share of the usual inner step; 0 if the learner never waits.
        self._most_steps = config.wait_steps
        # The usual inner step, in seconds.
        self._step_s: float | None = None
        # Waits in vain that the other waits have not made up for, in usual steps.
        self._vain = 0.0
        # Rounds that are left of the present pause, and the length of the next one.
        self._paused = 0
        self._next_pause = PAUSE_MIN
        # Rounds in a row that no wait was, or would have been, in vain for.
        self._quick = 0
        # The newest round that the learner reported a step to, and when; None once it is over.
        self._round = 0
        self._reported_s: float | None = None
        # The newest round that requested a value, and when; None once it is over. Then the usual time between the two.
        self._requested = 0
        self._requested_s: float | None = None
        self._trip_s: float | None = None
        # End of the present wait; inf if there is none.
        self.deadline_s = inf

    @property
    def holds(self) -> bool:
        """True while no step may start."""
        return self.deadline_s < inf

    @property
    def limit_s(self) -> float:
        """Return the longest wait; 0 before the usual step is known."""
        return self._most_steps * (self._step_s or 0.0)

    def on_report(self, first: bool, step_s: float, open_round: int, now_s: float) -> None:
        """Record a report that was sent, and wait for the open round, unless the learner has paused its waits.

        Args:
            first: whether this is the incarnation's first step, which may compile, so it is not a sample of its speed.
            step_s: seconds of the step, without any wait.
            open_round: the first round that may still request a value.
        """
        if not self._most_steps:
            return
        if not first:
            # A single long step, as of a process that was suspended, must not lengthen the waits of the next dozens.
            sample_s = min(step_s, SAMPLE_MAX * self._step_s) if self._step_s else step_s
            self._step_s = ema(self._step_s, sample_s, self._config.ema_decay)
        if open_round <= self._round or self._turns.due(open_round) < 0 or not self.limit_s:
            return
        if self._reported_s is not None:
            # The round before is not over yet.
            self._measure(inf)
        self._round, self._reported_s = open_round, now_s
        if self._paused:
            self._paused -= 1
        elif self._trip_s is None or self._trip_s <= self.limit_s:
            self.deadline_s = now_s + self.limit_s

    def on_pull(self, requested: int, now_s: float) -> None:
        """Record that a round has requested a value of this learner."""
        if self._most_steps and requested > self._requested:
            if self._requested_s is not None:
                self._travel(now_s - self._requested_s)
            self._requested, self._requested_s = requested, now_s

    def _travel(self, took_s: float) -> None:
        # A single long disturbance must not count for dozens of rounds.
        if self.limit_s:
            self._trip_s = ema(self._trip_s, min(took_s, 2 * self.limit_s), DECAY)

    def on_shown(self, newest: int, now_s: float) -> None:
        """Measure the rounds that are over by this message, which may arrive while a step runs."""
        if self._requested_s is not None and newest >= self._requested:
            self._travel(now_s - self._requested_s)
            self._requested_s = None
        if self._reported_s is not None and newest >= self._round:
            self._measure(now_s)

    def on_over(self, newest: int, now_s: float) -> None:
        """End the wait for a round that is over for this learner."""
        self.on_shown(newest, now_s)
        if newest >= self._round:
            self.deadline_s = inf

    def on_tick(self, now_s: float) -> None:
        """End a wait at its limit."""
        if now_s >= self.deadline_s:
            if self._reported_s is not None:
                self._measure(inf)
            self.deadline_s = inf

    def stop(self) -> None:
        """Wait no longer, and measure nothing, because the link or the learner has ended."""
        self._reported_s, self._requested_s, self.deadline_s = None, None, inf

    def _measure(self, over_s: float) -> None:
        """Record that the newest round was over at this time."""
        assert self._reported_s is not None, "the round is over already"
        # Steps that are shorter than the clock's resolution make the limit 0.
        share = min(1.0, (over_s - self._reported_s) / self.limit_s) if self.limit_s else 1.0
        quick = share < 1.0 and self._requested >= self._round
        self._reported_s = None
        self._quick = self._quick + 1 if quick else 0
        if self.holds:
            self._vain = max(0.0, self._vain + (-RETURN if quick else share) * self._most_steps)
            if self._vain >= PATIENCE:
                self._vain, self._quick, self._paused = 0.0, 0, self._next_pause
                self._next_pause = min(2 * self._next_pause, PAUSE_MAX)
            elif self._quick >= 2 * QUICK:
                self._next_pause = PAUSE_MIN
        elif self._quick >= QUICK:
            self._paused = 0
