"""Rules of the supervisor for an island whose processes have all ended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from diloco_jax.runtime.records.signals import after_end
from diloco_jax.runtime.records.status import COMPLETE, MERGED_ALL


@dataclass(frozen=True, slots=True)
class IslandEnd:
    """End of an island: its exit status, and the run's last state."""

    status: int
    state: str
    # `islands.command` started it.
    own_program: bool = False
    # It has joined the run at least once.
    joined: bool = False
    # Python could not load its program.
    unloadable: bool = False
    # An operator has banned it from the run.
    banned: bool = False


@dataclass(frozen=True, slots=True)
class EndRule:
    """Consequence of some ends.

    Attributes:
        then: left islands may come back later; a failed one makes the run fail if too few remain.
        line: the line for people, with the fields name, exit and last; "" for none.
        reason: why the supervisor gives the island up, for its file in health/; "" for none.
    """

    applies: Callable[[IslandEnd], bool]
    then: Literal["left", "failed", "restart"]
    line: str = ""
    reason: str = ""


# The first rule that applies counts.
RULES = (
    EndRule(lambda end: end.status == 0 and end.state in MERGED_ALL, "left"),
    EndRule(
        lambda end: end.status == 0 and end.own_program and not end.joined,
        "failed",
        "{name} ended without joining the run; call diloco_jax.join in islands.command",
    ),
    # The island was drained.
    EndRule(lambda end: end.status == 0, "left", "{name} left: {last}"),
    # An island that fails after the end of the run has nothing more to do.
    EndRule(lambda end: end.state == COMPLETE, "left"),
    # A ban is not a failure, so the others continue. After `diloco admit` the user may start the island again.
    EndRule(lambda end: end.banned, "left", "{name} is banned; not started again: {last}"),
    EndRule(
        lambda end: not after_end(end.status).again or (end.unloadable and not end.joined),
        "failed",
        "{exit}; not started again",
        "does not restart it, because a restart would fail as well",
    ),
    EndRule(lambda end: True, "restart"),
)


def rule_of(end: IslandEnd) -> EndRule:
    """Return the rule that applies to an end."""
    return next(rule for rule in RULES if rule.applies(end))
