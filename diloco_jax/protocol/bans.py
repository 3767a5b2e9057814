"""Bans: an operator excludes a learner from a run by its name, until an operator admits that name again.

A ban belongs to the run and not to a history of it. So it holds in every later epoch of the syncer, and also after a
rewind: a rewind makes rounds void, but an operator who banned a learner does not expect it back. For the same reason a
rewind does not repeat a ban that was lifted since the snapshot.
"""

from collections.abc import Iterable, Iterator

# Only the texts to a banned learner contains these words; its process ends for good when it reads them.
BANNED = "is banned from this run"
# Names that can be banned at the same time, and characters of a reason.
BANS_MAX = 1024
WHY_LENGTH_MAX = 200


def wrong_reason(why: str) -> str:
    """Return what is wrong with the reason of a ban; "" if nothing is."""
    if not why.strip():
        return "a ban needs a reason; give one with --why TEXT"
    if len(why) > WHY_LENGTH_MAX:
        return f"the reason of the ban has {len(why)} characters, the limit is {WHY_LENGTH_MAX}; shorten it"
    if not why.isprintable():
        return f"the reason of the ban {why!r} has unprintable characters, such as a line break; give one line of text"
    return ""


class Bans:
    """The banned names of a run, in the order of their bans, each with its reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def __contains__(self, learner_id: str) -> bool:
        return learner_id in self._reasons

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._reasons.items())

    def why(self, learner_id: str) -> str:
        """Return the reason of a ban; "" if the name is not banned."""
        return self._reasons.get(learner_id, "")

    def check_new(self, learner_id: str, why: str) -> None:
        """Raise ValueError if this ban is not possible."""
        if wrong := wrong_reason(why):
            raise ValueError(wrong)
        if learner_id in self._reasons:
            raise ValueError(
                f"{learner_id} is banned already: {self._reasons[learner_id]}; to change the reason, admit it first"
            )
        if len(self._reasons) >= BANS_MAX:
            raise ValueError(f"{BANS_MAX} names are banned, which is the limit; admit one first (`diloco admit NAME`)")

    def add(self, learner_id: str, why: str) -> None:
        """Record a ban."""
        self._reasons[learner_id] = why

    def lift(self, learner_id: str) -> None:
        """Forget a ban; ValueError if there is none."""
        if learner_id not in self._reasons:
            raise ValueError(f"{learner_id[:80]!r} is not banned; `diloco status` lists the banned names")
        del self._reasons[learner_id]

    def refusal(self, learner_id: str) -> str:
        """Return the text to a banned learner, with the reason and the remedy; "" if it is not banned."""
        if learner_id not in self._reasons:
            return ""
        remedy = f"lift the ban (`diloco admit {learner_id} RUN`) and start the learner again"
        return f"{learner_id} {BANNED}: {self._reasons[learner_id]}; to let it return, {remedy}"

    def state(self) -> list[tuple[str, str]]:
        """Return all bans as plain values that JSON keeps exactly."""
        return list(self._reasons.items())

    def restore(self, state: Iterable[tuple[str, str]]) -> None:
        """Replace all bans by those that `state` returned."""
        self._reasons = {learner_id: why for learner_id, why in state}
