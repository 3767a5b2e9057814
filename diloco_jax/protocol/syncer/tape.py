"""The event tape: a syncer's inputs, one JSON line each, and their replay.

A machine is a function of its inputs, so the log of its inputs is its history. Recording costs one line per input;
replaying feeds the lines to a fresh machine of the same configuration, which then takes the same decisions.

Line:  [input, now_s, arguments...]   e.g.  ["StepReport", 12.5, "island-0", 1, 7, 7168, ...]

The first line of each epoch of the syncer has the stamp of its release. The first line of the tape,
["begin", now_s, digests, stamp, run], ends with the id of the run; older releases wrote none.

A line is written before any effect of its input is executed, so the tape of a syncer that was killed has every decision
that another process has seen. From a line ["rewind", ...] on, the run continues from its state at an earlier snapshot.
A line ["limits", now_s, [steps, tokens, text], [steps, tokens, text]] has the limits before and after it. A run that
goes back to a snapshot may get higher limits and train longer.

Before a driver captures a snapshot, it writes a line ["snapshot", now_s, global_step, head]. `head` is the head of the
hash chain over all earlier lines (runtime/records/tape_chain.py); it identifies this snapshot. If the machine asked for
a snapshot and the driver skipped it, there is no line. Older releases wrote no head, and no line for a snapshot that
the machine had asked for.

Lines ["ban", now_s, name, why] and ["admit", now_s, name] are the requests of an operator that were granted. A rewind
does not undo them (protocol/bans.py), so a driver repeats those after the snapshot before it goes back (`repeat_bans`).

A line ["merged", now_s, global_step, digest, excluded, evidence] ends with the measurements that decided who was
excluded, as an object with the fields of `Evidence` (protocol/exclusion.py). Older releases wrote none.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from diloco_jax.protocol.bounds import objection, without_value
from diloco_jax.protocol.effects import Effect, SaveSnapshot
from diloco_jax.protocol.exclusion import Evidence
from diloco_jax.protocol.messages import Adopted, Arrived, LearnerMessage, Metric, StateChunk
from diloco_jax.protocol.releases import STAMP, check_readable
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import Limits

# A tape keeps the name that a kind of message had when tapes were defined.
_NAMES_ON_TAPE: dict[type, str] = {StateChunk: "StatePart"}
_MESSAGES: dict[str, Callable[..., LearnerMessage]] = {
    _NAMES_ON_TAPE.get(kind, kind.__name__): kind for kind in get_args(LearnerMessage)
}
_NOT_A_LINE = (
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
    # The number 1e999 is infinite.
    ArithmeticError,
    RecursionError,
)
# The inputs that start an epoch of the syncer, and the number of their arguments before the stamp.
_EPOCH_STARTS = {"begin": 1, "restart": 3, "rewind": 2}

# Releases before 0.2.0 wrote no stamp.
WITHOUT_STAMP = (1, "0.1")
_LATER_EPOCHS = ('["restart"', '["rewind"')

T = TypeVar("T")


class Moment(NamedTuple):
    """The name of a snapshot on the tape; global step -1 means the start of the run."""

    global_step: int
    # Head of the hash chain before its line; "" on tapes of older releases.
    head: str = ""


BEGINNING = Moment(-1)


class Moments(Generic[T]):
    """Keeps a value for each snapshot until the tape goes back to that snapshot for the last time.

    Args:
        uses: how often the tape goes back to each snapshot, as counted by `returns`; None keeps all values.
    """

    def __init__(self, uses: Mapping[Moment, int] | None = None) -> None:
        self._uses = None if uses is None else Counter(uses)
        self._values: dict[Moment, T] = {}

    def keep(self, moment: Moment, value: Callable[[], T]) -> None:
        """Keep the current value if the tape goes back to this snapshot; it replaces an older value."""
        if self._uses is None or self._uses[moment] > 0:
            self._values[moment] = value()

    def at(self, moment: Moment) -> T:
        """Return the value at a snapshot; ValueError if no earlier line names this snapshot."""
        if moment not in self._values:
            raise ValueError(
                f"the run went back to its snapshot of global step {moment.global_step}, but no earlier line is of that"
            )
        if self._uses is not None:
            self._uses[moment] -= 1
            if self._uses[moment] <= 0:
                return self._values.pop(moment)
        return self._values[moment]

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._values.values()))

    def __contains__(self, moment: object) -> bool:
        return moment in self._values


@dataclass(frozen=True, eq=False)
class TapedSyncer:
    """A syncer whose every input is written down before it is executed."""

    syncer: Syncer
    # Takes one line without its newline. The driver makes the line durable before it executes any effect.
    write: Callable[[str], None]

    def _write(self, *line: Any) -> None:
        self.write(json.dumps(line, separators=(",", ":")))

    def on_begin(self, digests: Sequence[int], now_s: float, run: str = "") -> list[Effect]:
        self._write("begin", now_s, list(digests), STAMP, *([run] if run else []))
        return self.syncer.on_begin(digests, now_s, run)

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        # A message out of bounds changes nothing in the machine, so readers of the tape need not accept it. The one
        # exception is a value: its round takes it as an answer that holds nothing.
        taken = without_value(message) if objection(message) else message
        if taken is not None:
            kind = type(taken)
            self._write(_NAMES_ON_TAPE.get(kind, kind.__name__), now_s, *taken)
        return self.syncer.on_message(message, now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        self._write("disconnect", now_s, learner_id, incarnation, reason)
        return self.syncer.on_disconnect(learner_id, incarnation, reason, now_s)

    def on_merged(
        self, global_step: int, digest: int, excluded: Sequence[str], now_s: float, evidence: Evidence | None = None
    ) -> list[Effect]:
        """Do as Syncer.on_merged; `evidence` is for readers of the tape, and the machine does not see it."""
        recorded = [] if evidence is None else [evidence._asdict()]
        self._write("merged", now_s, global_step, digest, list(excluded), *recorded)
        return self.syncer.on_merged(global_step, digest, excluded, now_s)

    def on_drain(self, learner_id: str, now_s: float) -> list[Effect]:
        # A drain changes nothing in the machine, so it is not on the tape.
        return self.syncer.on_drain(learner_id, now_s)

    def on_ban(self, learner_id: str, why: str, now_s: float) -> list[Effect]:
        # A ban that is refused changes nothing and must not be on the tape, so the machine decides first. The line is
        # still written before any effect is executed.
        effects = self.syncer.on_ban(learner_id, why, now_s)
        self._write("ban", now_s, learner_id, why)
        return effects

    def on_admit(self, learner_id: str, now_s: float) -> list[Effect]:
        effects = self.syncer.on_admit(learner_id, now_s)
        self._write("admit", now_s, learner_id)
        return effects

    def on_tick(self, now_s: float) -> list[Effect]:
        self._write("tick", now_s)
        return self.syncer.on_tick(now_s)

    def on_restart(
        self, held: Sequence[int], digests: Sequence[int], loaded: int, now_s: float, head: str = ""
    ) -> list[Effect]:
        """Restart the machine; `loaded` is the global step of the snapshot with the values, -1 for none."""
        self._write("restart", now_s, list(held), list(digests), loaded, STAMP, *([head] if head else []))
        return self.syncer.on_restart(held, digests, now_s)

    def on_snapshot(self, global_step: int, now_s: float, head: str = "") -> list[Effect]:
        """Record that the driver is about to capture a snapshot; the run may go back to it."""
        self._write("snapshot", now_s, global_step, *([head] if head else []))
        return []

    def on_rewind(
        self, state: Mapping[str, Any], global_step: int, epoch: int, now_s: float, head: str = ""
    ) -> list[Effect]:
        """Go back to the state at the snapshot with this global step and head, and start epoch `epoch`.

        The machine must have the bans of the whole tape: `repeat_bans` repeats those after the snapshot.
        """
        self._write("rewind", now_s, global_step, epoch, STAMP, *([head] if head else []))
        self.syncer.go_back(state)
        return self.syncer.on_rewind(epoch, now_s)


def replay(
    lines: Iterable[str],
    syncer: Syncer,
    snapshots: Mapping[Moment, Mapping[str, Any]] | None = None,
    uses: Mapping[Moment, int] | None = None,
) -> Iterator[list[Effect]]:
    """Feed a tape to a machine; yield the effects of each input.

    Args:
        lines: the tape, or the lines after the machine's moment.
        syncer: a fresh machine, or one restored from the state of that moment.
        snapshots: states of snapshots that were captured before the first line.
        uses: result of `returns` for these lines, so that only needed states are kept; None keeps all.

    Raises:
        ValueError: TapedSyncer writes no such line; the message names its number.
        OtherRelease: an epoch has the stamp of a release whose tapes this one does not read.
    """
    states: Moments[Mapping[str, Any]] = Moments(uses)
    for moment, state in (snapshots or {}).items():
        states.keep(moment, lambda state=state: state)  # type: ignore[misc]
    for number, line in enumerate(lines, start=1):
        try:
            kind, now_s, *arguments = json.loads(line)
            remove_stamp(number, kind, arguments)
            effects = _apply(syncer, kind, float(now_s), arguments, states)
            for moment in captured(kind, arguments, effects):
                states.keep(moment, syncer.state)
        except _NOT_A_LINE as error:
            raise ValueError(f"tape line {number} cannot be replayed ({error}): {line[:120]!r}") from error
        yield effects


def captured(kind: str, arguments: Sequence[Any], effects: Iterable[Effect]) -> Iterator[Moment]:
    """Yield the snapshots that a driver may have captured after this input.

    The name of a snapshot that the machine asked for has no head: only tapes of older releases go back to it.
    """
    for effect in effects:
        if isinstance(effect, SaveSnapshot):
            yield Moment(effect.global_step)
    if kind == "snapshot":
        yield Moment(*arguments)


def back_to(kind: str, arguments: Sequence[Any]) -> Moment | None:
    """Return the snapshot at the start of an epoch of the syncer; `arguments` are those of its line, without stamp."""
    match kind, arguments:
        case "restart", [_, _, int(loaded), *head]:
            return Moment(loaded, *head)
        case "rewind", [int(global_step), _, *head]:
            return Moment(global_step, *head)
    return None


def returns(lines: Iterable[str]) -> Counter[Moment]:
    """Count how often a tape goes back to each snapshot. Unreadable lines are skipped; `replay` reports them."""
    counts: Counter[Moment] = Counter()
    for line in lines:
        if line.startswith(_LATER_EPOCHS):
            try:
                kind, _, *arguments = json.loads(line)
                own = _EPOCH_STARTS[kind]
                del arguments[own : own + 1]  # the stamp
                moment = back_to(kind, arguments)
            except _NOT_A_LINE:
                continue
            if moment is not None:
                counts[moment] += 1
    return counts


def remove_stamp(number: int, kind: str, arguments: list[Any]) -> None:
    """Delete the stamp from the arguments, in place, if the input starts an epoch.

    Raises:
        OtherRelease: This release does not read tapes of the release in the stamp.
    """
    if (own := _EPOCH_STARTS.get(kind)) is not None:
        check_readable(f"the tape from line {number} on", *arguments[own : own + 1])
        del arguments[own : own + 1]


def stamps(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the stamp of each epoch of the syncer; unreadable lines are left out."""
    for line in lines:
        if line.startswith(('["begin"', *_LATER_EPOCHS)):
            try:
                yield stamp_of(json.loads(line))
            except _NOT_A_LINE:
                continue


