"""Every checker catches the machine that breaks its rule, and passes the machine that does not."""

import re
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from diloco_jax.protocol.closing import GraceWindow
from diloco_jax.protocol.effects import Drop, Effect, Merge, Send, Unstage
from diloco_jax.protocol.learner.machine import STOPPED, TRAINING, Learner
from diloco_jax.protocol.learner.stager import Stager
from diloco_jax.protocol.member import Member
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Adopted,
    FragmentValue,
    GlobalFragment,
    Lease,
    PullRequest,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.evaluations import EvaluationPlan
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import Downstream
from diloco_jax.protocol.syncer.round import Round
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants import all as checkers
from diloco_jax.sim.invariants.all import CHECKERS
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.invariants.verdict import Verdict, judge
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import LinkFaults, NetworkOptions
from diloco_jax.sim.node import LearnerProcess
from diloco_jax.sim.scenario import Scenario
from tests.sim.invariants import broken_machines as broken

CONFIG = ProtocolConfig(
    sync_every=4, num_fragments=4, overlap_steps=2, silence_s=4.0, heartbeat_s=1.0, resend_s=0.5, pull_timeout_s=5.0
)
NETWORK = NetworkOptions(
    faults=LinkFaults(loss=0.05, duplication=0.1, reorder=0.1, reorder_s=3.0, late=0.5, heals_s=40.0)
)
# Links without random faults that draw random numbers for every message, as those above do.
CALM_NETWORK = NetworkOptions(faults=LinkFaults())
SCENARIO = Scenario(
    config=CONFIG,
    learners=4,
    total_steps=140,
    network=NETWORK,
    faults=(
        Fault(12.0, "crash", ("island-1",), 6.0, notice_s=0.02),
        Fault(15.0, "disconnect", ("island-0",), 3.0, notice_s=0.02),
        Fault(25.0, "crash", ("island-2",), 3.0),
    ),
    seed=1,
)
WAITS = replace(
    SCENARIO,
    config=replace(CONFIG, wait_steps=0.5, quorum=4),
    speed_spread=2.0,
    faults=(*SCENARIO.faults, *(Fault(20.0 + 0.7 * n, "disconnect", ("island-3",), 0.3) for n in range(60))),
)
FEW_TURNS = replace(SCENARIO, config=replace(CONFIG, wait_steps=0.5, num_fragments=2))
QUORUM = replace(SCENARIO, config=replace(CONFIG, quorum=3))
HOSTILE = replace(SCENARIO, faults=(Fault(5.0, "hostile", ("island-2",), 100.0),))
# Values arrive at different times, so that a learner may be banned while its value waits for others.
BANNED = replace(
    SCENARIO,
    network=NetworkOptions(delay_s=0.1, jitter_s=1.0, faults=LinkFaults()),
    faults=tuple(Fault(10.0 + 8.3 * n, "ban", (f"island-{1 + n % 3}",), 1.0) for n in range(20)),
)
MUTE = replace(SCENARIO, faults=(Fault(5.0, "mute", ("island-1",), 60.0),))
LOCKSTEP = replace(SCENARIO, config=replace(CONFIG, overlap_steps=0, quorum=3))
ONE_FRAGMENT = replace(SCENARIO, config=replace(CONFIG, num_fragments=1, sync_every=1, overlap_steps=3))
FAILOVER = Scenario(
    config=replace(CONFIG, snapshot_every=10, lease_ahead_steps=8, restore_s=8.0, release_s=3.0),
    learners=3,
    total_steps=80,
    network=CALM_NETWORK,
    faults=(
        Fault(20.0, "syncer_crash", duration_s=2.0),
        Fault(30.0, "crash", ("island-2",), 1.0, notice_s=0.02),
        Fault(40.0, "rewind", duration_s=1.0),
        Fault(60.0, "syncer_crash", duration_s=4.0, breaks_snapshot=True),
    ),
    step_samples=(1, 4),
    payload_bytes=1000,
    seed=4,
)
BAN_AND_REWIND = replace(FAILOVER, faults=(Fault(35.0, "ban", ("island-1",), 40.0), *FAILOVER.faults[2:]))
RECOVERY = Scenario(
    config=replace(CONFIG, snapshot_every=1000),
    total_steps=120,
    network=NetworkOptions(delay_s=0.4, faults=LinkFaults()),
    faults=tuple(Fault(15.0 + 8.0 * n, "crash", (f"island-{n % 3}",), 2.0, notice_s=0.02) for n in range(8)),
    speed_spread=1.0,
    state_parts=6,
    seed=2,
)
CORPORA = replace(SCENARIO, corpora=("french", "german"))
EVALUATED = replace(SCENARIO, plan=EvaluationPlan(30.0, 20))
TOKENS = replace(ONE_FRAGMENT, total_steps=200, tokens=400_000, config=replace(CONFIG, num_fragments=1))
STEPS = replace(
    SCENARIO,
    payload_bytes=8000,
    delta_bytes=1000,
    faults=(*SCENARIO.faults, Fault(30.0, "corrupt", ("island-3",), 20.0)),
)
MANY_PARTS = replace(RECOVERY, config=replace(RECOVERY.config, recovery_turns=1), state_parts=40)
PERIODS = replace(
    SCENARIO,
    config=replace(CONFIG, sync_every={"mlp": 4, "rest": 8}, class_fragments=(2, 2), sync_later={90: 16}),
)
SLICES = replace(
    SCENARIO,
    slices=3,
    shrinks=True,
    step_samples=(1, 4),
    faults=(
        Fault(10.0, "slice", ("island-1",), 20.0, 1),
        Fault(25.3, "slice", ("island-2",), 15.0, 2, 0.02, leads=True),
        Fault(32.1, "slice", ("island-2",), 3.0, 1, leads=True),
        *(Fault(50.7 + 9.3 * n, "slice", (f"island-{n % 3}",), 5.0, 2, 0.02, leads=True) for n in range(6)),
    ),
)
POISON = replace(
    SCENARIO, faults=(Fault(10.0, "poison", ("island-1",), 40.0), Fault(20.0, "poison", ("island-2",), 15.0))
)


