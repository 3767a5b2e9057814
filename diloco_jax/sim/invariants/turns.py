"""The checker of the table of turns: which fragment each round is of, and what learners copy for the next ones."""

from itertools import chain, repeat

from diloco_jax.protocol.effects import Merge, Note, Send, Stage
from diloco_jax.protocol.messages import FragmentValue, LearnerMessage, SyncerMessage
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess


class TurnsAreKept(Checker):
    """In each phase of the run a fragment has its turns exactly its period apart, from within its first period on.

    Rounds are of no other fragment than that, and learners copy none whose turn is not among the next rounds.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        config = self.config
        later = sorted(config.sync_later.items())
        counts = config.class_fragments or (config.num_fragments,)
        # First step of each phase, and the period of each fragment.
        self._phases = []
        for first_step, periods in [(0, config.sync_every), *later]:
            by_class = [periods] * len(counts) if isinstance(periods, int) else periods.values()
            of_fragments = chain.from_iterable(map(repeat, by_class, counts))
            self._phases.append((first_step, tuple(of_fragments)))
        # Phase and fragment -> its turns modulo its period.
        self._turn: dict[tuple[int, int], int] = {}
        # Newest closed round of all processes of the syncer.
        self._closed = 0

    def _due(self, global_step: int) -> int | None:
        """The fragment of this round as far as its turns are known; None: they are not."""
        phase, periods = self._at(global_step)
        known = [p for p, h in enumerate(periods) if self._turn.get((phase, p)) == global_step % h]
        self.check(len(known) < 2, f"the fragments {known} are all due at global step {global_step}")
        return known[0] if known else None

    def _at(self, global_step: int) -> tuple[int, tuple[int, ...]]:
        phase = max(i for i, (first_step, _) in enumerate(self._phases) if first_step <= global_step)
        return phase, self._phases[phase][1]

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed":
                self._close(effect.global_step, effect.fragment_id)
            elif isinstance(effect, Merge):
                ours = self._due(effect.global_step)
                self.check(ours == effect.fragment_id, f"{effect} is of another fragment than {ours}, whose turn it is")

    def _close(self, global_step: int, fragment_id: int) -> None:
        phase, periods = self._at(global_step)
        if fragment_id >= 0:
            self._turn.setdefault((phase, fragment_id), global_step % periods[fragment_id])
        due = self._due(global_step)
        told = f"round {global_step} is of fragment {fragment_id}"
        self.check(due == (fragment_id if fragment_id >= 0 else None), f"{told}, but it is the turn of {due}")
        for p, period in enumerate(periods):
            late = (phase, p) not in self._turn and global_step >= max(1, self._phases[phase][0]) + period
            self.check(not late, f"fragment {p} had no turn in {period} steps before round {global_step}")
        self._closed = max(self._closed, global_step)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        asked = {e.message.fragment_id for e in effects if isinstance(e, Send) and isinstance(e.message, FragmentValue)}
        for effect in effects:
            if isinstance(effect, Stage) and effect.fragment_id not in asked:
                last = max(self._closed, process.machine.global_step) + max(1, self.config.overlap_steps)
                steps = range(process.machine.global_step, last + 1)
                due = {self._due(step) for step in steps}
                known = all((self._at(step)[0], effect.fragment_id) in self._turn for step in steps)
                soon = not known or effect.fragment_id in due
                self.check(soon, f"{process.name} copies fragment {effect.fragment_id}, due are {due}")
