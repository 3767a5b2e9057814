"""Needs of a link in closed form: bytes of a step, and the rates that follow. Pure arithmetic."""

from typing import NamedTuple

BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.125, "int4": 4.125}  # of an element, scales of blocks of 256 too


class StepBytes(NamedTuple):
    """Bytes over one island's link per global step."""

    up: float
    down: float


def decoupled_bytes(num_parameters: int, num_fragments: int, up: str, down: str) -> StepBytes:
    """One fragment up and one down per global step, payload only, with as many fragments as steps between syncs."""
    elements = num_parameters / num_fragments
    return StepBytes(elements * BITS[up] / 8, elements * BITS[down] / 8)


def ring_bytes(num_parameters: int, islands: int, bytes_per_element: float = 2.0) -> StepBytes:
    """A ring all-reduce of the gradient in every step: 2 (M - 1) / M times its size up, and as much down."""
    one_way = 2 * (islands - 1) / islands * num_parameters * bytes_per_element
    return StepBytes(one_way, one_way)


def sustained_rate(step: StepBytes, step_s: float) -> float:
    """Bits per second at which one fragment a step just gets through, in the direction that carries more.

    Below it rounds queue up: no overlap helps.
    """
    return 8 * max(step) / step_s


def round_rate(step: StepBytes, step_s: float, overlap_steps: int, round_trip_s: float = 0.0) -> float:
    """Bits per second at which a round fits its budget of `overlap_steps` inner steps.

    A round is half a step of waiting for the quorum on average, the pull (a round trip and the value up), and the new
    version down (half a round trip). Merging is left out: it is short beside a step.

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
