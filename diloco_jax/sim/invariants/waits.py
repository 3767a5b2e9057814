"""Checker of learners that wait for a fragment before their next step (`protocol.wait_steps`)."""

from collections import defaultdict
from dataclasses import dataclass

from diloco_jax.protocol.effects import EvaluateModel
from diloco_jax.protocol.messages import Advance, GlobalFragment, PullRequest, SyncerMessage, Welcome
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# Sums of floating-point times differ by less than this, in seconds.
ROUNDING_S = 1e-6


@dataclass(slots=True)
class _Book:
    """What one process has done and received."""

    began_s: float = 0.0
    # End of its last step; None before the first one, and after it was asked to evaluate.
    ended_s: float | None = None
    steps: int = 0
    longest_s: float = 0.0
    # The newest round that a message has shown as over, and the newest one that is over or has requested a value.
    over: int = 0
    known: int = 0
    # The round that was open at the end of the last step, and the last round that the process waited for.
    open_round: int = 0
    waited_round: int = 0
    waits: bool = False


class WaitsBounded(Checker):
    """A learner waits at most `wait_steps` of its steps, once for a round, while that is open.

    It waits only while it has a link, and only for a round whose fragment is due.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._books: dict[tuple[str, int], _Book] = defaultdict(_Book)
        self._turns = self.config.turns
        self._watches = self.config.wait_steps > 0

    def on_learner(self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float) -> None:
        if not self._watches:
            return
        book = self._books[process.key]
        if isinstance(given, GlobalFragment):
            book.over = max(book.over, given.version)
            book.known = max(book.known, given.version, given.global_step)
        elif isinstance(given, Advance | Welcome):
            book.over = max(book.over, given.global_step)
            book.known = max(book.known, given.global_step)
        elif isinstance(given, PullRequest):
            book.known = max(book.known, given.global_step)
        if any(isinstance(effect, EvaluateModel) for effect in effects):
            book.ended_s = None

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not self._watches:
            return
        book = self._books[process.key]
        if began:
            self._check_length(process, book, now_s)
            book.began_s, book.waits = now_s, False
            return
        # The first step may compile, so it is not a measure of the others.
        book.steps += 1
        if book.steps > 1:
            book.longest_s = max(book.longest_s, now_s - book.began_s)
        book.ended_s, book.open_round = now_s, book.known + 1

    def _check_length(self, process: LearnerProcess, book: _Book, now_s: float) -> None:
        if book.ended_s is None:
            return
        limit_s = self.config.wait_steps * book.longest_s
        # A paused process cannot start a step.
        until_s = max(book.ended_s + limit_s, process.paused_s) + ROUNDING_S
        waited_s = now_s - book.ended_s
        self.check(now_s <= until_s, f"{process.name} waited {waited_s:.3f} s between two steps, limit {limit_s:.3f} s")

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        if not self._watches or process.step.runs:
            return
        book = self._books[process.key]
        if book.ended_s is None:
            return
        self._check_length(process, book, now_s)
        name, number = process.name, book.open_round
        self.check(process.link is not None, f"{name} waits without a link")
        self.check(self._turns.due(number) >= 0, f"{name} waits for round {number}, where no fragment is due")
        self.check(book.over < number, f"{name} waits for round {number}, which is over")
        if not book.waits:
            self.check(book.waited_round < number, f"{name} waits again for round {number}")
            book.waits, book.waited_round = True, number
