"""Counters that a learner gives with a value or a report, held against what it reported before and what is usual.

A wrong counter need not be a lie: a bit may flip in memory. Steps divide the norm by which values are judged, and
tokens make the weight of a value and the end of a run with a token budget, so neither is taken on one message's word.
"""

from math import inf
from typing import NamedTuple

from diloco_jax.protocol.messages import Adopted, FragmentValue

# Bulk connections may overtake the control connection, so a value may come before the reports of its last steps.
OVERTAKES_MAX = 256
LEAPS = 64  # no value counts as more than this share of a token budget: a learner that was cut off may have made many


class AskedReport(NamedTuple):
    """The report on which a round asked a member for a fragment."""

    round: int
    local_step: int
    tokens: int
    held: Adopted  # of the fragment


class Reported(NamedTuple):
    """A member's newest report."""

    local_step: int
    tokens: int
    samples: int  # -1: unknown, since an older release wrote the state
    held: Adopted  # of the fragment


def contradiction(value: FragmentValue, asked: AskedReport, newest: Reported) -> str:
    """Say which counter of a value its sender's own reports rule out; "" if none.

    The value is of the step that was asked for, or of a later one. Its base is the version that the sender held at
    that step, or one that it has adopted since.
    """
    step = value.local_step
    if not asked.local_step <= step <= newest.local_step + OVERTAKES_MAX:
        return (
            f"value of its step {step}, where step {asked.local_step} was asked for and its newest report is of "
            f"{newest.local_step}"
        )
    known = step <= newest.local_step
    starts = [held for held in (asked.held, newest.held) if held.version == value.base_version]
    found = [held for held in starts if value.steps == step - held.local_step]
    if found:
        most = max(newest.tokens - held.tokens for held in found)
    elif value.steps <= step - asked.local_step:
        most = newest.tokens - asked.tokens
    else:
        steps = " or ".join(str(step - held.local_step) for held in starts) or f"at most {step - asked.local_step}"
        return f"value of {value.steps} steps, where its reports say {steps}"
    if known and value.tokens > most:
        return f"value of {value.tokens} tokens, where its reports allow {most}"
    if value.since > value.samples or (known and 0 <= newest.samples < value.samples):
        return (
            f"value of the samples from {value.since} to {value.samples}, where its newest report says {newest.samples}"
        )
    return ""


def plausible_tokens(tokens: int, steps: int, usual: float, factor: float) -> int:
    """Return how many of these tokens so many inner steps can have had, where `usual` is the number for one step.

    Args:
        usual: infinite if nobody knows.
        factor: how many times what is usual a step may have; 0 for no limit.
    """
    if not factor or usual == inf:
        return tokens
    return min(tokens, max(1, int(factor * usual * steps)))
