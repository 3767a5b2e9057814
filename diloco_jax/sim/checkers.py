"""All checkers, in the order in which they are asked."""

from __future__ import annotations

from diloco_jax.sim.check_failover import AnchorsAgree, StateRoundTrip, TapeReplays
from diloco_jax.sim.check_learners import CopiesBounded, FreshLearnersKeepQuiet, NeverWaits
from diloco_jax.sim.check_leases import LeasesAccount
from diloco_jax.sim.check_progress import EverybodyTrains, RoundsAdvance, VersionsConverge
from diloco_jax.sim.check_recovery import RecoveryIsWhole
from diloco_jax.sim.check_rounds import MergedOnce, QuarantineHolds, QuorumHolds, RoundsBounded, VersionsGrow
from diloco_jax.sim.check_steps import StepsApply, WholeWhereNeeded
from diloco_jax.sim.checker import Checker

CHECKERS: tuple[type[Checker], ...] = (
    VersionsGrow,
    MergedOnce,
    QuorumHolds,
    QuarantineHolds,
    RoundsBounded,
    NeverWaits,
    FreshLearnersKeepQuiet,
    CopiesBounded,
    RecoveryIsWhole,
    LeasesAccount,
    AnchorsAgree,
    StepsApply,
    WholeWhereNeeded,
    StateRoundTrip,
    TapeReplays,
    RoundsAdvance,
    EverybodyTrains,
    VersionsConverge,
)