def stamp_of(line: list[Any]) -> Any:
    """Return the stamp of the release that wrote a line that starts an epoch."""
    kind, _, *arguments = line
    own = _EPOCH_STARTS[kind]
    return arguments[own] if len(arguments) > own else WITHOUT_STAMP


def without_stamp(line: list[Any]) -> list[Any]:
    """Return the arguments of an input without the stamp."""
    arguments = line[2:]
    remove_stamp(0, line[0], arguments)
    return arguments


def limits_line(before: Limits, limits: Limits, now_s: float) -> str:
    """Return the line for a change of a run's limits."""
    return json.dumps(["limits", now_s, before, limits], separators=(",", ":"))


def limits_before(lines: Iterable[str]) -> Limits | None:
    """Return a run's limits before these lines of its tape; None if no line changes them."""
    line = next(filter(_is_of_limits, lines), None)
    return None if line is None else _limits(line, 2)


def limits_after(lines: Iterable[str]) -> Limits | None:
    """Return a run's limits after these lines of its tape; None if no line changes them."""
    limits = None
    for line in filter(_is_of_limits, lines):
        limits = _limits(line, 3)
    return limits


def _is_of_limits(line: str) -> bool:
    return line.startswith('["limits"')


def _limits(line: str, place: int) -> Limits:
    try:
        return _made(*json.loads(line)[place])
    except _NOT_A_LINE as error:
        raise ValueError(f"a line of the tape cannot be read ({error}): {line[:120]!r}") from error


