"""Limits of a message. The sender checks them before it sends, the receiver before fields become Python objects.

The limits follow from the types in diloco.proto, so that a new field cannot escape them. A message within the limits
may still make no sense; the machines judge that, because they know what they expect.
"""

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from diloco_jax.protocol.bounds import FRAGMENTS_MAX, PAIRS_MAX, PARTS_MAX
from diloco_jax.protocol.messages import METRIC_LENGTH_MAX, METRICS_MAX, SCORE_LENGTH_MAX, SCORES_MAX
from diloco_jax.transport.link import NAME_LENGTH_MAX
from diloco_jax.transport.proto import diloco_pb2 as pb

COUNTER_MAX = 1 << 62
PAIR_LENGTH_MAX = 1 << 16
REASON_LENGTH_MAX = 4000
# A host's statement of its blocks (HostBlocks).
STATEMENT_BYTES_MAX = 14 << 20
TEXT_LENGTHS_MAX = {
    "reason": REASON_LENGTH_MAX,
    "leaf": REASON_LENGTH_MAX,
    "state": 32 * FRAGMENTS_MAX,
    # An order of a slice's host 0 may have the name of a state, and the samples of each part of a step.
    "message": 1 << 19,
    "fingerprint_key": NAME_LENGTH_MAX,
    "fingerprint_value": PAIR_LENGTH_MAX,
    "values_name": METRIC_LENGTH_MAX,
    "scores_name": SCORE_LENGTH_MAX,
}
# These numbers are for people; a run that diverges reports non-finite ones.
FOR_PEOPLE = ("loss", "bits_per_byte", "values_value", "scores_value")

# A check takes a value and returns what is wrong with it, or "".
Check = Callable[[Any], str]


def check_body(body: Any) -> None:
    """Check one protobuf message.

    Raises:
        ValueError: A field exceeds its limit; the text names the field, its value and the limit.
    """
    cls = type(body).__name__
    for name, repeated, limit, check in _RULES[cls]:
        value = getattr(body, name)
        if repeated and len(value) > limit:
            raise ValueError(f"{cls}.{name} has {len(value)} elements, the limit is {limit}")
        for each in value if repeated else (value,):
            if wrong := check(each):
                raise ValueError(f"{cls}.{name} {wrong}")
    if cls == "StateChunk" and not 0 <= body.part < body.parts <= PARTS_MAX:
        raise ValueError(f"StateChunk.part is {body.part} of {body.parts}, the limit is {PARTS_MAX} parts")
    if cls == "Hello" and len(body.versions) != len(body.digests):
        raise ValueError(f"Hello has {len(body.versions)} versions but {len(body.digests)} digests")


def _check_inner(body: Any) -> str:
    check_body(body)
    return ""


def _check_of(field: FieldDescriptor) -> Check:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _check_inner
    if field.type == FieldDescriptor.TYPE_STRING:
        longest = TEXT_LENGTHS_MAX.get(field.name, NAME_LENGTH_MAX)
        return lambda text: "" if len(text) <= longest else f"has {len(text)} characters, the limit is {longest}"
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        if field.name in FOR_PEOPLE:
            return lambda _: ""
        return lambda x: "" if math.isfinite(x) and x >= 0 else f"is {x!r}, no duration"
    if field.type in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_BOOL):
        return lambda _: ""
    least = {FieldDescriptor.TYPE_SINT64: -1, FieldDescriptor.TYPE_INT64: 0}[field.type]
    # A learner may be behind the schedule.
    if field.name == "schedule_lead":
        least = -COUNTER_MAX
    return lambda n: "" if least <= n <= COUNTER_MAX else f"is {n}, it must be {least} to {COUNTER_MAX}"


def _rules(cls: str) -> list[tuple[str, bool, int, Check]]:
    """Return (field, whether it is repeated, most elements, check of an element) for all fields of a message."""
    fields = getattr(pb, cls).DESCRIPTOR.fields
    # The limit of a repeated field follows from the first word of its name.
    most = {"fingerprint": PAIRS_MAX, "values": METRICS_MAX, "scores": SCORES_MAX}
    return [
        (field.name, field.is_repeated, most.get(field.name.partition("_")[0], FRAGMENTS_MAX), _check_of(field))
        for field in fields
    ]


_RULES = {
    field.message_type.name: _rules(field.message_type.name)
    for field in pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}