class Forgetful(Learner):
    """Adopts whatever arrives, newer or not."""

    def wants(self, message: GlobalFragment, now_s: float) -> bool:
        return True

    def _on_global(self, message: GlobalFragment, now_s: float) -> None:
        adopted = list(self.adopted)
        adopted[message.fragment_id] = adopted[message.fragment_id]._replace(version=NO_VERSION)
        self.anchors.adopted = tuple(adopted)
        super()._on_global(message, now_s)


class Rigid(Learner):
    """Takes the samples of whole steps while slices are missing."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.allotment.resize = lambda samples: None  # type: ignore[method-assign]


class Inventive(Downstream):
    """Broadcasts versions that nobody made."""

    def _message(self, *args: Any) -> GlobalFragment:
        message = super()._message(*args)
        return message._replace(version=message.version + 1)


class MergesTwice(Syncer):
    """Asks for the same merge again when somebody leaves meanwhile."""

    def on_disconnect(self, *args: Any) -> list[Effect]:
        effects = super().on_disconnect(*args)
        for this in self.rounds.flying.values():
            if this.phase == "merging":
                effects.append(Merge(this.global_step, this.fragment_id, tuple(this.values.values())))
        return effects


class CountsStepsTwice(RoundBook):
    """Book that forgets what it has merged, and asks for old steps."""

    def _close(self, *args: Any) -> None:
        super()._close(*args)
        for member in self.membership.members.values():
            member.credit.used_step = 0
            member.credit.merged_base.clear()


class Idle(Stager):
    """Stager that sends values without any step of its learner."""

    def _value(self, *args: Any) -> FragmentValue:
        return super()._value(*args)._replace(steps=0, tokens=0)


class Credulous(Syncer):
    """Believes in values without steps, and hides it from the merge's own count."""

    def _on_value(self, member: Member, message: FragmentValue, now_s: float) -> None:
        super()._on_value(member, message._replace(steps=message.steps or 1, tokens=message.tokens or 1), now_s)
        for effect in self._effects.drain():
            self._effects.append(_with_steps(effect, message.steps) if isinstance(effect, Merge) else effect)


def _with_steps(merge: Merge, steps: int) -> Merge:
    return merge._replace(contributions=tuple(each._replace(steps=steps, tokens=steps) for each in merge.contributions))


class Hoarder(Syncer):
    """Syncer that never frees the payload of a value that it does not use."""

    def _on_value(self, member: Member, message: FragmentValue, now_s: float) -> None:
        super()._on_value(member, message, now_s)
        self._effects.extend([effect for effect in self._effects.drain() if not isinstance(effect, Drop)])


class Hasty(Syncer):
    """Syncer that closes a round with any learners that are there."""

    def __init__(self, config: ProtocolConfig, *args: Any, **others: Any) -> None:
        super().__init__(replace(config, quorum=1), *args, **others)