def _made(steps: Any, tokens: Any, text: Any = "") -> Limits:
    return Limits(int(steps), int(tokens), str(text))


def repeat_bans(lines: Iterable[str], syncer: Syncer) -> None:
    """Give a machine the bans of an operator on these lines of its tape, without the effects.

    Args:
        lines: the tape from the machine's moment on.
    """
    bans = syncer.membership.bans
    for line in lines:
        if line.startswith(('["ban"', '["admit"')):
            try:
                kind, _, learner_id, *why = json.loads(line)
                bans.add(learner_id, *why) if kind == "ban" else bans.lift(learner_id)
            except _NOT_A_LINE as error:
                raise ValueError(f"a line of the tape cannot be read ({error}): {line[:120]!r}") from error


def count_epochs(lines: Iterable[str]) -> int:
    """Count the epochs of the syncer that a tape has seen: 1, and one more for each restart and rewind."""
    return 1 + sum(line.startswith(_LATER_EPOCHS) for line in lines)


def _apply(
    syncer: Syncer, kind: str, now_s: float, arguments: list[Any], states: Moments[Mapping[str, Any]]
) -> list[Effect]:
    match kind, arguments:
        case _ if kind in _MESSAGES:
            return syncer.on_message(_message(kind, arguments), now_s)
        case "disconnect", [learner_id, incarnation, reason]:
            return syncer.on_disconnect(learner_id, incarnation, reason, now_s)
        case "merged", [global_step, digest, excluded, *_]:
            return syncer.on_merged(int(global_step), int(digest), tuple(excluded), now_s)
        case "ban", [str(learner_id), str(why)]:
            return syncer.on_ban(learner_id, why, now_s)
        case "admit", [str(learner_id)]:
            return syncer.on_admit(learner_id, now_s)
        case "tick", _:
            return syncer.on_tick(now_s)
        case "snapshot", [int(), *_]:
            return []
        case "limits", [_, limits]:
            return syncer.on_limits(_made(*limits))
        case "begin", [digests, *run]:
            return syncer.on_begin(digests, now_s, str(run[0]) if run else "")
        case "restart", [held, digests, *_]:
            # The restart loaded only values of that snapshot. Its state is released: the machine is already past it.
            if (moment := back_to(kind, arguments)) is not None and moment in states:
                states.at(moment)
            return syncer.on_restart(held, digests, now_s)
        case "rewind", [int(), epoch, *_]:
            moment = back_to(kind, arguments)
            assert moment is not None, "it begins an epoch"
            syncer.go_back(states.at(moment))
            return syncer.on_rewind(int(epoch), now_s)
    raise ValueError(f"unknown input {kind!r}, or not its arguments")


def _message(kind: str, arguments: list[Any]) -> LearnerMessage:
    """Make a message from JSON, which has lists instead of named tuples."""
    if kind == "StepReport":
        arguments[5] = tuple(Adopted(*a) for a in arguments[5])
        arguments[10:11] = [tuple(Arrived(*a) for a in plain) for plain in arguments[10:11]]
    elif kind == "Hello":
        arguments[2] = tuple((what, value) for what, value in arguments[2])
        arguments[3:5] = [tuple(arguments[3]), tuple(arguments[4])]
    elif kind == "Score":
        arguments[4] = tuple(arguments[4])
        arguments[8] = tuple(Metric(*plain) for plain in arguments[8])
    return _MESSAGES[kind](*arguments)
