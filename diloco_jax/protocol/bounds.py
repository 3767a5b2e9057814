"""Bounds of every field of a learner's messages; the syncer's machine checks each message against them on arrival.

The wire accepts any number of its types. A value within these bounds may still be wrong, but all numbers that the
machine derives from it stay far below the 2^62 that a message can carry. So no peer can make the syncer compute a
number that cannot be sent. An honest run stays far below the bounds: a counter of a thousand steps per second reaches
its bound after 285,000 years.
"""

import typing
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax.protocol.messages import NO_VERSION, SCORES_MAX, Adopted, Arrived, FragmentValue, LearnerMessage, Metric

COUNTER_MAX = 1 << 53
DIGEST_MAX = (1 << 64) - 1
STEP_SAMPLES_MAX = 1 << 20
SECONDS_MAX = 1e9
# Parts of one state; with parts of 1 MiB that is 4 TiB.
PARTS_MAX = 1 << 22
FRAGMENTS_MAX = 16384
# Pairs of a fingerprint.
PAIRS_MAX = 256
# Names in a message; membership.py has the rule for the name of a learner itself.
NAME_LENGTH_MAX = 100
TEXT_LENGTH_MAX = 1 << 16

# A check returns what is wrong with a value, or "".
Check = Callable[[Any], str]


def objection(message: LearnerMessage) -> str:
    """Return which value of a learner's message is out of bounds, with bounds and remedy; "" if all are within."""
    for position, name, check in _CHECKS[type(message)]:
        try:
            wrong = check(message[position])
        except (TypeError, ValueError):
            wrong = f"is {str(message[position])[:80]!r}, which is of another type"
        if wrong:
            what = f"{type(message).__name__}.{name} of {str(message.learner_id)[:64]!r} {wrong}"
            return f"{what}; it is damaged, or its sender is another program: start that learner again"
    return ""


def without_value(message: LearnerMessage) -> FragmentValue | None:
    """Return a FragmentValue that is out of bounds as an empty answer; None for any other message.

    The round that requested the value then need not wait for another answer. The result is also None if the number of
    that round is out of bounds.
    """
    if not isinstance(message, FragmentValue):
        return None
    empty = message._replace(
        local_step=0, steps=0, tokens=0, base_version=NO_VERSION, samples=0, payload_bytes=0, since=0
    )
    return None if objection(empty) else empty


def _between(least: float, most: float) -> Check:
    def check(value: Any) -> str:
        # NaN is between no two numbers.
        return "" if least <= value <= most else f"is {value!r}, which is impossible: allowed is {least} to {most}"

    return check


def _length(most: int, unit: str) -> Check:
    def check(value: Sequence[Any]) -> str:
        return "" if len(value) <= most else f"has {len(value)} {unit}, which is impossible: allowed are {most}"

    return check


def _each(check: Check, most: int) -> Check:
    count = _length(most, "elements")

    def check_all(values: Sequence[Any]) -> str:
        return count(values) or next((wrong for value in values if (wrong := check(value))), "")

    return check_all


def _adopted(rows: Sequence[Adopted]) -> str:
    """Check the rows of every report. The check is written out for speed: most numbers that arrive are these."""
    if wrong := _FRAGMENTS(rows):
        return wrong
    for row in rows:
        version, local_step, tokens = row
        if not (-1 <= version <= COUNTER_MAX and 0 <= local_step <= COUNTER_MAX and 0 <= tokens <= COUNTER_MAX):
            return f"has {tuple(row)}, which is impossible: allowed is 0 to {COUNTER_MAX}, and -1 for no version"
    return ""


def _arrived(rows: Sequence[Arrived]) -> str:
    if wrong := _FRAGMENTS(rows):
        return wrong
    for fragment_id, version, ago_s in rows:
        if wrong := _COUNTER(fragment_id) or _VERSION(version) or _SECONDS(ago_s):
            return wrong
    return ""


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return _length(PAIRS_MAX, "pairs")(pairs) or next((w for pair in pairs for text in pair if (w := _TEXT(text))), "")


def _scores(rows: Sequence[Metric]) -> str:
    # Above SCORES_MAX the syncer asks another learner to evaluate. A message beyond four times that is refused.
    return _length(4 * SCORES_MAX, "elements")(rows) or next((wrong for name, _ in rows if (wrong := _TEXT(name))), "")


def _anything(value: Any) -> str:
    del value
    return ""


_COUNTER, _VERSION = _between(0, COUNTER_MAX), _between(-1, COUNTER_MAX)
_SECONDS = _between(0.0, SECONDS_MAX)
_TEXT, _NAME = _length(TEXT_LENGTH_MAX, "characters"), _length(NAME_LENGTH_MAX, "characters")
_FRAGMENTS = _length(FRAGMENTS_MAX, "elements")
_BY_FIELD: dict[str, Check] = {
    "adopted": _adopted,
    "arrived": _arrived,
    "ago_s": _SECONDS,
    "base_version": _VERSION,
    "digest": _between(0, DIGEST_MAX),
    "digests": _each(_between(0, DIGEST_MAX), FRAGMENTS_MAX),
    "fingerprint": _pairs,
    "part": _between(0, PARTS_MAX),
    "parts": _between(0, PARTS_MAX),
    "reason": _TEXT,
    "scores": _scores,
    "step_samples": _between(0, STEP_SAMPLES_MAX),
    "version": _VERSION,
    "versions": _each(_VERSION, FRAGMENTS_MAX),
    # Only people read these two. When a model diverges, its losses are not finite.
    "loss": _anything,
    "bits_per_byte": _anything,
}
_BY_TYPE: dict[type, Check] = {int: _COUNTER, float: _SECONDS, str: _NAME, bool: _anything}
_CHECKS = {
    kind: [
        (position, name, check)
        for position, (name, hint) in enumerate(typing.get_type_hints(kind).items())
        if (check := _BY_FIELD.get(name) or _BY_TYPE[hint]) is not _anything
    ]
    for kind in typing.get_args(LearnerMessage)
}
