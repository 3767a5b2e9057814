"""Islands of several slices: the network between slices, and what a lost slice costs.

With S slices, N elements of the gradient on a host's devices and a step's computation of C seconds, each host sends
and receives per step

    2 (S - 1) / S x 4 N bytes

which may take 5 % of C. With k slices left and the batch kept, a slice computes ceil(S / k) parts one after the other,
and sends the chunks of all but the last one meanwhile.
"""

import math
from typing import Any

from diloco_jax.sim.goodput.bandwidth import GBIT, STEP_TIMES_MAX, exchange_bytes, exchange_gbit_per_s
from diloco_jax.tools.budget.memory import held_elements
from diloco_jax.tools.plan.case import Case, TimedKind

# The longest measured pause of an island beyond `islands.straggler_s`, in seconds; docs/log.md, 2026-11-30.
FOUND_S = 1.2
# Islands do not pause when a slice returns; what simulations of that day assumed.
RETURNED_S = 0.1
# A larger batch than this many times the config's is not advised to make the exchange a smaller share.
BATCH_TIMES_MAX = 4
# With so many copies of the model on the hosts of a slice, another mesh is worth a try.
COPIES_MIN = 1.5
Row = dict[str, Any]


def slices_rows(case: Case) -> list[Row]:
    """Return what slices of each kind of islands exchange, and steps without one of them; [] if islands have one slice.

    `exchange_bytes` and `gbit_per_s_needed` are of each host of a slice, each way. `step_times` is the time of a step
    over that of its computation, None over an unknown network. `adopted_bytes` is what a host of the leading slice
    sends to each other slice per step, on average, for values that it adopts.
    """
    if case.config.islands.slices == 1:
        return []
    return [_row(case, kind) for kind in case.kinds]


def _row(case: Case, kind: TimedKind) -> Row:
    outlined, rounds = kind.outline.kind, case.rounds()
    slices, hosts, batch = outlined.slices, outlined.island.hosts, outlined.island.batch_size
    lost = lost_step_s(case, kind, 1)
    values = sum(held_elements(kind.outline.blueprint, each, hosts).on_host for each in kind.outline.run.fragments)
    return {
        "islands": list(outlined.names),
        "slices": slices,
        "hosts": hosts,
        "batch_size": batch,
        "part_size": outlined.part_size,
        "compute_s": kind.compute_s,
        "exchange_s": kind.exchange_s,
        "step_s": kind.step_s,
        "step_times": kind.step_s / kind.compute_s if kind.exchange_s else None,
        "exchange_bytes": exchange_bytes(kind.outline.gradient_elements, slices),
        "adopted_bytes": 4 * values / rounds.sync_every,
        "gbit_per_s_needed": needed_gbit_per_s(kind),
        "gbit_per_s": case.assumed.slices_gbit_per_s or None,
        "slices_batch": case.config.islands.slices_batch,
        "one_lost": {
            "keep": {"step_s": lost["keep"], "batch_size": batch},
            "shrink": {"step_s": lost["shrink"], "batch_size": batch - outlined.part_size},
        },
    }


def needed_gbit_per_s(kind: TimedKind) -> float:
    """Return the rate of a host's network to other slices that keeps a step within 1.05 of its computation."""
    return exchange_gbit_per_s(kind.outline.gradient_elements, kind.outline.kind.slices, kind.compute_s)


def lost_step_s(case: Case, kind: TimedKind, missing: int) -> dict[str, float]:
    """Return the seconds of a step while slices are missing, by the value of `islands.slices_batch`."""
    outlined, rate = kind.outline.kind, GBIT * case.assumed.slices_gbit_per_s
    left = outlined.slices - missing
    parts = math.ceil(outlined.slices / left)

    def exchange_s(members: int, parts: int) -> float:
        return exchange_bytes(kind.outline.gradient_elements, members, parts) / rate if rate else 0.0

    # Chunks of earlier parts travel while the last part is computed.
    earlier_s = exchange_s(left, parts) - exchange_s(left, 1)
    late_s = max(0.0, earlier_s - (parts - 1) * kind.compute_s)
    return {
        "keep": parts * kind.compute_s + exchange_s(left, 1) + late_s,
        "shrink": kind.compute_s + exchange_s(left, 1),
    }


def worst(case: Case) -> TimedKind:
    """Return the islands whose exchange is the largest share of a step."""
    return max(case.kinds, key=needed_gbit_per_s)


def slices_advice(case: Case) -> list[Row]:
    """Advise a larger batch, or islands of one slice, if gradients take more than 5 % of a step on a known network."""
    kind = worst(case)
    if kind.exchange_s <= (STEP_TIMES_MAX - 1) * kind.compute_s:
        return []
    outlined = kind.outline.kind
    times = kind.exchange_s / ((STEP_TIMES_MAX - 1) * kind.compute_s)
    why = (
        f"slices of {outlined.names[0]} exchange gradients for {kind.exchange_s:.3g} s of each step of "
        f"{kind.step_s:.3g} s, more than {STEP_TIMES_MAX - 1:.0%} of its computation; "
    )
    held = kind.outline.gradient_elements * outlined.island.hosts / case.parameters
    copies = f", and a mesh without the {held:.2g} copies in a slice, a smaller one" if held >= COPIES_MIN else ""
    if times > BATCH_TIMES_MAX:
        why += f"a batch {times:.0f} times as large would be needed, and an island for each slice exchanges far less"
        return [{"setting": "islands.slices", "value": 1, "now": outlined.slices, "change": True, "why": why}]
    batch = outlined.island.batch_size
    own = case.config.islands.each.get(outlined.names[0])
    where = f"islands.each.{outlined.names[0]}" if own is not None and own.batch_size else "islands"
    why += "a larger batch makes it a smaller share (optimizer.accumulate_steps keeps memory as it is)"
    why += copies
    value = batch * math.ceil(times)
    return [{"setting": f"{where}.batch_size", "value": value, "now": batch, "change": True, "why": why}]
