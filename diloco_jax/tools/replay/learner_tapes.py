"""The learners' tapes: they determine how far each incarnation must be repeated, and what must be kept on the way.

An incarnation is repeated up to its last merged value, or up to the last copy of its state that another repeated
incarnation loaded. Later steps have no influence on the global model.
"""

import json
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.releases import check_readable
from diloco_jax.runtime.learner.tape import learner_tape_path
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.runtime.records.tape_file import raw_lines
from diloco_jax.tools.replay.script import Brought, LearnerIncarnation, MergedRound, Name, Script


class TookValue(NamedTuple):
    """The incarnation adopted a global fragment."""

    name: Name
    # The newest round that had merged a value of this incarnation.
    merged_round: int


class TookState(NamedTuple):
    """The incarnation loaded a whole state."""

    donor: LearnerIncarnation
    donor_step: int
    fragments: tuple[int, ...]


class Copied(NamedTuple):
    """The incarnation copied its state, for a receiver or for the disk."""

    local_step: int


class SentValue(NamedTuple):
    """The incarnation sent its value for a round."""

    fragment_id: int
    global_step: int
    local_step: int


class TapedStep(NamedTuple):
    """The incarnation made an inner step."""

    local_step: int
    clock: int
    ranges: tuple[tuple[int, int], ...]
    loss: float | None


class Begin(NamedTuple):
    """The first line of a tape."""

    learner_id: str
    incarnation: int
    step_samples: int


class Lost(NamedTuple):
    """A number of lines is missing before this line."""

    lines: int


class OwnData(NamedTuple):
    """The incarnation's loop reads its own data; `guarantee` says what is known of it."""

    guarantee: str


class ResumedLoader(NamedTuple):
    """The incarnation's loader continued after a step of an earlier incarnation."""

    incarnation: int
    local_step: int


Entry = Begin | OwnData | ResumedLoader | TookValue | TookState | Copied | SentValue | TapedStep | Lost


def read_entries(path: Path) -> Generator[tuple[int, Entry]]:
    """Yield the entries of a learner's tape with their line numbers; ValueError names a line that is wrong."""
    learner_id, chain = "", TapeChain()
    try:
        for number, raw in enumerate(raw_lines(path), start=1):
            line = raw.decode(errors="replace")
            try:
                fields = json.loads(line)
                entry = _entry(fields, learner_id)
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(f"{path} line {number} cannot be read ({error}): {line[:120]!r}") from error
            if (number == 1) != isinstance(entry, Begin):
                raise ValueError(f"{path} line {number}: 'begin' must be the first line and no other; is it one tape?")
            if isinstance(entry, Begin):
                learner_id = entry.learner_id
            if fields[0] == "end" and fields[3:] and fields[3] != chain.head:
                raise ValueError(
                    f"{path}: a line before line {number} is missing, duplicated or changed; copy the tape from this "
                    "learner's machine again"
                )
            chain.add(raw)
            if entry is not None:
                yield number, entry
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: this learner's contributions cannot be repeated without it; copy the tapes folder of "
            "its machine into the run's folder"
        ) from None


def _entry(fields: list[Any], learner_id: str) -> Entry | None:
    match fields:
        case ["begin", str(name), int(incarnation), int(step_samples), *stamp]:
            check_readable(f"the tape of {name}, incarnation {incarnation}", *stamp)
            return Begin(name, incarnation, step_samples)
        case ["data", str(guarantee)]:
            return OwnData(guarantee)
        case ["loader", int(incarnation), int(local_step)]:
            return ResumedLoader(incarnation, local_step)
        case ["adopt", int(fragment_id), int(version), int(), int(digest), int(merged_round)]:
            return TookValue(Name(fragment_id, version, digest), merged_round)
        case ["state", str(donor), int(incarnation), int(donor_step), list(fragments)]:
            source = LearnerIncarnation(donor or learner_id, incarnation)
            return TookState(source, donor_step, tuple(map(int, fragments)))
        case ["staged_state", int(local_step)] | ["saved", int(local_step), int()]:
            return Copied(local_step)
        case ["sent", int(fragment_id), int(global_step), int(local_step)]:
            return SentValue(fragment_id, global_step, local_step)
        case ["step", int(local_step), int(clock), list(ranges), (int() | float() | None) as loss]:
            return TapedStep(local_step, clock, tuple((int(start), int(stop)) for start, stop in ranges), loss)
        case ["lost", int(lines)]:
            return Lost(lines)
        case ["end", *_]:
            return None
    raise ValueError("not a line of a learner's tape")


