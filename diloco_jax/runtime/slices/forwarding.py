"""The state of the leader's slice, as the learner's machine uses it: it forwards changes to the other slices."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from diloco_jax.runtime.island.saved_states import Leaves
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.messages import AdoptValue, GoBack, Overwrite, Value


class ForwardedChanges(Protocol):
    """The changes of the leader's slice, which one host of it forwards."""

    # Whether the slices have a state of an earlier incarnation, which the learner has not loaded.
    has_unloaded: bool

    def change(self, message: Callable[[int], Any], values: np.ndarray | None = None) -> None:
        """Forward a change, made of its number, and this host's part of its value."""

    def renew(self) -> None:
        """Let every slice get this one's state, because it loaded one that they do not have."""


class HostChanges:
    """The changes of a host other than 0; host 0 forwards everything but this host's parts of values."""

    has_unloaded = False

    def __init__(self, member: SliceMember) -> None:
        self._member = member
        # The slices that get the values of the next changes.
        self.receivers: tuple[int, ...] = ()

    def change(self, message: Callable[[int], Any], values: np.ndarray | None = None) -> None:
        member, standing = self._member, self._member.standing
        member.standing = standing._replace(change=standing.change + 1)
        if values is None:
            return
        value = Value(*member.standing, message(member.standing.change).fragment_id)
        for slice_ in self.receivers:
            member.links.send(slice_, value, values)

    def renew(self) -> None:
        self._member.standing = self._member.standing._replace(change=self._member.standing.change + 1)


class ForwardingIsland:
    """The exchanged state of the leader's slice, whose changes from outside are made on every slice.

    Args:
        changes: forwards the changes of this host.
        member: this host of the slice.
    """

    def __init__(self, changes: ForwardedChanges, member: SliceMember) -> None:
        self._changes, self._member = changes, member
        self._island = member.loop.island

    def __getattr__(self, name: str) -> Any:
        return getattr(self._island, name)

    def place(self, fragment: Any, values: Any) -> None:
        """Place nothing: the other slices need the values in CPU memory."""

    def adopt(
        self, fragment: Any, values: Any, *, mode: Any = "overwrite", alpha: float = 0.0, sent: Any = None
    ) -> None:
        flat = self._member.flat(fragment.fragment_id, values)
        self._changes.change(lambda change: AdoptValue(change, fragment.fragment_id, mode, alpha), flat)
        self._island.adopt(fragment, values, mode=mode, alpha=alpha, sent=sent)

    def overwrite(self, fragment: Any, values: Any) -> None:
        flat = self._member.flat(fragment.fragment_id, values)
        self._changes.change(lambda change: Overwrite(change, fragment.fragment_id), flat)
        self._island.overwrite(fragment, values)

    def load_shards(self, leaves: Leaves) -> None:
        """Load a state; the other slices have a copy of the one in memory, and get one from disk from this slice."""
        self._changes.has_unloaded = False
        if leaves is self._member.copy:
            self._changes.change(GoBack)
            self._island.load_shards(leaves)
        else:
            self._island.load_shards(leaves)
            self._changes.renew()

    def load_moments(self, leaf: Callable[[str], Any]) -> None:
        self._changes.has_unloaded = False
        self._island.load_moments(leaf)
        self._changes.renew()
