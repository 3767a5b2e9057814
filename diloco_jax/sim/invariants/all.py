"""All checkers, in the order of their calls."""

from diloco_jax.sim.invariants.budget import BudgetHolds
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.invariants.deltas import DeltasApply, WholeWhereNeeded
from diloco_jax.sim.invariants.evaluations import ScoresAreOfTheModel
from diloco_jax.sim.invariants.exclusions import ExclusionsHold
from diloco_jax.sim.invariants.failover import AnchorsAgree, StateRoundTrip, TapeReplays
from diloco_jax.sim.invariants.hostile import BansHold, HostileIsHarmless
from diloco_jax.sim.invariants.learners import (
    CopiesBounded,
    FreshLearnersKeepQuiet,
    NeverWaits,
    SlicesLoseLittle,
    StepsUndisturbed,
    WaitsBounded,
)
from diloco_jax.sim.invariants.leases import LeasesAccount
from diloco_jax.sim.invariants.progress import EverybodyTrains, RoundsAdvance, VersionsConverge
from diloco_jax.sim.invariants.recovery import RecoveryIsWhole
from diloco_jax.sim.invariants.rounds import (
    ClosesForAReason,
    MergedOnce,
    OwedAreAskedLess,
    QuarantineHolds,
    QuorumHolds,
    RoundsBounded,
    SharesAreTold,
    VersionsGrow,
)
from diloco_jax.sim.invariants.turns import TurnsAreKept

CHECKERS: tuple[type[Checker], ...] = (
    VersionsGrow,
    MergedOnce,
    SharesAreTold,
    QuorumHolds,
    ClosesForAReason,
    OwedAreAskedLess,
    QuarantineHolds,
    BansHold,
    ExclusionsHold,
    RoundsBounded,
    TurnsAreKept,
    NeverWaits,
    WaitsBounded,
    StepsUndisturbed,
    FreshLearnersKeepQuiet,
    CopiesBounded,
    RecoveryIsWhole,
    LeasesAccount,
    SlicesLoseLittle,
    AnchorsAgree,
    DeltasApply,
    WholeWhereNeeded,
    StateRoundTrip,
    TapeReplays,
    BudgetHolds,
    ScoresAreOfTheModel,
    HostileIsHarmless,
    RoundsAdvance,
    EverybodyTrains,
    VersionsConverge,
)
