"""The syncer's messages on their way into a learner's machine: at once, or in the gap between two inner steps.

Every driver hears its link while a step runs, and asks a mailbox what to do with what came:

    PullRequest, AnchorRequest, StatePull   at once: somebody waits for the answer, and no step depends on it
    StatePart                               at once; dropped from the first step on, since it can be of no use any more
    GlobalFragment                          read at once, adopted in the gap, and of each fragment the newest only
    any other                               in the gap

Nothing is given to the machine in the gap while a whole state is being taken over either, or the global model
evaluated: of which fragments and versions was decided before. What waits keeps its order; a newer value of a fragment
waits in its own place, not in that of the value that it replaces.

Time and the link itself (`on_tick`, `on_connected`, `on_disconnected`) do not come by mail: they are given at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from diloco_jax.protocol.effects import Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import AnchorRequest, GlobalFragment, PullRequest, StatePart, StatePull, SyncerMessage

Item = TypeVar("Item")


@dataclass(slots=True)
class Given(Generic[Item]):
    """An input of the machine, and what it led to."""

    message: SyncerMessage
    item: Item
    effects: list[Effect]


class Mailbox(Generic[Item]):
    """The mail of one life of a learner. A driver with threads calls it, as the machine, under its lock."""

    def __init__(self, machine: Learner) -> None:
        self._machine = machine
        self._waiting: dict[int, tuple[SyncerMessage, Item]] = {}  # by fragment, and by -1, -2, ... whatever else waits
        self._number = 0
        self._at_once: dict[type, Callable[..., list[Effect]]] = {
            PullRequest: machine.on_pull,
            AnchorRequest: machine.on_anchor_request,
            StatePull: machine.on_state_pull,
        }

    def arrive(self, message: SyncerMessage, item: Item, now_s: float) -> Given[Item] | None:
        """Take any message but a GlobalFragment: give it to the machine now if it may, else None.

        Args:
            item: what the driver needs to execute the effects, such as a payload.
        """
        give = self._at_once.get(type(message))
        if give is not None:
            return Given(message, item, give(message, now_s))
        if type(message) is StatePart:
            if self._machine.may_step():
                return None
            return Given(message, item, self._machine.on_message(message, now_s))
        self._number -= 1
        self._waiting[self._number] = (message, item)
        return None

    def read(self, message: GlobalFragment, item: Item, now_s: float) -> None:
        """Take a global fragment that the machine wants, and of which the value is there with the right digest."""
        self._machine.on_read(message, now_s)
        self._waiting.pop(message.fragment_id, None)  # values that nobody will adopt are not kept
        self._waiting[message.fragment_id] = (message, item)

    def take(self, now_s: float) -> Given[Item] | None:
        """Give the machine what has waited longest; None if nothing does. In the gap between two steps only."""
        if self._waiting and not (self._machine.start.adopting or self._machine.examination.running):
            for first in self._waiting:
                message, item = self._waiting.pop(first)
                return Given(message, item, self._machine.on_message(message, now_s))
        return None

    def __len__(self) -> int:
        return len(self._waiting)