class CountsTwice(RoundBook):
    """Counts a step in every round, until the next one is reported."""

    def _close(self, *args: Any) -> None:
        super()._close(*args)
        for member in self.membership.members.values():
            member.credit.used_step = 0


class Eager(Learner):
    """Trains as soon as it is welcome, on its own initial values."""

    def _on_welcome(self, message: Welcome, now_s: float) -> None:
        super()._on_welcome(message, now_s)
        self.anchors.adopted = tuple(a if a.version >= 0 else Adopted(0) for a in self.adopted)
        self.allotment.add(Lease(0, 0, 4096))
        self._train()


class Crowded(Syncer):
    """Lets more rounds overlap than the configuration says."""

    def __init__(self, config: ProtocolConfig, *args: Any, **others: Any) -> None:
        super().__init__(replace(config, overlap_steps=config.overlap_steps + 2), *args, **others)


class Impatient(RoundBook):
    """Opens a round of a fragment that is still in flight."""

    def _open(self, now_s: float) -> Round | None:
        fragments = {this.global_step: this.fragment_id for this in self.flying.values()}
        for this in self.flying.values():
            this.fragment_id = -2
        opened = super()._open(now_s)
        for step, fragment_id in fragments.items():
            self.flying[step].fragment_id = fragment_id
        return opened


class Leaky(Stager):
    """Never frees a copy."""

    def _unstage(self, fragment_id: int) -> None:
        self.staged.pop(fragment_id, None)


class FreesTwice(Stager):
    """Frees its copies once more."""

    def _unstage(self, fragment_id: int) -> None:
        super()._unstage(fragment_id)
        self.effects.extend([effect for effect in self.effects if isinstance(effect, Unstage)])


class SendsUnstaged(Learner):
    """Promises a copy that it does not hold."""

    def _on_pull(self, message: PullRequest, now_s: float) -> None:
        super()._on_pull(message, now_s)
        for e in self._effects.drain():
            if isinstance(e, Send) and isinstance(e.message, FragmentValue):
                e = e._replace(message=e.message._replace(local_step=e.message.local_step + 1))
            self._effects.append(e)


class Moody(RoundBook):
    """Book that decides by something other than its inputs."""

    moods = count()

    def _window(self, this: Round, now_s: float) -> GraceWindow:
        # After 101 rounds it would decide the same again.
        window = super()._window(this, now_s)
        return window._replace(links_s=window.links_s + 0.01 * (37 * next(self.moods) % 101))


class Deaf(Syncer):
    """Never repeats a pull and never gives one up."""

    def on_tick(self, now_s: float) -> list[Effect]:
        for this in self.rounds.flying.values():
            this.resend_s = this.expires_s = this.owed_s = now_s + 1000.0
        return super().on_tick(now_s)


class Stubborn(Learner):
    """Does not hear that the run is complete."""

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        effects = super().on_message(message, now_s)
        if self.state == STOPPED:
            self.state = TRAINING
            return []
        return effects


def with_learner(make: type, scenario: Scenario = SCENARIO) -> dict[str, Any]:
    """Run with this learner, or with one that has this part."""
    return {"scenario": scenario, "make_learner": make if issubclass(make, Learner) else broken.having(make, Learner)}


def with_syncer(make: type, scenario: Scenario = SCENARIO) -> dict[str, Any]:
    return {"scenario": scenario, "make_syncer": make if issubclass(make, Syncer) else broken.having(make, Syncer)}


