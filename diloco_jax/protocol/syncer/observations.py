"""Observations of learners that are not in the machine's state, and how a tape brings them back.

The machine is a function of the tape, and so are these: the counts of the reports, and the rates of the merged rounds.
A process that restarts repeats both from its snapshot on, while it replays the machine. With the rates of its snapshot
alone it would forget what is usual, and merge a damaged value in the next round.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from diloco_jax.protocol.effects import Contribution
from diloco_jax.protocol.exclusion import Evidence
from diloco_jax.protocol.messages import StepReport
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import Moment, Moments, back_to, without_stamp

# The place of the evidence in a line "merged"; older releases wrote none.
EVIDENCE = 5
_NOT_EVIDENCE = (TypeError, LookupError, ArithmeticError, AttributeError)


class Observations(Protocol):
    """Counts or rates that a tape brings back beside the machine's state."""

    def on_report(self, report: StepReport, now_s: float) -> object:
        """Count a report."""

    def on_merged(self, fragment_id: int, evidence: Evidence, parts: Sequence[Contribution]) -> None:
        """Put a merged round into the history of its fragment."""

    def state(self) -> Any:
        """Return a copy of everything, for `restore`."""

    def restore(self, state: Any) -> None:
        """Replace everything by a copy."""


def remembered(lines: Iterator[str], machine: Syncer, seen: Observations, kept: Moments[Any]) -> Iterator[str]:
    """Yield the lines of a tape, and give each to the observations just before the machine gets it, as in the run.

    Args:
        lines: the tape from the moment of machine and observations on.
        machine: replays the lines that this yields.
        seen: of the moment before the first line.
        kept: gets the observations at each snapshot that the run returns to.

    Raises:
        ValueError: a line has evidence that cannot be read.
    """
    for line in lines:
        if line.startswith('["StepReport"'):
            _, then_s, *fields = json.loads(line)
            seen.on_report(StepReport(*fields), then_s)
        elif line.startswith('["merged"'):
            _recall(json.loads(line), machine, seen)
        elif line.startswith('["snapshot"'):
            kept.keep(Moment(*json.loads(line)[2:]), seen.state)
        elif line.startswith('["rewind"'):
            moment = back_to("rewind", without_stamp(json.loads(line)))
            # The replay of the machine reports a moment that is not on the tape.
            if moment is not None and moment in kept:
                seen.restore(kept.at(moment))
        yield line


def _recall(line: Sequence[Any], machine: Syncer, seen: Observations) -> None:
    # The replay of the machine reports a round that was not in flight.
    if len(line) <= EVIDENCE or (round_ := machine.rounds.flying.get(line[2])) is None:
        return
    parts = [part for _, part in sorted(round_.values.items())]
    try:
        seen.on_merged(round_.fragment_id, Evidence(**line[EVIDENCE]), parts)
    except _NOT_EVIDENCE as error:
        raise ValueError(f"the evidence of round {line[2]} on the tape cannot be read ({error})") from error
