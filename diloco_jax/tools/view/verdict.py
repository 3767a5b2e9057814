"""The verdict on a run: what came of it in one line, which its page and its report begin with."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from diloco_jax.runtime.records.liveness import ENDED
from diloco_jax.tools.live.words import format_count, format_duration

BASELINE = "baseline"


def verdict(status: Mapping[str, Any], summary: Mapping[str, Any], alarms: int, goodput: float | None) -> str:
    """Say how a run ended, or how it goes.

    Args:
        summary: what `Story.summary` returns; of a run under way, what is known by now.
        alarms: that stand, or that stood in a run that has ended.
        goodput: of the run until now; in [0, 1].
    """
    state, steps = status.get("state", "unknown"), status.get("global_step", summary["global_steps"])
    total, loss = status.get("total_steps"), summary.get("eval_loss")
    restarts = sum(row["restarts"] for row in summary["learners"].values())
    said = [
        f"{state}: {steps}{f' of {total}' if total else ''} rounds",
        f"evaluation loss {loss:.4f}" if loss is not None else "not evaluated" if state in ENDED else "",
        f"{format_count(status.get('tokens', summary['tokens']))} tokens",
        format_duration(status.get("wall_s", summary["wall_s"])),
        f"goodput {goodput:.1%}" if goodput is not None else "",
        _count(alarms, "alarm") if alarms else "no alarm",
        _count(restarts, "restart") if restarts else "",
    ]
    return ", ".join(filter(None, said))


def against(loss: float | None, baseline: float | None, name: str) -> str:
    """Say how far an evaluation loss is from a baseline's; "" if one of them is not known."""
    if loss is None or baseline is None or not (isfinite(loss) and isfinite(baseline) and baseline > 0):
        return ""
    share = loss / baseline - 1
    way = "above" if share > 0 else "below"
    return f", {abs(share):.2%} {way} the {BASELINE} {name} ({baseline:.4f})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
