"""The messages between the slices of one island.

One slice leads. Its messages of the kinds in CHANGES change the state of all slices that obey them, in the order of
their numbers; a slice that obeyed number n has the same state, bit for bit, as every other one that did.
"""

import math
from typing import Any, NamedTuple, TypeAlias, get_args

# Numbers of changes, attempts and terms grow by little, so a larger number is an error or a lie. One that a slice
# adopted from another one and increased must still fit into 64 bits.
NUMBER_MAX = 1 << 62


class Lead(NamedTuple):
    """Notice, twice per second, that the sender leads in this term, from the state `base`."""

    term: int
    # The term and the last change of the leader's state when it began.
    base_term: int
    base_change: int


class Stand(NamedTuple):
    """Notice, while nobody leads, of the state that the sender has: the last change, and the term of its leader."""

    term: int
    change: int


class Follow(NamedTuple):
    """Answer to Lead: the sender obeys from now on; without the leader's state it needs a copy."""

    term: int
    has_state: bool


class BeginCopy(NamedTuple):
    """Notice that the sender's changes after this one follow, while a member sends the state after this one."""

    term: int
    change: int


class Give(NamedTuple):
    """Request to send a copy of the present state to another slice."""

    to: int
    change: int


class StatePart(NamedTuple):
    """One part of a state, in order; `total` is the size of the whole in bytes."""

    term: int
    change: int
    start: int
    total: int


class Caught(NamedTuple):
    """Notice that the sender has obeyed everything that it got, so it can compute parts again."""

    change: int


class Turn(NamedTuple):
    """Request to make one inner step together.

    A turn whose members change is repeated with the next attempt, from the same state and with the same parts.
    """

    # That of the leader: a new one may make other parts with the same number, while chunks for the old one are on
    # their way.
    term: int
    # The number of the change that its commit makes.
    change: int
    attempt: int
    # Learning rate of the step.
    rate: float
    # The sample ranges of each part, [[start, stop], ...].
    parts: tuple[tuple[tuple[int, int], ...], ...]
    # The slice that computes each part.
    owners: tuple[int, ...]
    # The slices that add chunks, in ascending order, and those that only take the result.
    members: tuple[int, ...]
    listeners: tuple[int, ...]
    # The name of the learner's state before the step, as JSON (runtime/island/saved_states.py).
    name: str


class Chunk(NamedTuple):
    """One member's chunk of the gradient of one part, with the part's metrics."""

    term: int
    change: int
    attempt: int
    part: int
    metrics: dict[str, float]
    weight: float


class Mean(NamedTuple):
    """One chunk of the mean gradient, from the member that added it."""

    term: int
    change: int
    attempt: int
    chunk: int


class HoldsMean(NamedTuple):
    """Notice to the leader that the sender holds the whole mean gradient of a turn."""

    change: int
    attempt: int


class Commit(NamedTuple):
    """Request to apply the mean gradient of a turn."""

    change: int


class AdoptValue(NamedTuple):
    """Request to adopt a global value of a fragment; its payload has the float32 numbers."""

    change: int
    fragment_id: int
    mode: str
    alpha: float


class Overwrite(NamedTuple):
    """Request to replace a fragment of the parameters; its payload has the float32 numbers."""

    change: int
    fragment_id: int


class Value(NamedTuple):
    """The numbers of a change that a host other than 0 holds, for the host of its number; its payload has them."""

    term: int
    change: int
    fragment_id: int


class GoBack(NamedTuple):
    """Request to go back to the copy of the state that each slice made when the present leader began."""

    change: int


class End(NamedTuple):
    """Last message of a leader: every slice ends with this exit status."""

    status: int


Change: TypeAlias = Commit | AdoptValue | Overwrite | GoBack
CHANGES: tuple[type, ...] = get_args(Change)
Message: TypeAlias = (
    Lead
    | Stand
    | Follow
    | BeginCopy
    | Give
    | StatePart
    | Caught
    | Turn
    | Chunk
    | Mean
    | HoldsMean
    | Change
    | Value
    | End
)
MESSAGES: tuple[type, ...] = get_args(Message)


def check_numbers(message: Any) -> None:
    """Check that the counters of a message are in the range that a run can reach; ValueError if not."""
    for name, value in zip(getattr(message, "_fields", ()), message or (), strict=True):
        if isinstance(value, int) and not 0 <= value <= NUMBER_MAX:
            raise ValueError(f"{type(message).__name__}.{name} is {value}, expected 0 to {NUMBER_MAX}")


def check_turn(turn: Turn, slices: int, samples: int) -> None:
    """Check that slices can make a turn; ValueError names what does not fit.

    Args:
        slices: slices of the island.
        samples: samples of each part.
    """
    members, numbers = turn.members, (*turn.members, *turn.listeners)
    if not members or list(members) != sorted(members) or len({*numbers}) < len(numbers):
        raise ValueError(f"members {members} and listeners {turn.listeners} are not different slices in order")
    if not all(0 <= each < slices for each in numbers):
        raise ValueError(f"members {members} and listeners {turn.listeners} are not all among {slices} slices")
    if not 1 <= len(turn.parts) <= slices or len(turn.owners) != len(turn.parts) or {*turn.owners} - {*members}:
        raise ValueError(f"{len(turn.parts)} parts with the owners {turn.owners} cannot be made by slices {members}")
    for number, part in enumerate(turn.parts):
        fits = all(0 <= start < stop <= NUMBER_MAX for start, stop in part)
        if not fits or sum(stop - start for start, stop in part) != samples:
            raise ValueError(f"part {number} has the ranges {str(part)[:80]}, expected {samples} samples")
    if not math.isfinite(turn.rate):
        raise ValueError(f"the learning rate is {turn.rate}")