BROKEN = [
    (checkers.VersionsGrow, with_learner(Forgetful), "island-. adopts version"),
    (checkers.VersionsGrow, with_syncer(Inventive), "which nobody made"),
    (checkers.MergedOnce, with_syncer(MergesTwice, replace(SCENARIO, merge_s=2.0)), "is merged twice"),
    (checkers.MergedOnce, with_syncer(CountsStepsTwice), "is merged twice"),
    (checkers.MergedOnce, {**with_learner(Idle), "make_syncer": Credulous}, "has no step in round"),
    (checkers.MergedOnce, with_syncer(Hoarder), "payload"),
    (checkers.SharesAreTold, with_syncer(broken.Flatterer, POISON), "is told of a share that it does not have"),
    (checkers.SharesAreTold, with_syncer(broken.Discreet), "is not told of its share"),
    (checkers.QuorumHolds, with_syncer(Hasty, QUORUM), "the quorum is 3"),
    (checkers.QuorumHolds, with_syncer(CountsTwice), "counted was"),
    (checkers.ClosesForAReason, with_syncer(broken.Boastful), "closes with .*: 'all 5 live"),
    (checkers.ClosesForAReason, with_syncer(broken.Silent), "closes for no reason: ''"),
    (checkers.OwedAreAskedLess, with_syncer(broken.Insisting, MUTE), "island-1 owes .* asks it before round"),
    (checkers.NeverWaits, with_learner(broken.Polite), "has trained, but does not step"),
    (checkers.WaitsBounded, with_learner(broken.Lingering, WAITS), "waited .* between two steps, limit"),
    (checkers.WaitsBounded, with_learner(broken.Lonely, WAITS), "waits without a link"),
    (checkers.WaitsBounded, with_learner(broken.Undecided, FEW_TURNS), "where no fragment is due"),
    (checkers.WaitsBounded, with_learner(broken.Overdue, WAITS), "which is over"),
    (checkers.WaitsBounded, with_learner(broken.Repetitive, WAITS), "waits again for round"),
    (checkers.StepsUndisturbed, with_learner(broken.Distracted), "began a step with"),
    (checkers.FreshLearnersKeepQuiet, with_learner(Eager), "steps, but holds . of 4 fragments"),
    (checkers.RoundsBounded, with_syncer(Crowded), "rounds are in flight, limit 2"),
    (checkers.RoundsBounded, with_syncer(Impatient, ONE_FRAGMENT), "is in flight twice"),
    (checkers.TurnsAreKept, with_syncer(broken.OfAnotherTable, PERIODS), "but it is the turn of"),
    (checkers.TurnsAreKept, with_syncer(broken.Skips, PERIODS), "is of fragment -1, but it is the turn of"),
    (checkers.TurnsAreKept, with_learner(broken.CopiesAhead, PERIODS), "island-. copies fragment"),
    (checkers.CopiesBounded, with_learner(Leaky), "holds . copies of one fragment"),
    (checkers.CopiesBounded, with_learner(FreesTwice), "frees what it does not hold"),
    (checkers.CopiesBounded, with_learner(SendsUnstaged), "but holds copies of steps"),
    (checkers.TapeReplays, with_syncer(Moody), "line .* led to .*, when replayed to"),
    (checkers.MergedOnce, with_syncer(broken.Diligent, replace(FAILOVER, merge_s=1.5)), "is merged twice"),
    (checkers.QuarantineHolds, with_syncer(broken.Lenient, POISON), "whose values were not usable"),
    (checkers.QuarantineHolds, with_syncer(broken.Patient, POISON), "values in a row that were not usable, but stays"),
    (checkers.QuarantineHolds, with_syncer(broken.Forgiving, POISON), "who was expelled, led to"),
    (checkers.BansHold, with_syncer(broken.Keepsake, BANNED), "merges .'island-.'., who are banned"),
    (checkers.BansHold, with_syncer(broken.Hospitable, BAN_AND_REWIND), "of a banned learner led to"),
    (checkers.BansHold, with_syncer(broken.Regretful, BAN_AND_REWIND), "of a banned learner led to"),
    (checkers.BansHold, with_syncer(broken.Secretive, BANNED), "is banned and connected, but not expelled"),
    (checkers.RecoveryIsWhole, with_learner(broken.Greedy, RECOVERY), "takes over parts"),
    (checkers.RecoveryIsWhole, with_learner(broken.Unasked, RECOVERY), "asked with clock .* had heard of"),
    (checkers.RecoveryIsWhole, with_learner(broken.Uncritical, RECOVERY), "takes parameters that are based on"),
    (checkers.RecoveryIsWhole, with_learner(broken.Hoards, RECOVERY), "holds copies of steps|ends with copies"),
    (checkers.RecoveryIsWhole, with_learner(broken.Slow, MANY_PARTS), "global steps to get a state"),
    (checkers.ScoresAreOfTheModel, with_learner(broken.Fanciful, EVALUATED), "is of"),
    (checkers.LeasesAccount, with_syncer(broken.GivesTwice), "was leased to island-. while it was still leased"),
    (checkers.LeasesAccount, with_syncer(broken.Optimist), "its tape says"),
    (checkers.LeasesAccount, with_syncer(broken.Mixes, CORPORA), "were skipped|its tape says|while it was"),
    (checkers.HostileIsHarmless, with_syncer(broken.Boundless, HOSTILE), "led to what cannot be sent"),
    (checkers.LeasesAccount, with_syncer(broken.Overcounter, ONE_FRAGMENT), "its tape says"),
    (checkers.LeasesAccount, with_learner(broken.Adrift), "island-. reads"),
    (checkers.AnchorsAgree, with_syncer(broken.Liar, FAILOVER), "is sent with the value|nobody holds it"),
    (checkers.AnchorsAgree, with_syncer(broken.Careless, FAILOVER), "island-. holds version .* but .*nobody holds it"),
    (checkers.AnchorsAgree, with_syncer(broken.Confused, STEPS), "is sent, a step is of"),
    (checkers.DeltasApply, with_learner(broken.Gullible, STEPS), "applies .* to version"),
    (checkers.WholeWhereNeeded, with_syncer(broken.Wasteful, STEPS), "but gets .* whole"),
    (checkers.WholeWhereNeeded, with_syncer(broken.Presumptuous, STEPS), "will hold .*, and gets"),
    (checkers.WholeWhereNeeded, with_syncer(broken.Insistent, STEPS), "once more"),
    (
        checkers.StateRoundTrip,
        with_syncer(broken.ForgetsRounds, replace(FAILOVER, seed=3)),
        "in a restored machine to|is back as",
    ),
    (checkers.BudgetHolds, with_syncer(broken.Overbooking, TOKENS), "closes with"),
    (checkers.BudgetHolds, with_syncer(broken.Premature, TOKENS), "the run ends at global step .* not 400000"),
    (checkers.BudgetHolds, with_syncer(broken.Generous, TOKENS), "merged tokens, merged are"),
    (checkers.BudgetHolds, with_learner(broken.Wavering, TOKENS), "goes back from step"),
    (checkers.BudgetHolds, with_learner(broken.Hasting), "trains at step 1 of the schedule"),
    (checkers.SlicesLoseLittle, with_learner(Rigid, SLICES), "samples, expected"),
    (checkers.EverybodyTrains, with_learner(broken.Hesitant, replace(SCENARIO, total_steps=600)), "is recovering for"),
    (checkers.RoundsAdvance, with_syncer(Deaf, QUORUM), "no round closed for"),
    (
        checkers.RoundsAdvance,
        with_learner(Stubborn, replace(SCENARIO, learners=1, faults=())),
        "these never heard of it",
    ),
    (
        checkers.VersionsConverge,
        {
            "scenario": replace(SCENARIO, total_steps=400),
            "make_syncer": broken.having(broken.Unhelpful, broken.Partial),
        },
        "island-3 ends with version",
    ),
]


