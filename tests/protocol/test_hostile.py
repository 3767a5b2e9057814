"""A peer may send anything: it is refused or dropped with the reason, and nothing changes for the others.

The whole fuzz: ./scripts/sweep --hostile --count 400
"""

import json
import math
import typing
from typing import Any

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.bounds import FRAGMENTS_MAX, STEP_SAMPLES_MAX, objection, without_value
from diloco_jax.protocol.effects import Drop, Effect, Send
from diloco_jax.protocol.leases import ORDER_MAX, LeaseBook
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.matchmaker import AVOIDED_MAX, Matchmaker
from diloco_jax.protocol.syncer.tape import TapedSyncer, replay
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.sim.hostile import FLOATS, NUMBERS, TEXTS, Hostile
from diloco_jax.sim.invariants import all as checkers
from diloco_jax.sim.invariants import draw
from diloco_jax.sim.invariants.verdict import judge
from diloco_jax.transport.wire import pack_body
from tests.protocol.syncer_inputs import hello, leases, merged, new, only, report, running, sent, value

# These seeds include rewinds and crashes of the syncer.
SEEDS = (0, 1, 7, 13)
KINDS: tuple[Any, ...] = typing.get_args(m.LearnerMessage)
SAID: tuple[Any, ...] = (
    hello("c"),
    report("c", 2, arrived=(m.Arrived(0, 0, 0.1),)),
    value("c", 1, 1, 1),
    m.AnchorValue("c", 1, 0, 0, 0, 8),
    m.Score("c", 1, 1, 0, (0,) * 4, 2.0, 3.0, 64, (m.Metric("accuracy", 0.5),), 0.5, ""),
    m.StateRequest("c", 1, 0, "", 0, 0),
    m.StateChunk("c", 1, "a", 3, 0, 2, 9, 8),
    m.StateRefused("c", 1, "a", "no"),
    m.StateDone("c", 1, ""),
    m.Heartbeat("c", 1),
    m.Leave("c", 1, "bye"),
)


def of_three() -> Syncer:
    syncer = running("a", "b", quorum=2)
    syncer.on_message(hello("c"), 1.0)
    return syncer


def check_sendable(effects: list[Effect]) -> None:
    for effect in effects:
        if isinstance(effect, Send):
            pack_body(effect.message)


@pytest.mark.parametrize("seed", SEEDS)
def test_others_train_on_beside_a_hostile_learner(seed: int) -> None:
    scenario = draw.random_scenario(seed, hostile=True)
    assert any(fault.kind == "hostile" for fault in scenario.faults)
    verdict = judge(scenario)
    assert not verdict.problem, verdict


def test_old_seeds_draw_what_they_drew() -> None:
    for seed in range(12):
        plain, forced = draw.random_scenario(seed), draw.random_scenario(seed, hostile=True)
        faults = [fault for fault in forced.faults if fault.kind != "hostile"]
        assert faults == [fault for fault in plain.faults if fault.kind != "hostile"]
    assert checkers.HostileIsHarmless in checkers.CHECKERS


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in SAID} == set(KINDS)
    assert not any(objection(message) for message in SAID)


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_any_value_in_any_field_is_data(message: Any) -> None:
    """Each field takes each extreme; a value out of bounds changes nothing and leaves no line on the tape."""
    hints = typing.get_type_hints(type(message))
    for name, hint in hints.items():
        if name in ("learner_id", "incarnation"):
            continue
        extremes: Any = {int: NUMBERS, float: FLOATS, str: TEXTS, bool: (True,)}.get(hint)
        for extreme in extremes if extremes is not None else ((), getattr(message, name) * 5000):
            lines: list[str] = []
            syncer = of_three()
            taped, before = TapedSyncer(syncer, lines.append), json.dumps(syncer.state())
            said = message._replace(**{name: extreme})
            effects = taped.on_message(said, 2.0)
            check_sendable(effects)
            if objection(said) and without_value(said) is not None:
                assert only(effects, Drop) and len(lines) == 1, "an answer that holds nothing"
            elif objection(said):
                assert only(effects, Drop) and json.dumps(syncer.state()) == before and not lines
                assert not any(isinstance(e, Send) and not isinstance(e.message, m.Refuse) for e in effects)
            other = of_three()
            for replayed in replay(lines, other):
                assert repr(replayed) == repr(effects)
            assert json.dumps(other.state()) == json.dumps(syncer.state())
            check_sendable(syncer.on_tick(3.0))


def test_a_value_out_of_bounds_is_an_answer_that_holds_nothing() -> None:
    """Its round does not wait for another one, and the tape tells the same."""
    syncer, lines = running("a", "b", "c"), list[str]()
    taped, this = TapedSyncer(syncer, lines.append), syncer.rounds.flying[1]
    assert "c" in this.asked
    copy = running("a", "b", "c")
    copy.restore(json.loads(json.dumps(syncer.state())))
    lie = value("c", this.global_step, this.fragment_id, this.asked["c"])._replace(steps=1 << 60)
    effects = taped.on_message(lie, 3.0)
    assert any(isinstance(each, Drop) for each in effects) and "c" not in this.asked
    for _ in replay(lines, copy):
        pass
    assert len(lines) == 1 and copy.state() == syncer.state()
    other = value("c", 1 << 60, 0, 1)
    assert taped.on_message(other, 3.0) and len(lines) == 1, "an answer to no round leaves no trace"


