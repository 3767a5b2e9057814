"""The syncer's part of recovery: it chooses donors of states and forwards between them and their receivers.

protocol/learner/recovery.py describes the transfer.
"""

from collections.abc import Container
from typing import Any

from diloco_jax.protocol.effects import (
    Drop,
    Effects,
    Note,
    Send,
)
from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, JOINING, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import StateChunk, StateEnd, StatePull, StateRefused, StateRequest, StateUnavailable

# Failed donors that the syncer remembers for one receiver.
AVOIDED_MAX = 64


class Matchmaker:
    """The syncer's side of recovery: the donor of each receiver."""

    def __init__(self, effects: Effects, membership: Membership) -> None:
        self._effects = effects
        self._membership = membership
        # Receiver -> its donor and the donor's incarnation.
        self._donors: dict[str, tuple[str, int]] = {}
        # Receiver -> donors that refused or were lost.
        self._avoided: dict[str, list[str]] = {}

    def on_request(self, message: StateRequest, global_step: int, awaited: Container[str] = ()) -> None:
        """Forward a request to the donor that it names or, if it names none, to a donor that is chosen now.

        Args:
            awaited: learners that a restarted syncer still expects back.
        """
        receiver = message.learner_id
        donor = self._live(receiver)
        if message.donor:
            if donor is None or donor.learner_id != message.donor:
                self._unavailable(receiver, message.donor, "it is not the donor any more")
                return
            self._send(donor.learner_id, StatePull(receiver, message.clock, message.donor_step, message.part))
            return
        if donor is None:
            donor = self._choose(receiver)
            if donor is None:
                self._avoided.pop(receiver, None)
                # If a possible donor is about to be active again, the receiver's next request finds it.
                if not self._comes_back(receiver, awaited):
                    self._unavailable(receiver, "", "no other learner is active and free to give its state")
                return
            former = self._membership.get(*self._donors.get(receiver, ("", 0)))
            if former is not None:
                # The former donor is silent. It may return, and need not keep its copy then.
                self._send(former.learner_id, StateEnd(receiver))
            self._donors[receiver] = (donor.learner_id, donor.incarnation)
            note = Note("recovering", global_step, -1, (receiver, donor.learner_id), "takes its state")
            self._effects.append(note)
        self._send(donor.learner_id, StatePull(receiver, message.clock, 0, 0))

    def _send(self, peer: str, message: StatePull | StateEnd | StateChunk | StateUnavailable) -> None:
        self._effects.append(Send(peer, message))

    def _unavailable(self, receiver: str, donor: str, reason: str) -> None:
        self._send(receiver, StateUnavailable(donor, reason))

    def _live(self, receiver: str) -> Member | None:
        donor = self._membership.get(*self._donors.get(receiver, ("", 0)))
        return donor if donor is not None and donor.state == ACTIVE else None

    def _choose(self, receiver: str) -> Member | None:
        """Return the active learner with fewest failures for this receiver, then fewest receivers, then first name."""
        busy = [name for name, _ in self._donors.values()]
        failed = self._avoided.get(receiver, [])
        others = [m.learner_id for m in self._membership.live_members() if m.learner_id != receiver]
        name = min(others, key=lambda name: (failed.count(name), busy.count(name), name), default="")
        return self._membership.members.get(name)

    def _comes_back(self, receiver: str, awaited: Container[str]) -> bool:
        """Return whether another learner that has trained is about to be active again, as after a syncer's restart."""
        trained = [m for m in self._membership.members.values() if m.local_step > 0 and m.learner_id != receiver]
        return any(m.state == JOINING or m.learner_id in awaited for m in trained)

    def on_part(self, part: StateChunk) -> None:
        """Forward a part to its receiver."""
        if not part.part < part.parts:
            self._drop(part, f"part {part.part} of {part.parts} of a state is impossible")
        elif self._donors.get(part.receiver) != (part.learner_id, part.incarnation):
            self._drop(part, f"a part of its state for {part.receiver[:64]!r}, who asked for none")
        elif self._membership.members[part.receiver].state == DISCONNECTED:
            self._drop(part, f"a part of its state for {part.receiver}, who is away")
        else:
            self._send(part.receiver, part)

    def _drop(self, part: StateChunk, reason: str) -> None:
        self._effects.append(Drop(part.learner_id, reason))

    def on_refused(self, message: StateRefused) -> None:
        """Tell the receiver to request a state of another donor."""
        if self._donors.get(message.receiver) == (message.learner_id, message.incarnation):
            self._part_ways(message.receiver, message.reason)

    def _part_ways(self, receiver: str, reason: str) -> None:
        donor, _ = self._donors.pop(receiver)
        failed = self._avoided.setdefault(receiver, [])
        failed.append(donor)
        del failed[:-AVOIDED_MAX]
        self._unavailable(receiver, donor, reason)

    def on_done(self, receiver: str) -> None:
        """Release the donor of a receiver that needs no more."""
        self._avoided.pop(receiver, None)
        donor, _ = self._donors.pop(receiver, ("", 0))
        if donor:
            self._send(donor, StateEnd(receiver))

    def on_lost(self, learner_id: str, reason: str) -> None:
        """Tell the receivers of a lost donor. A lost receiver keeps its donor, since it may return and resume."""
        for receiver in [r for r, (donor, _) in self._donors.items() if donor == learner_id]:
            self._part_ways(receiver, reason)

    def donor_of(self, receiver: str) -> str:
        """Return the name of a receiver's donor, or an empty string."""
        return self._donors.get(receiver, ("", 0))[0]

    def clear(self) -> None:
        """Forget all matches when the syncer lost every link."""
        self._donors.clear()
        self._avoided.clear()

    def state(self) -> dict[str, Any]:
        avoided = [[receiver, list(names)] for receiver, names in self._avoided.items()]
        return {"donors": [[r, *d] for r, d in self._donors.items()], "avoided": avoided}

    def restore(self, state: dict[str, Any]) -> None:
        self._donors = {receiver: (donor, incarnation) for receiver, donor, incarnation in state["donors"]}
        self._avoided = {receiver: list(names) for receiver, names in state["avoided"]}
