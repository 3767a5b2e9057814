"""The pace of a learner's steps: its driver asks before a step, and tells after it."""

from random import Random
from typing import Protocol


class StepPace(Protocol):
    """Pace of steps. Steady is a plain one; the chips of hardware.Slices fail."""

    @property
    def lost(self) -> bool:
        """True when the learner's state is gone with its hardware: its process ends, and begins again at `begins_s`."""

    def begins_s(self, now_s: float) -> float:
        """Return when the next step can begin, `now_s` at the earliest."""

    def takes_s(self) -> float:
        """Draw what a step takes that begins now, in seconds."""

    def ended(self, began_s: float, now_s: float) -> None:
        """Take note that a step has ended."""


class Steady:
    """Steps of about equal length, one after the other."""

    __slots__ = ("_noise", "_random", "_step_s")
    lost = False

    def __init__(self, step_s: float, noise: float, random: Random) -> None:
        self._step_s = step_s
        self._noise = noise
        self._random = random

    def begins_s(self, now_s: float) -> float:
        return now_s

    def takes_s(self) -> float:
        return self._step_s * (1.0 + self._noise * self._random.random())

    def ended(self, began_s: float, now_s: float) -> None:
        del began_s, now_s
