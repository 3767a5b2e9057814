"""All checkers, in the order in which they are asked."""

from invariants.budget import BudgetHolds
from invariants.checker import Checker
from invariants.evaluations import ScoresAreOfTheModel
from invariants.failover import AnchorsAgree, StateRoundTrip, TapeReplays
from invariants.hostile import HostileIsHarmless
from invariants.learners import CopiesBounded, FreshLearnersKeepQuiet, NeverWaits, StepsUndisturbed
from invariants.leases import LeasesAccount
from invariants.progress import EverybodyTrains, RoundsAdvance, VersionsConverge
from invariants.recovery import RecoveryIsWhole
from invariants.rounds import MergedOnce, QuarantineHolds, QuorumHolds, RoundsBounded, SharesAreTold, VersionsGrow
from invariants.steps import StepsApply, WholeWhereNeeded
from invariants.turns import TurnsAreKept

CHECKERS: tuple[type[Checker], ...] = (
    VersionsGrow,
    MergedOnce,
    SharesAreTold,
    QuorumHolds,
    QuarantineHolds,
    RoundsBounded,
    TurnsAreKept,
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
    ScoresAreOfTheModel,
    HostileIsHarmless,
    RoundsAdvance,
    EverybodyTrains,
    VersionsConverge,
)
