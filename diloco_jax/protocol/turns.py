"""The table of turns: the fragment that is due at each global step. Both machines derive it from the settings alone.

* At most one fragment is due at a step, so that each step moves the bytes of one fragment at most.
* Classes of tensors with equal periods form one group. No fragment belongs to two groups.
* Of two periods of a phase the smaller divides the larger. Then the turns of a fragment are exactly its period apart,
  and all fragments find a place if sum_g P_g / H_g <= 1.
* Groups take their steps in ascending order of periods. With F of the H steps of its period left, a group puts its
  n fragments on those number floor(i F / n), i < n: with one group on floor(p H / P).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

# One period for all tensors, or one by class of tensor.
Periods = int | dict[str, int]

# The class of tensors that no other class names.
REST = "rest"
_NEVER_LATER: Mapping[int, Periods] = MappingProxyType({})


class Phase(NamedTuple):
    """A part of the run, from a global step to the next phase or the end."""

    first_step: int
    # The period of each group.
    periods: tuple[int, ...]

    @property
    def cycle(self) -> int:
        """Return the longest period: after so many steps the table repeats."""
        return max(self.periods)

    def turns(self, counts: Sequence[int]) -> int:
        """Count the steps of a cycle that have a due fragment, if the groups have so many fragments."""
        return sum(count * self.cycle // period for count, period in zip(counts, self.periods, strict=True))


class Groups(NamedTuple):
    """The classes of tensors that share their periods, and these periods in each phase of the run."""

    # Names of each group's classes.
    classes: tuple[tuple[str, ...], ...]
    # The first phase starts at step 0.
    phases: tuple[Phase, ...]

    @property
    def gap_max(self) -> int:
        """Return the most global steps from one turn of a fragment to its next."""
        cycles = [phase.cycle for phase in self.phases]
        return max(cycles[0], *map(sum, pairwise(cycles)), 0)


def groups_of(sync_every: Periods, sync_later: Mapping[int, Periods] = _NEVER_LATER) -> Groups:
    """Read the settings of periods.

    Raises:
        ValueError: a period or a step is not a positive number, phases name different classes, or a period does not
            divide the next longer one; the message names setting, value and remedy.
    """
    sections: list[tuple[int, str, Periods]] = [(0, "sync_every", sync_every)]
    for first_step, periods in sorted(sync_later.items()):
        if first_step < 1:
            raise ValueError(f"protocol.sync_later starts at global step {first_step}; use 1 or later")
        sections.append((first_step, f"sync_later.{first_step}", periods))
    names: tuple[str, ...] = next(
        (tuple(periods) for _, _, periods in sections if not isinstance(periods, int)), (REST,)
    )
    columns: dict[str, list[int]] = {name: [] for name in names}
    for _, where, periods in sections:
        for name, period in _by_class(where, periods, names).items():
            columns[name].append(period)
    classes: dict[tuple[int, ...], tuple[str, ...]] = {}
    for name, column in columns.items():
        classes[tuple(column)] = (*classes.get(tuple(column), ()), name)
    phases = [Phase(start, tuple(column[i] for column in classes)) for i, (start, _, _) in enumerate(sections)]
    return Groups(tuple(classes.values()), tuple(phases))


def _by_class(where: str, periods: Periods, names: Sequence[str]) -> dict[str, int]:
    """Return the periods of a phase by class, checked."""
    found = dict.fromkeys(names, periods) if isinstance(periods, int) else periods
    if set(found) != set(names):
        odd = sorted(set(found) ^ set(names)) or [REST]
        raise ValueError(f"protocol.{where} and another phase do not both name '{odd[0]}'; give each the same classes")
    for name, period in found.items():
        if period < 1:
            setting = where if isinstance(periods, int) else f"{where}.{name}"
            raise ValueError(
                f"protocol.{setting} is {period}, but must be at least 1; "
                "change it in the config or on the command line"
            )
    for short, long in pairwise(sorted(found.values())):
        if long % short:
            raise ValueError(
                f"protocol.{where} has the periods {short} and {long}, and only if the shorter divides the longer can "
                f"turns be evenly apart; use {long // short * short} or {(long // short + 1) * short} for {long}"
            )
    return {name: found[name] for name in names}


def deal(sizes: Sequence[int], groups: Groups, at_most: int) -> tuple[int, ...]:
    """Return how many fragments each group gets, so that the bytes of a step are as even as its periods allow.

    Each more fragment is one more round. So a group gets one more only while its fragments are larger than the mean of
    all steps and a step is left for it; the group with the largest fragments is first.

    Args:
        sizes: elements of each group; a group without elements gets no fragment.
        at_most: limit of the fragments of all groups.

    Raises:
        ValueError: not even one fragment of each group fits.
    """
    counts = [int(size > 0) for size in sizes]
    if not fits(counts, groups, at_most):
        each = ", ".join(f"{'+'.join(names)}: {size:,}" for names, size in zip(groups.classes, sizes, strict=True))
        raise ValueError(
            f"protocol.sync_every leaves no separate global step for one fragment of each class ({each} elements) "
            f"within num_fragments = {at_most}; use longer periods, or fewer different ones"
        )
    mean = max(sum(size / period for size, period in zip(sizes, phase.periods, strict=True)) for phase in groups.phases)
    while True:
        largest = sorted((g for g, n in enumerate(counts) if n), key=lambda g: -sizes[g] / counts[g])
        for g in largest:
            more = [count + (i == g) for i, count in enumerate(counts)]
            if sizes[g] > counts[g] * mean and fits(more, groups, at_most):
                counts = more
                break
        else:
            return tuple(counts)


def fits(counts: Sequence[int], groups: Groups, at_most: int) -> bool:
    """Return whether so many fragments of each group have separate global steps, in every phase."""
    return sum(counts) <= at_most and all(phase.turns(counts) <= phase.cycle for phase in groups.phases)


class Turns:
    """The table of turns; `class_fragments` has the number of each group, and is empty for a single group."""

    def __init__(
        self,
        sync_every: Periods,
        num_fragments: int,
        sync_later: Mapping[int, Periods] = _NEVER_LATER,
        class_fragments: Sequence[int] = (),
    ) -> None:
        groups = groups_of(sync_every, sync_later)
        counts = class_fragments or (num_fragments,)
        assert len(counts) == len(groups.classes), "protocol.class_fragments are not known: no model was cut yet"
        self._starts = [phase.first_step for phase in groups.phases]
        self._tables = [(phase.cycle, _table(phase, counts)) for phase in groups.phases]
        self._windows: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def due(self, global_step: int) -> int:
        """Return the fragment that is due at this global step, or -1."""
        cycle, due = self._tables[self._phase(global_step)]
        return due.get(global_step % cycle, -1)

    def due_within(self, first_step: int, count: int) -> tuple[int, ...]:
        """Return the fragments that are due at `count` global steps from the first one on, sorted."""
        # Learners call this after every step, so results are kept.
        phase, last = self._phase(first_step), self._phase(first_step + count - 1)
        begins = first_step % self._tables[phase][0] if phase == last else -first_step
        fragments = self._windows.get((phase, begins, count))
        if fragments is None:
            due = {self.due(step) for step in range(first_step, first_step + count)}
            fragments = self._windows[phase, begins, count] = tuple(sorted(due - {-1}))
        return fragments

    def next_due(self, global_step: int) -> int:
        """Return the first global step after this one that has a due fragment."""
        step = global_step + 1
        while self.due(step) < 0:
            step += 1
        return step

    def _phase(self, global_step: int) -> int:
        return bisect_right(self._starts, global_step) - 1 if len(self._starts) > 1 else 0


def _table(phase: Phase, counts: Sequence[int]) -> dict[int, int]:
    """Return the fragments that are due, by global step modulo the cycle."""
    due: dict[int, int] = {}
    before = 1
    # Steps modulo `before` that no group has taken.
    free = [0]
    for period, group in sorted((period, group) for group, period in enumerate(phase.periods)):
        free = sorted(start + step for start in range(0, period, before) for step in free)
        chosen = [free[i * len(free) // counts[group]] for i in range(counts[group])]
        for fragment_id, step in enumerate(chosen, start=sum(counts[:group])):
            due |= dict.fromkeys(range(step, phase.cycle, period), fragment_id)
        free, before = sorted(set(free) - set(chosen)), period
    return due
