"""Hostile learners: their messages arrive unchanged, changed in some fields, or together with invented messages.

The transport checks the name and the incarnation of a sender, so both stay, except for incarnations that no learner
can have. The syncer's driver checks the digest of an anchor's payload and its distance, so an invented anchor arrives
with the version that the driver would put in.
"""

import math
import typing
from collections.abc import Iterator
from random import Random
from typing import Any

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.bounds import COUNTER_MAX

NUMBERS: tuple[int, ...] = (-1, 0, 1, 2, 7, 100, 1 << 20, (1 << 20) + 1, 1 << 32, 1 << 50, COUNTER_MAX, COUNTER_MAX + 1)
NUMBERS += (1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64)
FLOATS = (0.0, -1.0, 1e-300, 0.5, 1e9, 1e10, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "\x00\x1b[31m\n", "x" * 5000, m.SYNCER, "../x", "island-0", "island-1")
# Rows of a list that is too long.
LONG = 2000
# Share of messages that arrive changed.
CHANGED = 0.3
# Share of values that claim a later step.
AHEAD = 0.3
# Share of messages that arrive together with an invented one.
MADE_UP = 0.3
KINDS: tuple[Any, ...] = typing.get_args(m.LearnerMessage)
ROWS: dict[str, Any] = {"adopted": m.Adopted, "arrived": m.Arrived, "scores": m.Metric}


class Hostile:
    """The currently hostile learners and the messages that arrive from them; its random generator is separate."""

    def __init__(self, seed: int) -> None:
        self.names: set[str] = set()
        self._random = Random(f"hostile of {seed}")
        # A separate generator leaves the draws of other lies as they were.
        self._liar = Random(f"liar of {seed}")

    def sent(self, message: Any) -> Iterator[Any]:
        """Yield the messages that arrive in place of a hostile learner's message."""
        random = self._random
        if random.random() < MADE_UP:
            yield self.made_up(message.learner_id, message.incarnation, message)
        sent = self.changed(message) if random.random() < CHANGED else message
        if isinstance(message, m.FragmentValue) and self._liar.random() < AHEAD:
            sent = self.ahead(message)
        yield sent

    def made_up(self, name: str, incarnation: int, like: Any = None) -> Any:
        """Invent a message of any kind; its lists have the length of the lists of `like`."""
        kind = self._random.choice(KINDS)
        length = len(getattr(like, "adopted", getattr(like, "versions", ()))) or self._random.randint(0, 4)
        values = {name: self._value(name, hint, length) for name, hint in typing.get_type_hints(kind).items()}
        return self._as_it_arrives(kind(**values | {"learner_id": name, "incarnation": incarnation}))

    def changed(self, message: Any) -> Any:
        """Change one or a few fields of a message."""
        hints = typing.get_type_hints(type(message))
        names = [name for name in hints if name not in ("learner_id", "incarnation")]
        if not names:
            return message
        chosen = self._random.sample(names, min(len(names), self._random.choice((1, 1, 2, 4))))
        values = {name: self._value(name, hints[name], self._length(message, name)) for name in chosen}
        if isinstance(message, m.Hello) and self._random.random() < 0.2:
            values["incarnation"] = self._random.choice([number for number in NUMBERS if number > COUNTER_MAX])
        return self._as_it_arrives(message._replace(**values))

    def ahead(self, value: m.FragmentValue) -> m.FragmentValue:
        """Claim a value of a later step, with as many more steps and with many more tokens: counters that agree."""
        more = self._liar.choice((1, 7, 250))
        steps = max(1, value.steps + more)
        tokens = steps * self._liar.choice((1, 64, 4096)) * max(1, value.tokens // max(1, value.steps))
        return value._replace(local_step=value.local_step + more, steps=steps, tokens=tokens)

    def _length(self, message: Any, name: str) -> int:
        value = getattr(message, name)
        return len(value) if isinstance(value, tuple) else 0

    def _value(self, name: str, hint: Any, length: int) -> Any:
        random = self._random
        if hint is bool:
            return random.random() < 0.5
        if hint is int:
            return random.choice(NUMBERS) if random.random() < 0.6 else random.randint(0, 60)
        if hint is float:
            return random.choice(FLOATS)
        if hint is str:
            return random.choice(TEXTS)
        count = length if random.random() < 0.8 else random.choice((0, 1, length + 1, LONG))
        if name == "fingerprint":
            return tuple((random.choice(TEXTS), random.choice(TEXTS)) for _ in range(count))
        if name not in ROWS:
            return tuple(self._value("", int, 0) for _ in range(count))
        fields = typing.get_type_hints(ROWS[name]).values()
        return tuple(ROWS[name](*(self._value("", each, 0) for each in fields)) for _ in range(count))

    def _as_it_arrives(self, message: Any) -> Any:
        if isinstance(message, m.AnchorValue) and self._random.random() < 0.5:
            return message._replace(version=m.NO_VERSION)
        if isinstance(message, m.AnchorValue):
            return message._replace(version=self._random.choice([number for number in NUMBERS if number > 1 << 19]))
        return message
