"""Delivery of the syncer's messages to a learner's machine: at once, or between two inner steps.

Every driver receives messages while a step runs. Its mailbox decides when the machine gets each of them:

    PullRequest, AnchorRequest, StatePull   at once: a peer waits for the answer, and no step depends on it
    StateChunk                              at once; dropped from the first step on, when a state is of no more use
    GlobalFragment                          read at once, adopted between two steps, and only the newest per fragment
    Evaluate                                between two steps; a repetition is dropped while the request waits or runs
    any other                               between two steps

The machine gets no message of the last three rows while the driver loads a whole state or evaluates the global model:
the fragments and versions for that are decided already. Waiting messages keep their order. A newer value of a fragment
takes a place at the end, not the place of the value that it replaces.

Time and the link itself (`on_tick`, `on_connected`, `on_disconnected`) bypass the mailbox: the machine gets them at
once.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from diloco_jax.protocol.effects import Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import (
    AnchorRequest,
    Evaluate,
    GlobalFragment,
    PullRequest,
    StateChunk,
    StatePull,
    SyncerMessage,
)

Item = TypeVar("Item")


@dataclass(slots=True)
class Given(Generic[Item]):
    """An input of the machine, and the effects that it led to."""

    message: SyncerMessage
    item: Item
    effects: list[Effect]


class Mailbox(Generic[Item]):
    """The waiting messages of one incarnation of a learner. A driver with threads holds its lock for each call."""

    def __init__(self, machine: Learner) -> None:
        self._machine = machine
        # The key of a value is its fragment; the keys of other messages are -1, -2, ...
        self._waiting: dict[int, tuple[SyncerMessage, Item]] = {}
        self._number = 0

    def arrive(self, message: SyncerMessage, item: Item, now_s: float) -> Given[Item] | None:
        """Take any message but a GlobalFragment: give it to the machine now if that is allowed, else return None.

        Args:
            item: what the driver needs to execute the effects, such as a payload.
        """
        if isinstance(message, PullRequest | AnchorRequest | StatePull):
            return Given(message, item, self._machine.answer(message, now_s))
        if type(message) is StateChunk:
            if self._machine.may_step():
                return None
            return Given(message, item, self._machine.on_message(message, now_s))
        if type(message) is Evaluate and self._repeated(message):
            return None
        self._number -= 1
        self._waiting[self._number] = (message, item)
        return None

    def _repeated(self, message: Evaluate) -> bool:
        """Return whether the request waits already, or runs: each of them would send the same score again."""
        waits = any(other == message for other, _ in self._waiting.values())
        return waits or self._machine.examination.answers(message)

    def read(self, message: GlobalFragment, item: Item, now_s: float) -> None:
        """Take a global fragment that the machine wants, once its value is there with the right digest."""
        self._machine.on_read(message, now_s)
        # An older value of the fragment will not be adopted any more.
        self._waiting.pop(message.fragment_id, None)
        self._waiting[message.fragment_id] = (message, item)

    def fragments(self) -> set[int]:
        """Return the fragments whose values wait."""
        return {key for key in self._waiting if key >= 0}

    def take(self, now_s: float) -> Given[Item] | None:
        """Give the machine the oldest waiting message; None if there is none. Only between two steps."""
        if self._waiting and not (self._machine.start.adopting or self._machine.examination.running):
            for first in self._waiting:
                message, item = self._waiting.pop(first)
                return Given(message, item, self._machine.on_message(message, now_s))
        return None

    def __len__(self) -> int:
        return len(self._waiting)
