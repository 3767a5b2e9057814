"""The event tape: a syncer's inputs, one JSON line each, and their replay.

A machine is a function of its inputs, so the log of its inputs is its history. Recording costs one line per input;
replaying feeds the lines to a fresh machine of the same configuration, which then takes the same decisions.

Line:  [input, now_s, arguments...]   e.g.  ["StepReport", 12.5, "island-0", 1, 7, 7168, ...]

The line that begins a life of the syncer ends with the stamp of its release.

A line is written before its input is executed, so that no decision that anybody has seen is missing from the tape of
a syncer that died. Of a line ["rewind", ...] on, the run goes on from its state at an earlier snapshot.
"""

import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from diloco_jax.protocol.bounds import objection
from diloco_jax.protocol.effects import Effect, SaveSnapshot
from diloco_jax.protocol.messages import Adopted, Arrived, LearnerMessage, Metric
from diloco_jax.protocol.releases import STAMP, check_readable
from diloco_jax.protocol.syncer.machine import Syncer

_MESSAGES: dict[str, Callable[..., LearnerMessage]] = {kind.__name__: kind for kind in get_args(LearnerMessage)}
_NOT_A_LINE = (
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
    ArithmeticError,  # 1e999 is infinite
    RecursionError,
)
_BEGIN_A_LIFE = {"begin": 1, "restart": 3, "rewind": 2}  # and have so many arguments before the stamp
SNAPSHOTS_MAX = 4  # states that a replay remembers, in case the run went back to one


