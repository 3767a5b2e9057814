"""The versions that a restarted syncer lacks, and whom to ask for them. comeback.py tells the story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from diloco_jax.protocol.member import Member
from diloco_jax.protocol.syncer.rounds import Round

REPETITIONS_MAX = 3  # of a question to somebody who is back; behind the deadline that many are still waited for


@dataclass(slots=True)
class Restoring:
    """The fragments of which a newer version may exist than the driver holds."""

    held: list[int]  # version of each fragment that the driver holds
    digests: list[int]  # of these
    wanted: list[int]  # fragments of which a newer version was made, or may have been
    uncertain: dict[int, Round]  # fragment -> round that was being merged when the syncer died
    awaited: set[str]  # learners that were connected then, or were back and are lost again
    resend_wait_s: float  # when to ask again, at first
    deadline_s: float | None = None  # when to go on without those that did not come back; None while nobody is back
    asked: dict[int, tuple[int, str]] = field(default_factory=dict)  # fragment -> version asked for, and of whom
    asked_s: float = 0.0  # when somebody was asked last
    resend_s: float = 0.0  # when what was asked for is asked for again
    repetitions: int = 0  # those whose question somebody may have heard: each waits twice as long,
    unheard: int = 0  # as it does behind a question to learners of whom nothing was heard since

    def asks(self, present: Iterable[Member], now_s: float) -> list[tuple[str, int, int]]:
        """(learner, fragment, version) to ask for now: the newest that somebody offers, of each who does in turn."""
        found = []
        members, turn = list(present), self.repetitions + self.unheard
        for fragment_id in self.wanted:
            version = max((m.down.offered[fragment_id] for m in members if m.down.offered), default=-1)
            if version > max(self.held[fragment_id], self.asked.get(fragment_id, (-1, ""))[0]):
                holders = [m.learner_id for m in members if m.down.offered and m.down.offered[fragment_id] == version]
                learner_id = holders[turn % len(holders)]
                self.asked[fragment_id] = (version, learner_id)
                found.append((learner_id, fragment_id, version))
        if found:
            self.asked_s = now_s
            self.resend_s = now_s + self.resend_wait_s * 2**turn  # on a slow link it is under way, not lost
        return found

    def repeat(self, members: Mapping[str, Member], now_s: float) -> None:
        """Forget what was asked for, if it is time to ask again."""
        if not self.asked or now_s < self.resend_s:
            return
        if any(members[name].heard_s > self.asked_s for _, name in self.asked.values()):
            self.repetitions, self.unheard = self.repetitions + 1, 0
        else:
            self.unheard += 1  # its lease says whether it is dead
        self.asked.clear()

    def on_back(self, learner_id: str, deadline_s: float) -> None:
        """A learner greeted, or is heard again. The first one makes the wait for the others end some time."""
        self.awaited.discard(learner_id)
        if self.deadline_s is None:
            self.deadline_s, self.repetitions, self.unheard = deadline_s, 0, 0

    def next_deadline_s(self) -> float:
        """Return the time at which a wait ends by itself."""
        if self.asked and self.repetitions < REPETITIONS_MAX:
            return self.resend_s
        deadline_s = inf if self.deadline_s is None else self.deadline_s
        return min(deadline_s, self.resend_s) if self.asked else deadline_s

    def on_lost(self, learner_id: str, last: bool) -> None:
        """A learner is gone or silent again: what it was asked for will not come. It may be the last one."""
        self.asked = {p: ask for p, ask in self.asked.items() if ask[1] != learner_id}
        self.awaited.add(learner_id)
        if last:
            self.deadline_s = None

    def take(self, fragment_id: int, version: int, digest: int) -> None:
        """A newer value arrived."""
        self.held[fragment_id], self.digests[fragment_id] = version, digest
        if self.asked.get(fragment_id, (version, ""))[0] <= version:
            self.asked.pop(fragment_id, None)

    def is_over(self, versions: Sequence[int], now_s: float) -> bool:
        """Say if nothing newer can come, or the wait for it is over."""
        if self.deadline_s is None:
            return False  # without learners there is nothing to go on with, and they may bring everything
        if now_s >= self.deadline_s:  # what a learner that is back holds is worth asking for again
            return not self.asked or self.repetitions >= REPETITIONS_MAX
        if self.asked:
            return False
        return not self.awaited or all(self.held[p] >= self._newest(p, versions) for p in self.wanted)

    def _newest(self, fragment_id: int, versions: Sequence[int]) -> int:
        this = self.uncertain.get(fragment_id)
        return this.global_step if this is not None else versions[fragment_id]

    def to_plain(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        return {
            "held": list(self.held),
            "digests": list(self.digests),
            "wanted": list(self.wanted),
            "uncertain": [this.to_plain() for this in self.uncertain.values()],
            "awaited": sorted(self.awaited),
            "asked": [[p, *ask] for p, ask in self.asked.items()],
            "times": [self.deadline_s, self.asked_s, self.resend_s, self.resend_wait_s],
            "turns": [self.repetitions, self.unheard],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Restoring:
        """Make what `to_plain` described."""
        rounds = [Round.from_plain(this) for this in plain["uncertain"]]
        deadline_s, asked_s, resend_s, resend_wait_s = plain["times"]
        return cls(
            list(plain["held"]),
            list(plain["digests"]),
            list(plain["wanted"]),
            {this.fragment_id: this for this in rounds},
            set(plain["awaited"]),
            resend_wait_s,
            deadline_s,
            {p: (version, learner_id) for p, version, learner_id in plain["asked"]},
            asked_s,
            resend_s,
            *plain["turns"],
        )
