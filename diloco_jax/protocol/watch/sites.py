"""Separate corpora: how far islands have read each, and whether the model grows worse on one.

A mean over corpora may fall while the loss on one of them rises, because the others weigh more. The owner of that
corpus should see it, so it is an alarm. No rule reads this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.watch.alarms import Alarm

if TYPE_CHECKING:
    from diloco_jax.protocol.messages import Score
    from diloco_jax.protocol.syncer.machine import Syncer

# The loss on a corpus must rise in so many evaluations in a row, and the mean fall, until there is an alarm. One alone
# may be chance: held-out parts are small.
RISES = 2
# The loss on a corpus is the score with this name after the name of the corpus.
LOSS = " loss"


def corpora_of(syncer: Syncer, scores: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """List the corpora of a run; none if all islands read the run's.

    Args:
        scores: the newest evaluation's numbers by name.

    Returns:
        For each corpus: corpus, its name ("" is the run's); islands, those that read it, also if they have left;
        samples in one epoch, 0 if unknown; leased, positions that were leased so far; epochs, None if unknown; loss,
        None if it was not evaluated.
    """
    known, books = syncer.membership.corpora.known, syncer.leases.books
    if not any(known):
        return []
    rows = []
    for name, corpus in sorted(known.items()):
        members = [member for member in syncer.membership.members.values() if member.corpus == name]
        end = books[name].end if name in books else 0
        rows.append(
            {
                "corpus": name,
                "islands": sorted([member.learner_id for member in members]),
                "samples": corpus.samples,
                "leased": end,
                "epochs": round(end / corpus.samples, 4) if corpus.samples else None,
                "loss": scores.get(f"{name or RUN}{LOSS}"),
            }
        )
    return rows


class RisingLosses:
    """The corpora whose losses rise while the mean falls."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._losses: dict[str, float] = {}
        self._rises: dict[str, int] = {}

    def on_score(self, score: Score, corpora: Collection[str]) -> None:
        """Take the result of an evaluation of a run with these corpora; means of the same corpora are compared."""
        known = {f"{name or RUN}{LOSS}" for name in corpora} if any(corpora) else set()
        losses = {name: value for name, value in score.scores if name in known}
        better = self._mean is not None and score.loss < self._mean and losses.keys() == self._losses.keys()
        self._rises = {
            name: self._rises.get(name, 0) + 1
            for name, loss in losses.items()
            if better and loss > self._losses.get(name, loss)
        }
        self._mean, self._losses = score.loss, losses

    def alarms(self) -> list[Alarm]:
        """List an alarm for each corpus whose loss rose in the last RISES evaluations or more."""
        return [
            Alarm(
                "rising",
                "",
                f"{name} rose to {self._losses[name]:.4f} in the last {rises} evaluations, while the "
                f"mean fell to {self._mean:.4f}",
            )
            for name, rises in sorted(self._rises.items())
            if rises >= RISES
        ]
