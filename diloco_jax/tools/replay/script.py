"""The script of a replay, from the syncer's tape alone: merged rounds, snapshots, and returns to snapshots.

The syncer's machine repeats its decisions (protocol/syncer/tape.py), and the script records their effects in order.
Nothing is trained yet, so anything that is missing on the tapes is found before the first step.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from diloco_jax.protocol.corpora import OF_DATA, SEPARATE, OwnCorpus
from diloco_jax.protocol.effects import Discard, Drop, Effect, Merge, Restore
from diloco_jax.protocol.membership import OBSOLETE, OPEN
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.releases import decided_elsewhere
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS, NO_BUDGET, Budget
from diloco_jax.protocol.syncer.tape import (
    Moment,
    back_to,
    captured,
    limits_before,
    remove_stamp,
    replay,
    returns,
    stamps,
    without_stamp,
)
from diloco_jax.protocol.watch.auditor import HELLO_CORPUS
from diloco_jax.protocol.watch.exclusion_auditor import ExclusionAuditor
from diloco_jax.runtime.records.files import CHECKPOINTS, SUMMARY_FILE
from diloco_jax.runtime.records.segments import closed_segments
from diloco_jax.runtime.records.tape_chain import TapeMark, checked
from diloco_jax.runtime.records.tape_file import raw_lines, read_lines

if TYPE_CHECKING:
    from diloco_jax.settings.run import RunConfig

Fingerprint = tuple[tuple[str, str], ...]
# The least fields of a greeting and of a report.
FIELDS_MIN = 5
BEGIN_FIELDS_MIN = 3


class LearnerIncarnation(NamedTuple):
    """One incarnation of a learner."""

    learner_id: str
    number: int


class Name(NamedTuple):
    """A global value of a fragment; after a syncer's restart, two values may have one version but different digests."""

    fragment_id: int
    version: int
    digest: int


class MergedRound(NamedTuple):
    """A round that merged at least one value."""

    order: Merge
    # The incarnations of the order's parts.
    incarnations: tuple[LearnerIncarnation, ...]
    # The digest of the new value in the run.
    digest: int
    excluded: tuple[str, ...]
    # The newest local steps that were reported since the previous round.
    reported: tuple[tuple[LearnerIncarnation, int], ...]


class SnapshotPoint(NamedTuple):
    """The present model is a snapshot that the run may return to."""

    moment: Moment


class Back(NamedTuple):
    """The model returns to a snapshot."""

    moment: Moment


class Brought(NamedTuple):
    """A learner sends a value that the syncer had lost."""

    name: Name


Event = MergedRound | SnapshotPoint | Back | Brought


@dataclass(slots=True)
class Script:
    """The events of a run in their order; `take` collects them while the machine runs."""

    fingerprint: Fingerprint
    # The digests of the initial fragments.
    digests: tuple[int, ...] = ()
    events: list[Event] = field(default_factory=list)
    # The closed rounds at the end.
    global_step: int = 0
    # Whether the run's limits, and so its learning-rate schedule, changed during the run.
    raised: bool = False
    # The steps of each incarnation's learning-rate schedule, from its greeting.
    planned: dict[LearnerIncarnation, int] = field(default_factory=dict)
    # What each incarnation told of the corpus that it reads.
    corpora: dict[LearnerIncarnation, OwnCorpus] = field(default_factory=dict)
    # The number of returns to each snapshot.
    returns: Counter[Moment] = field(default_factory=Counter)
    # The newest local step that each incarnation has reported.
    newest: dict[LearnerIncarnation, int] = field(default_factory=dict)
    # Descriptions of rounds whose recorded norms lead to other exclusions than the run's.
    wrong_exclusions: list[str] = field(default_factory=list)
    # The incarnation whose value is kept, by (round, learner).
    _values: dict[tuple[int, str], LearnerIncarnation] = field(default_factory=dict)
    _orders: dict[int, tuple[Merge, tuple[LearnerIncarnation, ...]]] = field(default_factory=dict)
    _reported: dict[LearnerIncarnation, int] = field(default_factory=dict)

    def take(self, line: list[Any], effects: list[Effect]) -> None:
        """Add the events of one input of the machine, given its line on the tape and its effects."""
        kind, events = line[0], self.events
        if kind == "merged":
            order, incarnations = self._orders.pop(line[2])
            # If all values were excluded, the round has merged nothing.
            if len(line[4]) < len(order.contributions):
                reported, self._reported = tuple(self._reported.items()), {}
                events.append(MergedRound(order, incarnations, line[3], tuple(line[4]), reported))
        elif kind == "StepReport":
            incarnation = LearnerIncarnation(line[2], line[3])
            self._reported[incarnation] = max(line[4], self._reported.get(incarnation, 0))
            self.newest[incarnation] = max(line[4], self.newest.get(incarnation, 0))
        elif kind == "FragmentValue" and not any(isinstance(e, Drop) and e.peer == line[2] for e in effects):
            self._values[line[4], line[2]] = LearnerIncarnation(line[2], line[3])
        elif kind == "Hello":
            self._greeted(line)
        elif kind == "limits":
            self.raised = True
        elif kind == "begin":
            self.digests = tuple(line[2])
        elif (moment := back_to(kind, without_stamp(line))) is not None:
            self._values.clear()
            self._orders.clear()
            events.append(Back(moment))
        for effect in effects:
            if isinstance(effect, Merge):
                merged = tuple(self._values.pop((effect.global_step, each.learner_id)) for each in effect.contributions)
                self._orders[effect.global_step] = (effect, merged)
            elif isinstance(effect, Restore):
                # The line is an AnchorValue, which has the digest of the value.
                events.append(Brought(Name(effect.fragment_id, effect.version, line[6])))
            elif isinstance(effect, Discard):
                self._values = {key: value for key, value in self._values.items() if key[0] != effect.global_step}
        events += [SnapshotPoint(moment) for moment in captured(kind, line[2:], effects)]

    def _greeted(self, line: list[Any]) -> None:
        told = dict(map(tuple, line[4])).get(GLOBAL_STEPS, "").split()
        if told and told[0].isdecimal():
            self.planned[LearnerIncarnation(line[2], line[3])] = int(told[0])
        # Tapes of older releases have no corpus in a greeting.
        if len(line) > HELLO_CORPUS:
            fields = line[HELLO_CORPUS : HELLO_CORPUS + len(OwnCorpus._fields)]
            self.corpora[LearnerIncarnation(line[2], line[3])] = OwnCorpus(*fields)


