"""Table 13 of Decoupled DiLoCo (arXiv 2604.21428): the rates of the paper's simulator beside rates from formulas.

The rates of data parallel follow from the paper's text (`bandwidth.data_parallel_gbit_per_s`). For the decoupled rows
the paper does not describe how transfers of several fragments share a link, nor what a late transfer delays;
`fitted_gbit_per_s` is our fit with one constant. `needed_gbit_per_s` is the rate that our system needs by its rules.
"""

from itertools import groupby
from typing import Any

from diloco_jax.sim.goodput.bandwidth import GBIT, UTILISATIONS, Rounds, data_parallel_gbit_per_s, ring_factor

# The parameters of the 5B model; this number reproduces the data-parallel rows.
PARAMETERS = 5.17e9
# M, H = P and tau of section 5.1.
LEARNERS, SYNC_EVERY, OVERLAP_STEPS = 8, 24, 2
# The only fitted constant.
SPREAD_STEPS = 4.5
# A share of a step, set by hand. For each value from 0.30 to 0.42 some SPREAD_STEPS fits the rows within 10 %.
HIDDEN = 1 / 3
# A block on our wire has 128 bytes of codes and a scale.
INT4_BLOCK_BYTES, INT4_BLOCK = 132, 256

# Rates in Gbit/s for UTILISATIONS, by seconds per step, data centres and wire.
TABLE: dict[tuple[float, int, str], tuple[float, ...]] = {
    (1.0, 2, "data_parallel"): (49, 81, 104, 113, 195),
    (1.0, 2, "bfloat16"): (0.58, 1.2, 1.7, 1.9, 2.2),
    (1.0, 2, "int4"): (0.15, 0.29, 0.43, 0.49, 0.53),
    (5.0, 2, "data_parallel"): (9.5, 16, 21, 23, 49),
    (5.0, 2, "bfloat16"): (0.12, 0.23, 0.34, 0.39, 0.43),
    (5.0, 2, "int4"): (0.03, 0.06, 0.08, 0.10, 0.11),
    (1.0, 8, "data_parallel"): (85, 140, 183, 198, 391),
    (1.0, 8, "bfloat16"): (1.0, 2.0, 3.0, 3.3, 3.8),
    (1.0, 8, "int4"): (0.26, 0.51, 0.75, 0.84, 0.94),
    (5.0, 8, "data_parallel"): (17, 28, 37, 40, 49),
    (5.0, 8, "bfloat16"): (0.21, 0.40, 0.59, 0.68, 0.75),
    (5.0, 8, "int4"): (0.05, 0.10, 0.15, 0.17, 0.19),
}
BITS = {"bfloat16": 16.0, "int4": 4.0}
NOTES = f"""\
data parallel: the forward pass takes 1/3 of a step. The backward pass takes 2/3 and hides the ring all-reduce of
  bfloat16 gradients. This does not explain the paper's 99 %.
our fit: the paper does not describe how transfers share a link, nor what a late fragment delays. Its rows are on
  1/CU = 2/3 + x/{SPREAD_STEPS}, where x is the steps that one fragment takes alone on the link. One constant is fitted.
our system needs: learners never wait, so their steps run at 100 % over any link. The columns are the share of due
  rounds that are made: they follow each other no faster than a version travels, divided by gamma = 0.9. At the rate
  of 100 % a version takes 0.9 steps. int4 has 4.125 bits. Latency and merge are 0. Every learner exchanges with a
  syncer elsewhere, and a site has 8 / sites learners; the paper's syncer shards all-reduce between sites. So more
  sites need less in our system, and more in the paper's.
docs/plan.md has the derivations."""


def fitted_gbit_per_s(wire: str, step_s: float, sites: int, utilisation: float) -> float:
    """Return the rate of the paper's decoupled rows within 8 %, from our fit.

    If one fragment alone takes x steps on the link, the paper's rows are on
    1 / utilisation = (1 - HIDDEN) + x / SPREAD_STEPS.

    Args:
      wire: bfloat16 or int4; the paper counts 4 bits per parameter for int4.
      step_s: compute time of a step.
      sites: data centres.
      utilisation: compute time over wall time, in (0, 1].
    """
    fragment_bytes = PARAMETERS * BITS[wire] / 8 / SYNC_EVERY * ring_factor(sites)
    fragment_s = SPREAD_STEPS * step_s * (1 / utilisation - (1 - HIDDEN))
    return fragment_bytes / fragment_s / GBIT


def needed_gbit_per_s(wire: str, step_s: float, sites: int, utilisation: float) -> float:
    """Return a site's rate in our system, where each learner exchanges fragments with a syncer elsewhere.

    Args:
      wire: bfloat16 or int4 with the scales of our blocks, both ways.
      step_s: compute time of an inner step.
      sites: data centres; the 8 learners are distributed over them.
      utilisation: share of due rounds that are made in time.
    """
    per_parameter = 2.0 if wire == "bfloat16" else INT4_BLOCK_BYTES / INT4_BLOCK
    total = PARAMETERS * per_parameter
    rounds = Rounds(
        step_s=step_s,
        sync_every=SYNC_EVERY,
        num_fragments=SYNC_EVERY,
        overlap_steps=OVERLAP_STEPS,
        up_bytes=total / SYNC_EVERY,
        down_bytes=total / SYNC_EVERY,
        up_total_bytes=total,
        down_total_bytes=total,
    )
    return LEARNERS / sites * rounds.gbit_per_s(utilisation)


def rows() -> list[dict[str, Any]]:
    """Return the cells of the table with the rates by formula, of our system and of the paper."""
    found = []
    for (step_s, sites, wire), paper in TABLE.items():
        for share, theirs in zip(UTILISATIONS, paper, strict=True):
            cell = {"wire": wire, "sites": sites, "step_s": step_s, "utilisation": share}
            if wire == "data_parallel":
                cell["gbit_per_s"] = data_parallel_gbit_per_s(2 * PARAMETERS, step_s, sites, share)
            else:
                cell["gbit_per_s"] = fitted_gbit_per_s(wire, step_s, sites, share)
                cell["needed_gbit_per_s"] = needed_gbit_per_s(wire, step_s, sites, share)
            found.append({**cell, "paper_gbit_per_s": theirs})
    return found


def describe() -> str:
    """Return the table as text."""
    lines = [
        f"Gbit/s per site for a compute utilisation of ..., {PARAMETERS / 1e9:.3g} B parameters, M = {LEARNERS}, "
        f"H = P = {SYNC_EVERY}, tau = {OVERLAP_STEPS}",
        f"{'':<36}" + "".join(f"{share:>8.0%}" for share in UTILISATIONS),
    ]
    for (step_s, sites, wire), cells in groupby(rows(), lambda row: (row["step_s"], row["sites"], row["wire"])):
        here = list(cells)
        labels = {"paper": "paper_gbit_per_s", "our fit": "gbit_per_s", "our system needs": "needed_gbit_per_s"}
        if wire == "data_parallel":
            lines += ["", f"steps of {step_s:g} s, {sites} data centres"]
            labels = {"paper": "paper_gbit_per_s", "formula": "gbit_per_s"}
        for label, key in labels.items():
            name = f"{wire if label == 'paper' else '':<14} {label}"
            lines.append(f"  {name:<34}" + "".join(f"{row[key]:>8.3g}" for row in here))
    return "\n".join([*lines, "", NOTES])
