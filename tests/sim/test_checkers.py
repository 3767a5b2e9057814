"""Every checker catches the machine that breaks its rule, and passes the machine that does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from diloco_jax.protocol.learner import STOPPED, TRAINING, Learner
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Adopted,
    Drop,
    Effect,
    FragmentValue,
    GlobalFragment,
    Merge,
    PullRequest,
    Send,
    SyncerMessage,
    Unstage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.sim import checkers
from diloco_jax.sim.checkers import CHECKERS, Checker
from diloco_jax.sim.faults import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.verdict import Verdict, judge

CONFIG = ProtocolConfig(
    sync_every=4, num_fragments=4, overlap_steps=2, lease_s=4.0, heartbeat_s=1.0, resend_s=0.5, pull_timeout_s=5.0
)
NETWORK = NetworkOptions(loss=0.05, duplication=0.1, reorder=0.1, reorder_s=3.0, late=0.5, heals_s=40.0)
SCENARIO = Scenario(
    config=CONFIG,
    learners=4,
    total_steps=200,
    network=NETWORK,
    faults=(
        Fault(12.0, "crash", ("island-1",), 6.0, notice_s=0.02),
        Fault(15.0, "disconnect", ("island-0",), 3.0, notice_s=0.02),
        Fault(25.0, "crash", ("island-2",), 3.0),
    ),
    seed=1,
)
QUORUM = replace(SCENARIO, config=replace(CONFIG, quorum=3))
ONE_FRAGMENT = replace(SCENARIO, config=replace(CONFIG, num_fragments=1, sync_every=1, overlap_steps=3))
LOCKSTEP = replace(SCENARIO, config=replace(CONFIG, overlap_steps=0, quorum=3))


class Forgetful(Learner):
    """Adopts whatever arrives, newer or not."""

    def on_global(self, message: GlobalFragment, now_s: float) -> list[Effect]:
        adopted = list(self.adopted)
        adopted[message.fragment_id] = adopted[message.fragment_id]._replace(version=NO_VERSION)
        self.adopted = tuple(adopted)
        return super().on_global(message, now_s)


class Inventive(Syncer):
    """Broadcasts versions that nobody made."""

    def _global(self, *args: Any) -> Send:
        send = super()._global(*args)
        assert isinstance(send.message, GlobalFragment)
        return send._replace(message=send.message._replace(version=send.message.version + 1))


class MergesTwice(Syncer):
    """Asks for the same merge again when somebody leaves meanwhile."""

    def on_disconnect(self, *args: Any) -> list[Effect]:
        effects = super().on_disconnect(*args)
        for this in self._rounds.values():
            if this.phase == "merging":
                effects.append(Merge(this.global_step, this.fragment_id, tuple(this.values.values())))
        return effects


class CountsStepsTwice(Syncer):
    """Forgets what it has merged of whom, and asks for old steps."""

    def _close(self, *args: Any) -> None:
        super()._close(*args)
        for member in self.membership.members.values():
            member.used_step = 0
            member.merged_base.clear()


class Idle(Learner):
    """Sends values that hold no step of its own."""

    def _value(self, *args: Any) -> Send:
        send = super()._value(*args)
        assert isinstance(send.message, FragmentValue)
        return send._replace(message=send.message._replace(steps=0, tokens=0))


class Credulous(Syncer):
    """Believes in values without steps, and hides it from the merge's own count."""

    def on_value(self, message: FragmentValue, now_s: float) -> list[Effect]:
        effects = super().on_value(message._replace(steps=message.steps or 1, tokens=message.tokens or 1), now_s)
        return [_with_steps(e, message.steps) if isinstance(e, Merge) else e for e in effects]


def _with_steps(merge: Merge, steps: int) -> Merge:
    return merge._replace(parts=tuple(part._replace(steps=steps, tokens=steps) for part in merge.parts))


class Hoarder(Syncer):
    """Never says that a value was not used, so its payload stays."""

    def on_value(self, message: FragmentValue, now_s: float) -> list[Effect]:
        return [e for e in super().on_value(message, now_s) if not isinstance(e, Drop)]


class Hasty(Syncer):
    """Closes a round with whoever is there."""

    def __init__(self, config: ProtocolConfig, *args: Any) -> None:
        super().__init__(replace(config, quorum=1), *args)


class CountsTwice(Syncer):
    """Counts a step in every round, until the next one is reported."""

    def _close(self, *args: Any) -> None:
        super()._close(*args)
        for member in self.membership.members.values():
            member.used_step = 0


class Polite(Learner):
    """Waits for the fragment it was asked for, although steps overlap."""

    waits = False

    def may_step(self) -> bool:
        return super().may_step() and not self.waits

    def on_pull(self, message: PullRequest, now_s: float) -> list[Effect]:
        self.waits = True
        return super().on_pull(message, now_s)

    def on_global(self, message: GlobalFragment, now_s: float) -> list[Effect]:
        self.waits = False
        return super().on_global(message, now_s)


class Eager(Learner):
    """Trains as soon as it is welcome, on its own initial values."""

    def on_welcome(self, message: Welcome, now_s: float) -> list[Effect]:
        effects = super().on_welcome(message, now_s)
        self.adopted = tuple(a if a.version >= 0 else Adopted(0) for a in self.adopted)
        self._train()
        return effects


class Crowded(Syncer):
    """Lets more rounds overlap than the configuration says."""

    def __init__(self, config: ProtocolConfig, *args: Any) -> None:
        super().__init__(replace(config, overlap_steps=config.overlap_steps + 2), *args)