@pytest.mark.parametrize("seed", range(8))
def test_made_up_messages_leave_rounds_alone(seed: int) -> None:
    """Two honest learners make a round after each message of a hostile third."""
    syncer, hostile = of_three(), Hostile(seed)
    rounds = 0
    held = [m.Adopted(0)] * 4
    for step in range(1, 60):
        now_s = float(step)
        for _ in range(4):
            check_sendable(syncer.on_message(hostile.made_up("c", 1, SAID[0]), now_s))
        for name in ("a", "b"):
            check_sendable(syncer.on_message(report(name, step, tuple(held)), now_s))
        for this in list(syncer.rounds.flying.values()):
            for name in ("a", "b"):
                if name in this.asked and this.phase == "pulling":
                    base, asked = held[this.fragment_id], this.asked[name]
                    counters = {"steps": asked - base.local_step, "tokens": 10 * (asked - base.local_step)}
                    answer = value(name, this.global_step, this.fragment_id, asked, **counters)
                    check_sendable(syncer.on_message(answer._replace(base_version=base.version), now_s))
            if this.phase == "merging":
                merged(syncer, this.global_step, now_s)
                held[this.fragment_id] = m.Adopted(this.global_step, step, 10 * step)
                rounds += 1
        syncer.on_tick(now_s)
    assert rounds > 15 and not syncer.finished and syncer.global_step < 100
    assert syncer.membership.members["a"].state == "active"


@pytest.mark.parametrize("step_samples", [-1, STEP_SAMPLES_MAX + 1, 1 << 62])
def test_a_greeting_out_of_bounds_is_refused_and_moves_nobodys_data(step_samples: int) -> None:
    syncer = running("a")
    (refusal,) = sent(syncer.on_message(hello("evil", step_samples=step_samples), 2.0), "evil")
    assert isinstance(refusal, m.Refuse) and str(step_samples) in refusal.reason and "again" in refusal.reason
    assert "evil" not in syncer.membership.members
    (lease, *_) = leases(syncer.on_message(hello("b"), 3.0), "b")
    assert lease.stop <= 2_000_000


def test_a_huge_incarnation_does_not_lock_a_name() -> None:
    syncer = new()
    (refusal,) = sent(syncer.on_message(hello("a", 1 << 62), 0.0), "a")
    assert isinstance(refusal, m.Refuse) and "incarnation" in refusal.reason
    assert isinstance(sent(syncer.on_message(hello("a", 1), 1.0), "a")[0], m.Welcome)


def test_numbers_of_samples_end_before_messages_cannot_carry_them() -> None:
    book = LeaseBook(1)
    book.open("a", ORDER_MAX - 5)
    (lease,) = book.grant("a", 5)
    assert lease.first_sample + 5 == ORDER_MAX and book.grant("a", 1) == []
    pack_body(lease)


def test_reasons_name_value_bounds_and_remedy() -> None:
    wrong = report("a", 1)._replace(step_s=math.nan)
    assert objection(wrong) == (
        "StepReport.step_s of 'a' is nan, which is impossible: allowed is 0.0 to 1000000000.0; it is damaged, or its "
        "sender is another program: start that learner again"
    )
    assert "has 16385 elements" in objection(hello("a", versions=(0,) * (FRAGMENTS_MAX + 1)))
    assert "another type" in objection(report("a", 1)._replace(tokens="x"))
    assert not objection(report("a", 1)._replace(loss=math.nan)), "of a model that diverges"


def test_statistics_do_not_count_what_the_machine_drops() -> None:
    syncer = running("a")
    stats = RunStats(("a",), 10, syncer)
    assert not stats.on_report(report("a", 2)._replace(step_s=1e308), 2.0) and stats.on_report(report("a", 2), 2.0)


def test_failures_of_donors_are_remembered_up_to_a_bound() -> None:
    syncer = of_three()
    matches: Matchmaker = syncer.matches
    for _ in range(2 * AVOIDED_MAX):
        syncer.on_message(m.StateRequest("c", 1, 0, "", 0, 0), 2.0)
        donor = matches.donor_of("c")
        syncer.on_message(m.StateRefused(donor, 1, "c", "no"), 2.0)
    assert len(matches.state()["avoided"][0][1]) == AVOIDED_MAX


def test_a_part_beyond_the_last_is_not_passed_on() -> None:
    syncer = of_three()
    syncer.on_message(m.StateRequest("c", 1, 0, "", 0, 0), 2.0)
    donor = syncer.matches.donor_of("c")
    part = m.StateChunk(donor, 1, "c", 3, 0, 2, 9, 8)
    assert sent(syncer.on_message(part, 2.0), "c") == [part]
    (drop,) = syncer.on_message(part._replace(part=2), 2.0)
    assert drop == Drop(donor, "part 2 of 2 of a state is impossible")
