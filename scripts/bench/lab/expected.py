"""Formulas for the needs of a link: the bytes of a step, and the rates that follow from them."""

from typing import NamedTuple

# Bits of an element, with the scales of blocks of 256.
BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.125, "int4": 4.125}


class StepBytes(NamedTuple):
    """Bytes over one island's link per global step."""

    up: float
    down: float


def decoupled_bytes(num_parameters: int, num_fragments: int, up: str, down: str) -> StepBytes:
    """Return the payload bytes of one fragment up and one down per global step, for P = H fragments."""
    elements = num_parameters / num_fragments
    return StepBytes(elements * BITS[up] / 8, elements * BITS[down] / 8)


def ring_bytes(num_parameters: int, islands: int, bytes_per_element: float = 2.0) -> StepBytes:
    """Return the bytes of a ring all-reduce of the gradient: 2 (M - 1) / M times its size in each direction."""
    one_way = 2 * (islands - 1) / islands * num_parameters * bytes_per_element
    return StepBytes(one_way, one_way)


def sustained_rate(step: StepBytes, step_s: float) -> float:
    """Return the bits per second that carry one fragment per step in the busier direction.

    Below this rate rounds queue up, and no overlap helps.
    """
    return 8 * max(step) / step_s


def round_rate(step: StepBytes, step_s: float, overlap_steps: int, round_trip_s: float = 0.0) -> float:
    """Return the bits per second that fit a round into `overlap_steps` inner steps.

    A round waits half a step for the quorum on average, pulls (a round trip and the value up), and sends the new
    version down (half a round trip). The time of the merge is ignored, because it is short beside a step.

    Raises:
        ValueError: no rate is enough.
    """
    left_s = (overlap_steps - 0.5) * step_s - 1.5 * round_trip_s
    if left_s <= 0:
        raise ValueError(
            f"{overlap_steps} steps of {step_s:g} s leave no time for a round trip of {round_trip_s:g} s; "
            "raise overlap_steps"
        )
    return max(8 * sum(step) / left_s, sustained_rate(step, step_s))
