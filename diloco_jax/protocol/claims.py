"""Compares the counters of a learner's value or report with its earlier reports and with what is usual.

A wrong counter may have an innocent cause, such as a flipped bit. Steps divide the norm in the check of a value. Tokens
decide the weight of a value, and when a token budget is reached. So one message is not enough for the syncer to believe
either.
"""

from math import inf
from typing import NamedTuple

from diloco_jax.protocol.messages import Adopted, FragmentValue

# One value counts for at most 1/LEAPS of a token budget. It may be large: a learner without a link continues to train.
LEAPS = 64


class AskedReport(NamedTuple):
    """The member's newest report when a round asked it for a fragment; `held` is its version of that fragment."""

    round: int
    local_step: int
    tokens: int
    held: Adopted


class Reported(NamedTuple):
    """A member's newest report; `held` is its version of the fragment in question."""

    local_step: int
    tokens: int
    # -1 if unknown, because an older release wrote the state.
    samples: int
    held: Adopted


def contradiction(value: FragmentValue, asked: AskedReport, newest: Reported) -> str:
    """Return which counter of a value contradicts its sender's own reports; "" if none does.

    The value is of the requested step, or of a later one that a report has confirmed. Its base is the version that the
    sender held at that step, or one that it has adopted since.
    """
    step = value.local_step
    if not asked.local_step <= step <= newest.local_step:
        return (
            f"value of its step {step}, where step {asked.local_step} was asked for and its newest report is of "
            f"{newest.local_step}"
        )
    starts = [held for held in (asked.held, newest.held) if held.version == value.base_version]
    found = [held for held in starts if value.steps == step - held.local_step]
    if found:
        most = max(newest.tokens - held.tokens for held in found)
    elif value.steps <= step - asked.local_step:
        most = newest.tokens - asked.tokens
    else:
        steps = " or ".join(str(step - held.local_step) for held in starts) or f"at most {step - asked.local_step}"
        return f"value of {value.steps} steps, where its reports say {steps}"
    if value.tokens > most:
        return f"value of {value.tokens} tokens, where its reports allow {most}"
    if value.since > value.samples or 0 <= newest.samples < value.samples:
        return (
            f"value of the samples from {value.since} to {value.samples}, where its newest report says {newest.samples}"
        )
    return ""


def plausible_tokens(tokens: int, steps: int, usual: float, factor: float) -> int:
    """Return the part of `tokens` that `steps` inner steps can plausibly have had.

    Args:
        usual: usual number of tokens per inner step; infinite if unknown.
        factor: most tokens of a step, as a multiple of `usual`; 0 for no limit.
    """
    if not factor or usual == inf:
        return tokens
    return min(tokens, max(1, int(factor * usual * steps)))
