"""Guarantees of the data that each learner's loop read: exactly once by lease, resumed by a loader's state, or own.

A loader's position is counted in steps. An incarnation whose loader continued after step s of an earlier incarnation
starts s steps after that one's start, so the steps that trained a position again follow from the tapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol.watch.sample_book import joined
from diloco_jax.tools.replay.learner_tapes import ResumedLoader

# From the weakest to the strongest guarantee. UNKNOWN: no tape of the learner is there.
UNKNOWN, OWN, RESUMED, LEASED = GUARANTEES = "unknown", "own", "resumed", "leased"


class DataOfIncarnation(NamedTuple):
    """Data of one incarnation of a learner, as its tape shows it."""

    learner_id: str
    incarnation: int
    guarantee: str = LEASED
    # Where its loader continued; None at the start of its data.
    resumed: ResumedLoader | None = None
    steps: int = 0


def guarantees(incarnations: Iterable[DataOfIncarnation], learners: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return for each learner its weakest guarantee, its steps, and the steps that read a batch again.

    Args:
        incarnations: incarnations with a tape.
        learners: names of all learners of the run.

    Returns:
        {learner: {"guarantee", "steps", "steps_again"}}; steps_again is None unless the guarantee is "resumed" and the
        tape of every incarnation that a loader continued from is there.
    """
    found: dict[str, list[DataOfIncarnation]] = {name: [] for name in sorted(set(learners))}
    for data in incarnations:
        found.setdefault(data.learner_id, []).append(data)
    return {name: _of_learner(sorted(own, key=lambda data: data.incarnation)) for name, own in sorted(found.items())}


def _of_learner(incarnations: Sequence[DataOfIncarnation]) -> dict[str, Any]:
    # A guarantee of a later release counts as the weakest that this one knows.
    known = [GUARANTEES.index(data.guarantee) if data.guarantee in GUARANTEES else 1 for data in incarnations]
    guarantee = GUARANTEES[min(known, default=0)]
    again = _steps_again(incarnations) if guarantee == RESUMED else None
    return {"guarantee": guarantee, "steps": sum(data.steps for data in incarnations), "steps_again": again}


def _steps_again(incarnations: Sequence[DataOfIncarnation]) -> int | None:
    starts: dict[int, int] = {}
    spans = []
    for data in incarnations:
        start = 0
        if data.resumed is not None:
            if data.resumed.incarnation not in starts:
                return None
            start = starts[data.resumed.incarnation] + data.resumed.local_step
        starts[data.incarnation] = start
        spans.append((start, start + data.steps))
    read = sum(stop - start for start, stop in spans)
    return read - sum(stop - start for start, stop in joined(sorted(spans)))


def describe_guarantees(data: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each learner."""
    return [f"{name}: {_words(found)}" for name, found in data.items()]


def _words(found: Mapping[str, Any]) -> str:
    match found["guarantee"]:
        case "leased":
            return "exactly once, by lease"
        case "resumed":
            again = found["steps_again"]
            count = "an unknown number" if again is None else str(again)
            return (
                f"resumed by the state of its loader: every batch at least once; {count} of {found['steps']} steps "
                "trained a batch again after a restart"
            )
        case "own":
            return "own data without a saved state; nothing is known of its samples"
    return (
        "no tape of it is here, so nothing shows whether it read what was leased to it, or other data; if you may see "
        "it, copy RUN/tapes of its machine here"
    )
