"""The event tape: a syncer's inputs, one JSON line each, and their replay.

A machine is a function of its inputs, so the log of its inputs is its history. Recording costs one line per input;
replaying feeds the lines to a fresh machine of the same configuration, which then takes the same decisions.

Line:  [input, now_s, arguments...]   e.g.  ["StepReport", 12.5, "island-0", 1, 7, 7168, ...]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from diloco_jax.protocol.messages import (
    Adopted,
    Effect,
    FragmentValue,
    Heartbeat,
    Hello,
    LearnerMessage,
    Leave,
    StepReport,
)
from diloco_jax.protocol.syncer import Syncer

_MESSAGES = {kind.__name__: kind for kind in (Hello, StepReport, FragmentValue, Heartbeat, Leave)}


class TapedSyncer:
    """A syncer whose every input is written down before it is executed.

    Args:
        syncer: the machine.
        write: takes one line without its newline.
    """

    def __init__(self, syncer: Syncer, write: Callable[[str], None]) -> None:
        self.syncer = syncer
        self._write = write

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        self._write(json.dumps([type(message).__name__, now_s, *message], separators=(",", ":")))
        return self.syncer.on_message(message, now_s)

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        self._write(json.dumps(["disconnect", now_s, learner_id, incarnation, reason], separators=(",", ":")))
        return self.syncer.on_disconnect(learner_id, incarnation, reason, now_s)

    def on_merged(self, global_step: int, now_s: float) -> list[Effect]:
        self._write(json.dumps(["merged", now_s, global_step], separators=(",", ":")))
        return self.syncer.on_merged(global_step, now_s)

    def on_tick(self, now_s: float) -> list[Effect]:
        self._write(json.dumps(["tick", now_s], separators=(",", ":")))
        return self.syncer.on_tick(now_s)


def replay(lines: Iterable[str], syncer: Syncer) -> Iterator[list[Effect]]:
    """Feed a tape to a fresh machine; yields what each input led to.

    Raises:
        ValueError: a line is not one that TapedSyncer writes; the message names its number.
    """
    for number, line in enumerate(lines, start=1):
        try:
            kind, now_s, *arguments = json.loads(line)
            effects = _apply(syncer, kind, float(now_s), arguments)
        except (ValueError, TypeError, LookupError, AssertionError) as error:
            raise ValueError(f"tape line {number} cannot be replayed ({error}): {line[:120]!r}") from error
        yield effects


def _apply(syncer: Syncer, kind: str, now_s: float, arguments: list[Any]) -> list[Effect]:
    if kind in _MESSAGES:
        return syncer.on_message(_message(kind, arguments), now_s)
    if kind == "disconnect":
        learner_id, incarnation, reason = arguments
        return syncer.on_disconnect(learner_id, incarnation, reason, now_s)
    if kind == "merged":
        return syncer.on_merged(int(arguments[0]), now_s)
    if kind == "tick":
        return syncer.on_tick(now_s)
    raise ValueError(f"unknown input {kind!r}")


def _message(kind: str, arguments: list[Any]) -> LearnerMessage:
    """JSON knows no tuples: give the nested ones back their types."""
    if kind == "StepReport":
        arguments[5] = tuple(Adopted(*a) for a in arguments[5])
    elif kind == "Hello":
        arguments[2] = tuple((what, value) for what, value in arguments[2])
        arguments[3] = tuple(arguments[3])
    return _MESSAGES[kind](*arguments)