@dataclass(frozen=True, eq=False)
class TapedSyncer:
    """A syncer whose every input is written down before it is executed."""

    syncer: Syncer
    write: Callable[[str], None]  # takes one line without its newline; when it returns, the line outlives the process

    def _write(self, *line: Any) -> None:
        self.write(json.dumps(line, separators=(",", ":")))

    def on_begin(self, digests: Sequence[int], now_s: float) -> list[Effect]:
        self._write("begin", now_s, list(digests), STAMP)
        return self.syncer.on_begin(digests, now_s)

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        if not objection(message):  # else it changes nothing in the machine, and readers of the tape need not bear it
            self._write(type(message).__name__, now_s, *message)
        return self.syncer.on_message(message, now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        self._write("disconnect", now_s, learner_id, incarnation, reason)
        return self.syncer.on_disconnect(learner_id, incarnation, reason, now_s)

    def on_merged(self, global_step: int, digest: int, left_out: Sequence[str], now_s: float) -> list[Effect]:
        self._write("merged", now_s, global_step, digest, list(left_out))
        return self.syncer.on_merged(global_step, digest, left_out, now_s)

    def on_drain(self, learner_id: str, now_s: float) -> list[Effect]:
        return self.syncer.on_drain(learner_id, now_s)  # changes nothing in the machine

    def on_tick(self, now_s: float) -> list[Effect]:
        self._write("tick", now_s)
        return self.syncer.on_tick(now_s)

    def on_restart(self, held: Sequence[int], digests: Sequence[int], loaded: int, now_s: float) -> list[Effect]:
        """As Syncer.on_restart; `loaded` is the global step of the snapshot that the values are of, -1 for none."""
        self._write("restart", now_s, list(held), list(digests), loaded, STAMP)
        return self.syncer.on_restart(held, digests, now_s)

    def on_snapshot(self, global_step: int, now_s: float) -> list[Effect]:
        """The driver takes a snapshot of this moment, asked for or not: the run may go back to it."""
        self._write("snapshot", now_s, global_step)
        return []

    def on_rewind(self, state: Mapping[str, Any], global_step: int, epoch: int, now_s: float) -> list[Effect]:
        """Go back to the state at the snapshot of this global step, as life `epoch`."""
        self._write("rewind", now_s, global_step, epoch, STAMP)
        self.syncer.restore(dict(state))
        return self.syncer.on_rewind(epoch, now_s)


def replay(
    lines: Iterable[str], syncer: Syncer, snapshots: Mapping[int, Mapping[str, Any]] | None = None
) -> Iterator[list[Effect]]:
    """Feed a tape to a machine; yields what each input led to.

    Args:
        lines: the tape, or its end from the moment on in which the machine is.
        syncer: a fresh machine, or one restored from the state of that moment.
        snapshots: global step -> state, for snapshots that were taken before the first line.

    Raises:
        ValueError: a line is not one that TapedSyncer writes; the message names its number.
        OtherRelease: a life was that of a release whose tapes this one does not read.
    """
    asked: dict[int, Mapping[str, Any]] = {}  # states of snapshots that the machine asked for,
    taken = dict(snapshots or {})  # and of those that a driver said it took: it skips some while it writes one
    for number, line in enumerate(lines, start=1):
        try:
            kind, now_s, *arguments = json.loads(line)
            check_life(number, kind, arguments)
            effects = _apply(syncer, kind, float(now_s), arguments, ChainMap(taken, asked))
        except _NOT_A_LINE as error:
            raise ValueError(f"tape line {number} cannot be replayed ({error}): {line[:120]!r}") from error
        if kind == "snapshot":
            _remember(taken, arguments[0], syncer)
        for effect in effects:
            if isinstance(effect, SaveSnapshot):
                _remember(asked, effect.global_step, syncer)
        yield effects


def _remember(states: dict[int, Mapping[str, Any]], global_step: int, syncer: Syncer) -> None:
    states.pop(global_step, None)
    states[global_step] = syncer.state()
    while len(states) > SNAPSHOTS_MAX:
        del states[next(iter(states))]


def check_life(number: int, kind: str, arguments: list[Any]) -> None:
    """Take the stamp off the arguments of an input that begins a life; OtherRelease if this one does not read it."""
    if (own := _BEGIN_A_LIFE.get(kind)) is not None:
        check_readable(f"the tape from line {number} on", *arguments[own:])
        del arguments[own:]


def lives(lines: Iterable[str]) -> int:
    """Count the lives of the syncer that a tape has seen: 1, and one more for each restart and rewind."""
    return 1 + sum(line.startswith(('["restart"', '["rewind"')) for line in lines)


def _apply(
    syncer: Syncer, kind: str, now_s: float, arguments: list[Any], states: Mapping[int, Mapping[str, Any]]
) -> list[Effect]:
    match kind, arguments:
        case _ if kind in _MESSAGES:
            return syncer.on_message(_message(kind, arguments), now_s)
        case "disconnect", [learner_id, incarnation, reason]:
            return syncer.on_disconnect(learner_id, incarnation, reason, now_s)
        case "merged", [global_step, digest, left_out]:
            return syncer.on_merged(int(global_step), int(digest), tuple(left_out), now_s)
        case "tick", _:
            return syncer.on_tick(now_s)
        case "snapshot", [_]:
            return []
        case "begin", [digests, *_]:
            return syncer.on_begin(digests, now_s)
        case "restart", [held, digests, _]:
            return syncer.on_restart(held, digests, now_s)
        case "rewind", [int(global_step), epoch]:
            if global_step not in states:
                raise ValueError(
                    f"the run went back to a snapshot at global step {global_step}, which is not on this tape"
                )
            syncer.restore(dict(states[global_step]))
            return syncer.on_rewind(int(epoch), now_s)
    raise ValueError(f"unknown input {kind!r}, or not its arguments")


def _message(kind: str, arguments: list[Any]) -> LearnerMessage:
    """JSON knows no tuples: give the nested ones back their types."""
    if kind == "StepReport":
        arguments[5] = tuple(Adopted(*a) for a in arguments[5])
        arguments[10:] = [tuple(Arrived(*a) for a in told) for told in arguments[10:]]
    elif kind == "Hello":
        arguments[2] = tuple((what, value) for what, value in arguments[2])
        arguments[3:5] = [tuple(arguments[3]), tuple(arguments[4])]
    elif kind == "Score":
        arguments[4] = tuple(arguments[4])
        arguments[8] = tuple(Metric(*told) for told in arguments[8])
    return _MESSAGES[kind](*arguments)