class Impatient(Syncer):
    """Opens a round of a fragment that is still in flight."""

    def _open(self, effects: list[Effect], now_s: float) -> bool:
        fragments = {this.global_step: this.fragment_id for this in self._rounds.values()}
        for this in self._rounds.values():
            this.fragment_id = -2
        opened = super()._open(effects, now_s)
        for step, fragment_id in fragments.items():
            self._rounds[step].fragment_id = fragment_id
        return opened


class Leaky(Learner):
    """Never frees a copy."""

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        self._staged.pop(fragment_id, None)


class FreesTwice(Learner):
    """Frees its copies once more."""

    def _unstage(self, fragment_id: int, effects: list[Effect]) -> None:
        super()._unstage(fragment_id, effects)
        effects += [effect for effect in effects if isinstance(effect, Unstage)]


class SendsUnstaged(Learner):
    """Promises a copy that it does not hold."""

    def on_pull(self, message: PullRequest, now_s: float) -> list[Effect]:
        effects = super().on_pull(message, now_s)
        return [
            e._replace(message=e.message._replace(local_step=e.message.local_step + 1))
            if isinstance(e, Send) and isinstance(e.message, FragmentValue)
            else e
            for e in effects
        ]


class Moody(Syncer):
    """Decides by something that is no input."""

    moods = count()

    def grace_s(self) -> float:
        return 0.1 * (next(self.moods) % 7)


class Deaf(Syncer):
    """Never repeats a pull and never gives one up."""

    def on_tick(self, now_s: float) -> list[Effect]:
        for this in self._rounds.values():
            this.resend_s = this.expires_s = now_s + 1000.0
        return super().on_tick(now_s)


class Stubborn(Learner):
    """Does not hear that the run is complete."""

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        effects = super().on_message(message, now_s)
        if self.state == STOPPED:
            self.state = TRAINING
            return []
        return effects


class Partial(Syncer):
    """Forgets one member in its broadcasts, and does not hear it complain."""

    def on_merged(self, global_step: int, now_s: float) -> list[Effect]:
        effects = super().on_merged(global_step, now_s)
        return [e for e in effects if not (isinstance(e, Send) and _forgotten(e))]

    def _repair(self, *args: Any) -> None:
        pass


def _forgotten(send: Send) -> bool:
    return send.peer == "island-3" and isinstance(send.message, GlobalFragment)


def with_learner(make: Callable[..., Learner], scenario: Scenario = SCENARIO) -> dict[str, Any]:
    return {"scenario": scenario, "make_learner": make}


def with_syncer(make: Callable[..., Syncer], scenario: Scenario = SCENARIO) -> dict[str, Any]:
    return {"scenario": scenario, "make_syncer": make}


BROKEN = [
    (checkers.VersionsGrow, with_learner(Forgetful), "island-. adopts version"),
    (checkers.VersionsGrow, with_syncer(Inventive), "which nobody made"),
    (checkers.MergedOnce, with_syncer(MergesTwice, replace(SCENARIO, merge_s=2.0)), "is merged twice"),
    (checkers.MergedOnce, with_syncer(CountsStepsTwice), "is merged twice"),
    (checkers.MergedOnce, {**with_learner(Idle), "make_syncer": Credulous}, "has no step in round"),
    (checkers.MergedOnce, with_syncer(Hoarder), "payload"),
    (checkers.QuorumHolds, with_syncer(Hasty, QUORUM), "the quorum is 3"),
    (checkers.QuorumHolds, with_syncer(CountsTwice), "counted was"),
    (checkers.NeverWaits, with_learner(Polite), "holds every fragment but does not step"),
    (checkers.FreshLearnersKeepQuiet, with_learner(Eager), "steps, but holds . of 4 fragments"),
    (checkers.RoundsBounded, with_syncer(Crowded), "rounds are in flight, limit 2"),
    (
        checkers.RoundsBounded,
        with_syncer(
            Impatient, replace(SCENARIO, config=replace(CONFIG, num_fragments=1, sync_every=1, overlap_steps=3))
        ),
        "is in flight twice",
    ),
    (checkers.CopiesBounded, with_learner(Leaky), "holds . copies of one fragment"),
    (checkers.CopiesBounded, with_learner(FreesTwice), "frees what it does not hold"),
    (checkers.CopiesBounded, with_learner(SendsUnstaged), "but holds copies of steps"),
    (checkers.TapeReplays, with_syncer(Moody), "line .* led to .*, when replayed to"),
    (checkers.RoundsAdvance, with_syncer(Deaf, QUORUM), "no round closed for"),
    (checkers.RoundsAdvance, with_learner(Stubborn, replace(SCENARIO, faults=())), "these never heard of it"),
    (checkers.VersionsConverge, with_syncer(Partial), "island-3 ends with version"),
]


@pytest.mark.parametrize(("checker", "arguments", "text"), BROKEN)
def test_a_broken_machine_is_caught(checker: type[Checker], arguments: dict[str, Any], text: str) -> None:
    verdict = judge(**arguments, checkers=[checker])
    assert verdict.problem.startswith(f"Violation: {checker.__name__} at "), verdict
    assert re.search(text, verdict.problem), verdict


@pytest.mark.parametrize("scenario", [SCENARIO, QUORUM, LOCKSTEP, replace(SCENARIO, merge_s=2.0)])
def test_the_real_machines_pass(scenario: Scenario) -> None:
    verdict: Verdict = judge(scenario)
    assert not verdict.problem, verdict


def test_every_checker_has_a_broken_machine() -> None:
    assert {checker for checker, _, _ in BROKEN} == set(CHECKERS)
