"""The learner's machine as its threads use it: one input at a time, with its effects executed before the next one."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from diloco_jax.protocol.effects import Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Given
from diloco_jax.runtime.learner.effects import Effects, Mail

T = TypeVar("T")
IDLE_S = 0.2  # longest sleep of a thread that waits for messages, so that it notices the end


class Signals:
    """The words that the threads of one learner have for each other: that it ends, and that something came."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop  # set from outside to leave politely
        self.woken = threading.Event()  # set when something came that a step thread without a step may wait for
        self.compiled = threading.Event()  # set when steps can run
        self._failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the learner by an error of one of its threads, the first of them; the step thread raises it."""
        self._failure = self._failure or error
        self.woken.set()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Decisions:
    """The machine, its effects and the lock that guards both. Any thread may call."""

    def __init__(self, machine: Learner, effects: Effects, signals: Signals) -> None:
        self.machine = machine
        self._effects = effects
        self._signals = signals
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Tell if the machine has ended, or shall."""
        return bool(self._effects.finished) or self._signals.stop.is_set()

    def ask(self, question: Callable[[Learner], T]) -> T:
        """Call the machine for an answer without effects."""
        with self._lock:
            return question(self.machine)

    def apply(self, decide: Callable[[Learner, float], list[Effect]]) -> None:
        """Give the machine an input and execute what it asks for. Called with the machine and the time in seconds."""
        with self._lock:
            self._effects.execute(decide(self.machine, time.monotonic()))

    def deliver(self, give: Callable[[float], Given[Mail] | None]) -> bool:
        """Give the machine a message by its mailbox, and execute what it asks for; False if `give` gave it none."""
        with self._lock:
            given = give(time.monotonic())
            if given is not None:
                self._effects.execute(given.effects, given.item)
        return given is not None
