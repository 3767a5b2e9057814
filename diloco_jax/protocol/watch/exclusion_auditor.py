"""The auditor of exclusions: it repeats each decision on the syncer's tape that has evidence."""

from collections.abc import Callable, Mapping
from typing import Any

from diloco_jax.protocol.effects import Effect, Merge
from diloco_jax.protocol.exclusion import Evidence, RateHistory, repeat
from diloco_jax.protocol.releases import recalls_rounds
from diloco_jax.protocol.syncer.tape import Moment, Moments, back_to, captured, stamp_of, without_stamp


class ExclusionAuditor:
    """Keeps the rate history of each fragment from a tape, and reports decisions that the rule does not repeat.

    A round without evidence makes the history of its fragment unknown, and a restart of an older release, which forgot
    the rounds after its snapshot, those of all fragments. Later decisions of such a fragment are not repeated, but
    non-finite values must still be excluded.

    Args:
        num_fragments: fragments of the model.
        report: takes a sentence for each decision that differs.
        uses: result of `returns` for the tape, so that only needed histories are kept; None keeps all.
    """

    def __init__(
        self, num_fragments: int, report: Callable[[str], None], uses: Mapping[Moment, int] | None = None
    ) -> None:
        # Decisions that were repeated.
        self.repeated = 0
        self._report = report
        # Of each fragment; None if it is unknown.
        self._histories: list[RateHistory | None] = [RateHistory()] * num_fragments
        self._orders: dict[int, Merge] = {}
        self._snapshots: Moments[list[RateHistory | None]] = Moments(uses)

    def take(self, line: list[Any], effects: list[Effect]) -> None:
        """Read one input of the tape and its effects."""
        kind = line[0]
        if kind == "restart":
            self._orders.clear()
            if not recalls_rounds(stamp_of(line)):
                self._histories = [None] * len(self._histories)
        elif (moment := back_to(kind, without_stamp(line))) is not None:
            self._go_back(moment)
        elif kind == "merged":
            self._check(self._orders.pop(line[2]), line[4], line[5] if len(line) > 5 else None)
        for effect in effects:
            if isinstance(effect, Merge):
                self._orders[effect.global_step] = effect
        for moment in captured(kind, line[2:], effects):
            self._snapshots.keep(moment, self._histories.copy)

    def _go_back(self, moment: Moment) -> None:
        """Restore the histories of a snapshot, which a rewind goes back to."""
        self._orders.clear()
        if moment in self._snapshots:
            self._histories = self._snapshots.at(moment).copy()
        else:
            self._histories = [None] * len(self._histories)

    def _check(self, order: Merge, excluded: list[str], recorded: dict[str, Any] | None) -> None:
        if recorded is None:
            self._histories[order.fragment_id] = None
            return
        evidence, round_name = Evidence(**recorded), f"round {order.global_step}"
        for name, norm in evidence.norms.items():
            if norm is None and name not in excluded:
                self._report(f"{round_name} merged the value of {name}, which holds NaN or infinity")
        history = self._histories[order.fragment_id]
        if history is None:
            return
        decision, self._histories[order.fragment_id] = repeat(evidence, order.contributions, history)
        self.repeated += 1
        if sorted(decision.excluded) != sorted(excluded):
            ours, theirs = (", ".join(sorted(names)) or "nobody" for names in (decision.excluded, excluded))
            self._report(f"{round_name} excluded {theirs}, but by its norms the rule excludes {ours}")