def read_script(
    tape: Path, protocol: ProtocolConfig, total_steps: int, until: int | None = None, budget: Budget = NO_BUDGET
) -> Script:
    """Repeat a run's decisions with a machine, and return the script; ValueError names a wrong tape.

    Args:
      until: stop at the first merged round of this global step or later; None: at the end of the tape.
    """
    fingerprint = fingerprint_of(tape)
    machine = machine_of(fingerprint, protocol, total_steps, budget)
    script = Script(fingerprint, returns=returns(read_lines(tape)))
    exclusions = ExclusionAuditor(machine.config.num_fragments, script.wrong_exclusions.append, script.returns)
    for line, effects in inputs(tape, machine, script.returns):
        script.take(line, effects)
        exclusions.take(line, effects)
        if until is not None and line[0] == "merged" and line[2] >= until:
            break
    script.global_step = ended = machine.global_step
    if until is not None and ended < until:
        raise ValueError(f"--until is {until}, but {tape} ends at global step {ended}; use a smaller one")
    if not script.digests:
        raise ValueError(f"{tape} does not start with the digests of the initial model; copy the whole tape")
    return script


def machine_of(fingerprint: Fingerprint, protocol: ProtocolConfig, total_steps: int, budget: Budget) -> Syncer:
    """Return a syncer's machine for a run with this fingerprint; ValueError if its protocol settings do not fit."""
    return Syncer(protocol.agreed(dict(fingerprint).get("protocol", "")), total_steps, fingerprint, budget=budget)


def inputs(
    tape: Path, machine: Syncer, uses: Mapping[Moment, int] | None = None
) -> Iterator[tuple[list[Any], list[Effect]]]:
    """Yield every input on a tape with the machine's effects.

    Args:
        tape: the tape of a run; snapshots and summary beside it, if any, must belong to it.
        machine: a fresh machine.
        uses: the result of `returns` for the tape, if known.

    Raises:
        ValueError: a line cannot be replayed, or was changed after it was written; the message names the line.
    """
    uses = returns(read_lines(tape)) if uses is None else uses
    whole = (line.decode(errors="replace") for line in checked(raw_lines(tape), str(tape), marks_of(tape)))
    lines, taken = itertools.tee(whole)
    if (limits := limits_before(read_lines(tape))) is not None:
        machine.on_limits(limits)
    try:
        for effects, line in zip(replay(lines, machine, None, uses), taken, strict=False):
            yield json.loads(line), effects
    except ValueError as error:
        if str(error).startswith("tape line "):
            why = decided_elsewhere(stamps(read_lines(tape))) or "is it whole, and is the config that of its run?"
            raise ValueError(f"{tape}: {error}; {why}") from error
        raise


