"""All checkers, in the order in which they are asked."""

from __future__ import annotations

from diloco_jax.sim.checks.budget import BudgetHolds
from diloco_jax.sim.checks.checker import Checker
from diloco_jax.sim.checks.failover import AnchorsAgree, StateRoundTrip, TapeReplays
from diloco_jax.sim.checks.learners import CopiesBounded, FreshLearnersKeepQuiet, NeverWaits, StepsUndisturbed
from diloco_jax.sim.checks.leases import LeasesAccount
from diloco_jax.sim.checks.progress import EverybodyTrains, RoundsAdvance, VersionsConverge
from diloco_jax.sim.checks.recovery import RecoveryIsWhole
from diloco_jax.sim.checks.rounds import (
    MergedOnce,
    QuarantineHolds,
    QuorumHolds,
    RoundsBounded,
    SharesAreTold,
    VersionsGrow,
)
from diloco_jax.sim.checks.steps import StepsApply, WholeWhereNeeded

CHECKERS: tuple[type[Checker], ...] = (
    VersionsGrow,
    MergedOnce,
    SharesAreTold,
    QuorumHolds,
    QuarantineHolds,
    RoundsBounded,
    NeverWaits,
    StepsUndisturbed,
    FreshLearnersKeepQuiet,
    CopiesBounded,
    RecoveryIsWhole,
    LeasesAccount,
    AnchorsAgree,
    StepsApply,
    WholeWhereNeeded,
    StateRoundTrip,
    TapeReplays,
    BudgetHolds,
    RoundsAdvance,
    EverybodyTrains,
    VersionsConverge,
)
