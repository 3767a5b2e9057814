"""The messages between the hosts of one slice: orders of host 0, and reports of the other hosts.

Host 0 alone follows, leads and decides (following.py, leading.py). Whatever it does with its devices, it first orders
of the other hosts, so all of them do the same in the same order. The messages Turn, Commit, AdoptValue, Overwrite,
GoBack, BeginCopy and Give are orders with the meaning that they have between slices, without a payload: every host has
its own part of the payload from the hosts of its number in the other slices.
"""

from typing import NamedTuple

from diloco_jax.runtime.slices.messages import CHANGES, BeginCopy, Give, Turn
from diloco_jax.transport.slices.frames import Vocabulary


class BeginTerm(NamedTuple):
    """Order to keep a copy of the present state, because a leader begins."""

    term: int


class EndTerm(NamedTuple):
    """Order to forget the present turn, and to undo the changes of a leader that was lost before its first turn."""


class LoadCopy(NamedTuple):
    """Order to continue from the copy of another slice's state, which has arrived on all hosts."""


class Receivers(NamedTuple):
    """Order to send the values of the next changes to these slices, because this slice leads."""

    slices: tuple[int, ...]


class Disconnect(NamedTuple):
    """Order to end the connection with another slice."""

    slice: int
    reason: str


class Serve(NamedTuple):
    """Order to become a host of the learner, because this slice leads; orders and the learner's commands follow."""

    incarnation: int


class HostReady(NamedTuple):
    """First report: the sender has compiled its programs, and listens for other slices."""


class Reaches(NamedTuple):
    """Report of a connection with another slice; `session` numbers the start of that slice."""

    slice: int
    session: int
    connected: bool
    # Why the connection ended.
    reason: str


class TurnProgress(NamedTuple):
    """Report of the slices that the sender waits for in an attempt of a turn, and whether it holds its whole mean.

    It is repeated until the sender holds it, because a sender that stands still waits for nobody.
    """

    term: int
    change: int
    attempt: int
    complete: bool
    lacks: tuple[int, ...]


class HasValue(NamedTuple):
    """Report that the sender holds its part of the value of a change."""

    term: int
    change: int
    # The fragment whose value it is.
    fragment_id: int


class HasCopy(NamedTuple):
    """Report that the sender holds its part of the copy that it was ordered to wait for."""

    # How often it was ordered to wait for a copy.
    asked: int


class AskedToEnd(NamedTuple):
    """Report that the sender's process was asked to end."""


ORDERS = Vocabulary((BeginTerm, EndTerm, LoadCopy, Receivers, Disconnect, Serve, BeginCopy, Give, Turn, *CHANGES))
REPORTS = Vocabulary((HostReady, Reaches, TurnProgress, HasValue, HasCopy, AskedToEnd))
