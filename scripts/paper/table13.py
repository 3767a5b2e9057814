"""Table 13 of Decoupled DiLoCo (arXiv 2604.21428): the rates of the paper's simulator, and formulas beside them.

Data parallel follows from the paper's own words (`bandwidth.data_parallel_gbit_per_s`). For the decoupled rows the
paper does not say how transfers of different fragments share a link, nor what a late one delays, so `fitted_gbit_per_s`
is a fit of ours with one constant. `needed_gbit_per_s` is what our system needs, from its own rules.
"""

from itertools import groupby
from typing import Any

from diloco_jax.sim.goodput.bandwidth import GBIT, UTILISATIONS, Rounds, data_parallel_gbit_per_s, ring_factor

PARAMETERS = 5.17e9  # of the 5B model: what makes the data-parallel rows come out
LEARNERS, SYNC_EVERY, OVERLAP_STEPS = 8, 24, 2  # M, H = P, tau; section 5.1
SPREAD_STEPS = 4.5  # the one constant that was fitted
HIDDEN = 1 / 3  # of a step; set, not fitted: with any value from 0.30 to 0.42 some constant comes within 10 %
INT4_BLOCK_BYTES, INT4_BLOCK = 132, 256  # of our wire: 128 bytes of codes and a scale

TABLE: dict[tuple[float, int, str], tuple[float, ...]] = {  # seconds per step, data centres, wire
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
data parallel: forward 1/3 of a step, backward 2/3, which hides the ring all-reduce of bfloat16 gradients. It does not
  explain the paper's 99 %.
fit of ours: the paper does not say how transfers share a link, nor what a late fragment delays. Its rows lie on
  1/CU = 2/3 + x/{SPREAD_STEPS}, with x the steps that one fragment takes alone on the link: one constant, fitted.
our system needs: learners never wait, so their steps run at 100 % over any link. The columns are the share of due
  rounds that are made in time: a fragment up and down within tau = 2 steps, half of one until reports are in; 4.125
  bits for int4; no latency, no merge. Every learner exchanges with a syncer elsewhere, 8 / sites of them per site;
  the paper's syncer shards all-reduce between sites. So more sites need less here, and more there.
docs/plan.md has the derivations."""


def fitted_gbit_per_s(wire: str, step_s: float, sites: int, utilisation: float) -> float:
    """Return the decoupled rows of the paper, within 8 %; a fit of ours.

    With x the time that one fragment takes alone on the link, in steps, the paper's rows lie on
    1 / utilisation = (1 - HIDDEN) + x / SPREAD_STEPS.

    Args:
      wire: bfloat16 or int4, of which the paper counts 4 bits per parameter.
      step_s: compute time of a step.
      sites: data centres.
      utilisation: compute time over wall time, in (0, 1].
    """
    fragment_bytes = PARAMETERS * BITS[wire] / 8 / SYNC_EVERY * ring_factor(sites)
    fragment_s = SPREAD_STEPS * step_s * (1 / utilisation - (1 - HIDDEN))
    return fragment_bytes / fragment_s / GBIT


def needed_gbit_per_s(wire: str, step_s: float, sites: int, utilisation: float) -> float:
    """Return a site's rate in our system: each learner sends fragments to a syncer elsewhere, and gets them back.

    Args:
      wire: bfloat16 or int4, with the scales of our blocks, both ways.
      step_s: an inner step.
      sites: data centres, among which the 8 learners are dealt out.
      utilisation: share of the due rounds that are made in time.
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
    """Return the table's cells: wire, sites, step_s, utilisation, gbit_per_s by formula, the paper's, and our need."""
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
        told = {"paper": "paper_gbit_per_s", "fit of ours": "gbit_per_s", "our system needs": "needed_gbit_per_s"}
        if wire == "data_parallel":
            lines += ["", f"steps of {step_s:g} s, {sites} data centres"]
            told = {"paper": "paper_gbit_per_s", "formula": "gbit_per_s"}
        for label, key in told.items():
            name = f"{wire if label == 'paper' else '':<14} {label}"
            lines.append(f"  {name:<34}" + "".join(f"{row[key]:>8.3g}" for row in here))
    return "\n".join([*lines, "", NOTES])