def marks_of(tape: Path) -> Iterator[TapeMark]:
    """Yield the marks of a tape in its closed segments, the summary and the snapshots; older releases have none."""
    for segment in closed_segments(tape):
        yield TapeMark(segment.end, segment.head, segment.path.name)
    files = [tape.with_name(SUMMARY_FILE), *tape.parent.glob(f"{CHECKPOINTS}/step_*/meta/data.json")]
    for path in files:
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            position, head = int(about["tape_bytes"]), str(about["tape_head"])
        except (OSError, ValueError, TypeError, KeyError):
            continue
        of_run = path == files[0]
        yield TapeMark(position, head, str(path) if of_run else str(path.parents[1]), in_line=not of_run)


def fingerprint_of(tape: Path) -> Fingerprint:
    """Return a run's fingerprint, from the first greeting that steps followed; ValueError if there is none.

    A learner with a separate corpus does not describe the data of the run. These entries are then those of the first
    such greeting without one, and OPEN if the tape has none.
    """
    greetings: dict[tuple[Any, Any], Any] = {}
    first: dict[str, str] = {}
    try:
        for number, line in enumerate(read_lines(tape), start=1):
            if line.startswith('["begin"'):
                remove_stamp(number, "begin", _loaded(tape, number, line, BEGIN_FIELDS_MIN)[2:])
            elif line.startswith('["Hello"'):
                hello = _loaded(tape, number, line)
                greetings.setdefault((hello[2], hello[3]), hello[4])
            elif line.startswith('["StepReport"'):
                report = _loaded(tape, number, line)
                # Of later reports of a learner nothing is new.
                pairs = greetings.pop((report[2], report[3]), ())
                told = {str(what): str(value) for what, value in pairs}
                if told and not any(told.get(what, "").startswith(SEPARATE) for what in OF_DATA):
                    data = {what: told[what] for what in OF_DATA if what in told}
                    return tuple(({**first, **data} if first else told).items())
                first = first or {what: OPEN if what in OF_DATA else value for what, value in told.items()}
    except FileNotFoundError:
        raise ValueError(f"{tape} does not exist; give the folder of a run, such as runs/NAME") from None
    if not first:
        raise ValueError(
            f"{tape} has no step of any learner; wait for the first one, or give the folder of another run"
        )
    return tuple(first.items())


def _loaded(tape: Path, number: int, line: str, least: int = FIELDS_MIN) -> list[Any]:
    try:
        fields: list[Any] = json.loads(line)
        if not isinstance(fields, list) or len(fields) < least:
            raise ValueError(f"it has fewer than {least} fields")
    except ValueError as error:
        raise ValueError(f"{tape}: tape line {number} cannot be read ({error}): {line[:120]!r}") from error
    return fields


def differences(ours: Fingerprint, theirs: Iterable[tuple[str, str]]) -> list[str]:
    """List the differences of two fingerprints in words."""
    mine, other = dict(ours), dict(theirs)
    # The replay compares a separate corpus when it reads it. Without a corpus of the run there is none to compare.
    separate = any(pairs.get(what, "").startswith(SEPARATE) for pairs in (mine, other) for what in OF_DATA)
    return [
        f"{what} is {mine.get(what)}, the tape has {other.get(what)}"
        for what in sorted((mine.keys() | other.keys()) - OBSOLETE)
        if mine.get(what) != other.get(what) and not (what in OF_DATA and separate)
    ]


SCENARIO_FILE = "scenario.json"
SCENARIO_BYTES_MAX = 1 << 22


class SimulatedRun(NamedTuple):
    """The settings of a simulation that a replay needs."""

    protocol: ProtocolConfig
    total_steps: int
    learners: int
    budget: Budget


def read_scenario(folder: Path) -> SimulatedRun | None:
    """Read the scenario of a simulation's tapes; None for a run's folder; ValueError if it cannot be read."""
    path = folder / SCENARIO_FILE
    if not path.exists():
        return None
    try:
        if path.stat().st_size > SCENARIO_BYTES_MAX:
            raise ValueError(f"more than {SCENARIO_BYTES_MAX} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        protocol = TypeAdapter(ProtocolConfig).validate_python(values["protocol"])
        budget = Budget(*map(int, values.get("budget", ())))
        return SimulatedRun(protocol, int(values["total_steps"]), int(values["learners"]), budget)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); write it again: diloco simulate --tapes"
        ) from error


def as_simulated(config: "RunConfig", folder: Path) -> "RunConfig":
    """Return the config with protocol, global steps and learners of a simulation; unchanged for a run's folder.

    A sample of the simulation stands for the sequences of one step of an island.
    """
    scenario = read_scenario(folder)
    if scenario is None:
        return config
    islands = replace(config.islands, count=scenario.learners, batch_size=config.island("").batch_size)
    return replace(
        config, islands=islands, protocol=scenario.protocol, train=replace(config.train, steps=scenario.total_steps)
    )