@dataclass(slots=True)
class Outline:
    """The line numbers of a tape's entries, and the part of the tape that must be repeated."""

    path: Path
    step_samples: int = 0
    # The lines of local steps 1, 2, ...
    steps: list[int] = field(default_factory=list)
    adopted: list[tuple[int, Name]] = field(default_factory=list)
    took: list[TookState] = field(default_factory=list)
    # The lines of copies by local step.
    copied: dict[int, list[int]] = field(default_factory=dict)
    # The local step of the copies that no line tells of, by line.
    kept: dict[int, int] = field(default_factory=dict)
    sent: list[tuple[int, SentValue]] = field(default_factory=list)
    # The line of the state that it loaded; without one it begins with the initial moments at line 1.
    loaded_at: int = 1
    lost_at: int | None = None
    # The last line that must be repeated.
    stop: int = 0
    # The number of merges that use a value, by (fragment, local step).
    values: Counter[tuple[int, int]] = field(default_factory=Counter)
    # The number of incarnations that load the state, by local step.
    copies: Counter[int] = field(default_factory=Counter)

    def line_of(self, local_step: int, what: str) -> int:
        """Return the line of a local step; ValueError if the tape ends before it."""
        if not 1 <= local_step <= len(self.steps):
            raise ValueError(
                f"{self.path} ends after local step {len(self.steps)}, but {what} is of local step {local_step}; "
                "the end of the tape is missing"
            )
        return self._whole(self.steps[local_step - 1], what)

    def lines_of_copy(self, local_step: int, what: str, *, own: bool) -> list[int]:
        """Return the lines of copies of the state after a local step; ValueError if the tape ends before it.

        A later incarnation of the same learner may have kept the state in the memory of another slice. No line tells
        when: after the step, or after one of the values that the island adopted before the next step. Step 0 is the
        state before the first step.

        Args:
          own: whether a later incarnation of the same learner loaded the state.
        """
        lines = self.copied.setdefault(local_step, [])
        if own or not lines:
            first = self.line_of(local_step, what) if local_step else self.loaded_at
            end = self.steps[local_step] if local_step < len(self.steps) else inf
            end = end if self.lost_at is None else min(end, self.lost_at)
            found = [first, *(line for line, _ in self.adopted if first < line < end)]
            self.kept |= {line: local_step for line in found if line not in lines}
            lines[:] = sorted({*lines, *found})
        return [self._whole(line, what) for line in lines]

    def _whole(self, line: int, what: str) -> int:
        if self.lost_at is not None and line > self.lost_at:
            raise ValueError(
                f"{self.path} lacks lines before line {self.lost_at} (the disk could not store them), and {what} comes "
                "later; use --until to repeat only the part before it"
            )
        return line


def outline(path: Path) -> Outline:
    """Read a whole tape; ValueError names it if it is missing or broken."""
    found = Outline(path)
    for number, entry in read_entries(path):
        match entry:
            case Begin():
                found.step_samples = entry.step_samples
            case TookValue():
                found.adopted.append((number, entry.name))
            case TookState():
                if found.steps:
                    raise ValueError(f"{path} line {number}: a state can be loaded only before the first step")
                found.took.append(entry)
                found.loaded_at = number
            case Copied(local_step):
                found.copied.setdefault(local_step, []).append(number)
            case SentValue():
                found.sent.append((number, entry))
            case Lost():
                found.lost_at = number if found.lost_at is None else found.lost_at
            case TapedStep():
                expected = len(found.steps) + 1
                if found.lost_at is None and entry.local_step != expected:
                    raise ValueError(
                        f"{path} line {number} is of local step {entry.local_step}, expected {expected}: "
                        "steps are missing"
                    )
                found.steps.append(number)
    return found


class NeededIncarnations:
    """The part of each incarnation to repeat; ValueError names a tape that is missing, broken or too short."""

    def __init__(self, run_dir: Path, script: Script) -> None:
        self._run_dir = run_dir
        self._newest = script.newest
        self.incarnations: dict[LearnerIncarnation, Outline] = {}
        self._queue: list[LearnerIncarnation] = []
        for event in script.events:
            if isinstance(event, MergedRound):
                order = event.order
                for part, incarnation in zip(order.contributions, event.incarnations, strict=True):
                    need = self._need(incarnation)
                    line = need.line_of(part.local_step, f"its value in round {order.global_step}")
                    need.stop = max(need.stop, line)
                    need.values[order.fragment_id, part.local_step] += 1
        while self._queue:
            receiver = self._queue.pop()
            what = f"{receiver.learner_id} (incarnation {receiver.number})"
            for took in self.incarnations[receiver].took:
                need = self._need(took.donor)
                own = took.donor.learner_id == receiver.learner_id
                need.stop = max(need.stop, *need.lines_of_copy(took.donor_step, what, own=own))
                need.copies[took.donor_step] += 1
        # The number of uses of each global value, by learners and by restarted syncers.
        self.names = Counter(event.name for event in script.events if isinstance(event, Brought))
        for need in self.incarnations.values():
            self.names.update(name for line, name in need.adopted if line <= need.stop)

    def _need(self, incarnation: LearnerIncarnation) -> Outline:
        if incarnation not in self.incarnations:
            need = self.incarnations[incarnation] = outline(learner_tape_path(self._run_dir, *incarnation))
            newest = self._newest.get(incarnation, 0)
            if need.lost_at is None and len(need.steps) < newest:
                raise ValueError(
                    f"{need.path} ends after local step {len(need.steps)}, but step {newest} was reported to the "
                    "syncer; the end of the tape is missing"
                )
            self._queue.append(incarnation)
        return self.incarnations[incarnation]