@pytest.mark.parametrize(("checker", "arguments", "text"), BROKEN)
def test_a_broken_machine_is_caught(checker: type[Checker], arguments: dict[str, Any], text: str) -> None:
    verdict = judge(**arguments, checkers=[checker])
    assert verdict.problem.startswith(f"Violation: {checker.__name__} at "), verdict
    assert re.search(text, verdict.problem), verdict


@pytest.mark.parametrize(
    "scenario",
    [
        SCENARIO,
        QUORUM,
        LOCKSTEP,
        WAITS,
        FEW_TURNS,
        PERIODS,
        FAILOVER,
        RECOVERY,
        POISON,
        STEPS,
        HOSTILE,
        MUTE,
        BANNED,
        BAN_AND_REWIND,
        SLICES,
        replace(SLICES, shrinks=False),
        replace(RECOVERY, load_s=3.0),
        replace(SCENARIO, merge_s=2.0),
    ],
)
def test_the_real_machines_pass(scenario: Scenario) -> None:
    verdict: Verdict = judge(scenario)
    assert not verdict.problem, verdict


def test_a_leader_that_goes_back_too_far_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_jax.sim.learner_driver.STEPS_IN_MEMORY", 8)
    verdict = judge(SLICES, checkers=[checkers.SlicesLoseLittle])
    assert re.search("SlicesLoseLittle .* island-. continues from step", verdict.problem), verdict


def test_a_slice_that_takes_its_island_along_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(driver: LearnerDriver, process: LearnerProcess, count: int, **_: Any) -> int:
        driver.kill(process, 0.02)
        driver.start()
        return count

    monkeypatch.setattr(LearnerDriver, "lose_slices", kill)
    verdict = judge(replace(SLICES, faults=SLICES.faults[:1]), checkers=[checkers.SlicesLoseLittle])
    assert re.search("SlicesLoseLittle .* island-1 lost a slice at", verdict.problem), verdict


def test_every_checker_has_a_broken_machine() -> None:
    # test_exclusions.py has the broken rules of exclusion, which are in no machine.
    assert {checker for checker, _, _ in BROKEN} == set(CHECKERS) - {checkers.ExclusionsHold}
