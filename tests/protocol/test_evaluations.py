"""Evaluations of the global model: the learners that are asked, valid answers, and the end of a run."""

import json
from math import inf, nan
from typing import Any

import pytest

from diloco_jax.protocol.effects import Drop, Effect, Evaluated, EvaluateModel, Finish, Note, Send
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.member import ACTIVE
from diloco_jax.protocol.messages import SYNCER, Evaluate, Hello, Leave, Metric, PullRequest, Score, Stop, Welcome
from diloco_jax.protocol.syncer.evaluations import EvaluationPlan, together
from diloco_jax.protocol.syncer.machine import Syncer
from tests.protocol.syncer_inputs import hello, merged, new, only, report, sent, value
from tests.protocol.test_learner import fragment, step, trained

WAIT_S = 50.0
STOP = Stop(1, "run complete")


def score(name: str, number: int, versions: tuple[int, ...] = (0, 1, 0, 0), **changed: Any) -> Score:
    return Score(name, 1, number, 1, versions, 2.0, 3.0, 64, (), 0.5, "")._replace(**changed)


def asked(*names: str, total_steps: int = 1, every: int = 0) -> tuple[Syncer, list[Effect]]:
    """Return the machine, and the effects of the merge of round 1, behind which an evaluation is due."""
    syncer = new(total_steps, quorum=len(names))
    syncer.evaluations.plan, syncer.evaluations.next_step = EvaluationPlan(WAIT_S, every), every
    for name in names:
        syncer.on_message(hello(name), 0.0)
    for name in names:
        syncer.on_message(report(name, 1), 1.0)
    for name in names:
        syncer.on_message(value(name, 1, 1, 1), 2.0)
    return syncer, merged(syncer, 1, 3.0)


def test_one_stays_to_evaluate_the_final_model_and_all_others_stop() -> None:
    syncer, effects = asked("a", "b", "c")
    whom = {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Evaluate | Stop)}
    assert whom == {"a": Evaluate(1, (0, 1, 0, 0)), "b": STOP, "c": STOP}
    assert syncer.finished and not syncer.over and not only(effects, Finish)
    assert syncer.on_message(report("a", 2), 4.0) == [] and sent(syncer.on_message(report("b", 2), 4.0), "b") == [STOP]
    assert syncer.waiting_for(4.0) == "the evaluation of the final model, by a"
    again = new(1, quorum=3)
    again.restore(json.loads(json.dumps(syncer.state())))
    answer = score("a", 1, scores=(Metric("books loss", 1.5),))
    effects = syncer.on_message(answer, 5.0)
    assert (
        only(effects, Evaluated) == [Evaluated(answer)]
        and sent(effects, "a") == [STOP]
        and effects[-1:] == [Finish("run complete")]
    )
    assert syncer.over and again.on_message(answer, 5.0) == effects


def test_an_expulsion_in_the_last_merge_ends_the_run_only_after_the_new_version() -> None:
    """Round 2 waits only for the learner that the merge of round 1 expels."""
    syncer = new(2, quorum=2, overlap_steps=2, strikes_max=1)
    syncer.evaluations.plan = EvaluationPlan(WAIT_S)
    for name in "ab":
        syncer.on_message(hello(name), 0.0)
    for number in (1, 2):
        for name in "ab":
            syncer.on_message(report(name, number), float(number))
    for name in "ab":
        syncer.on_message(value(name, 1, 1, 1), 3.0)
    syncer.on_message(value("b", 2, 2, 2, steps=0), 3.0)
    assert {number: [*round_.asked] for number, round_ in syncer.rounds.flying.items()} == {1: [], 2: ["a"]}
    effects = merged(syncer, 1, 4.0, excluded=("a",))
    assert sent(effects, "b")[-1] == Evaluate(1, (0, 1, 0, 0)) and syncer.finished
    assert sum(isinstance(effect, Send) and isinstance(effect.message, Evaluate) for effect in effects) == 1


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308])
def test_losses_of_any_finite_size_are_averaged(loss: float) -> None:
    scores = {name: score(name, 1, loss=loss, bits_per_byte=abs(loss)) for name in "abc"}
    found = together(scores, [])
    assert abs(found.loss) > 1e308 and found.bits_per_byte > 1e308


def test_a_learner_that_returns_to_a_complete_run_only_gets_stop() -> None:
    """So it does not compile for a run that has no step left."""
    syncer, _ = asked("a", "b")
    syncer.on_message(score("a", 1), 4.0)
    assert syncer.over
    syncer.on_message(Leave("b", 1, "run complete"), 4.0)
    effects = syncer.on_message(hello("b", 2), 5.0)
    assert sent(effects, "b") == [STOP] and only(effects, Note)[-1].kind == "joined"
    syncer, _ = asked("a", "b")
    syncer.on_disconnect("a", 1, "killed", 4.0)
    syncer.on_disconnect("b", 1, "killed", 4.0)
    kinds = [type(message) for message in sent(syncer.on_message(hello("b", 2), 5.0), "b")]
    assert kinds[0] is Welcome and kinds[-1] is Evaluate, "it is to evaluate the final model"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"loss": nan}, "a: its loss is not finite"),
        ({"loss": inf, "reason": "no held-out data"}, "a: no held-out data"),
        ({"versions": (0, 0, 0, 0)}, "a: it holds other versions than the final ones"),
        ({"versions": (0, 1)}, "a: it holds other versions than the final ones"),
        ({"tokens": 0}, "a: a loss of 2.0 over 0 tokens is impossible"),
        ({"scores": (Metric("x" * 129, 1.0),)}, "a: 1 scores, or the length of a name, is more than is allowed"),
        ({"scores": (Metric("x", 1.0),) * 257}, "a: 257 scores, or the length of a name, is more than is allowed"),
    ],
)
def test_a_useless_score_is_reported_and_not_used(changed: dict[str, Any], problem: str) -> None:
    syncer, _ = asked("a")
    effects = syncer.on_message(score("a", 1, **changed), 5.0)
    assert not only(effects, Evaluated) and [n.reason for n in only(effects, Note)] == [problem]
    assert syncer.over and syncer.evaluations.reason == problem and only(effects, Finish)


def test_scores_that_nobody_waits_for_are_dropped() -> None:
    syncer, _ = asked("a", "b", total_steps=9, every=1)
    for stale in (score("a", 0), score("b", 1), score("a", 1, incarnation=2)):
        assert [type(effect) for effect in syncer.on_message(stale, 4.0)] == [Drop]
    assert only(syncer.on_message(score("a", 1), 5.0), Evaluated)
    assert [type(effect) for effect in syncer.on_message(score("a", 1), 6.0)] == [Drop], "told twice"


def test_another_is_asked_when_one_is_gone_silent_too_slow_or_wrong() -> None:
    syncer, effects = asked("a", "b", "c", "d", total_steps=9, every=1)
    assert sent(effects, "a")[-1] == Evaluate(1, ())
    assert sent(syncer.on_message(score("a", 1, loss=nan), 4.0), "b") == [Evaluate(2, ())]
    assert sent(syncer.on_message(Leave("b", 1, "preempted"), 5.0), "c") == [Evaluate(3, ())]
    assert sent(syncer.on_tick(8.0), "c") == [Evaluate(3, ())], "asked again, in case that it was lost"
    effects = [e for now_s in (20.0, 5.0 + WAIT_S) for e in syncer.on_tick(now_s)]
    assert "unevaluated" in [note.kind for note in only(effects, Note)], "three attempts, and d is spared"
    assert not syncer.evaluations.open and not syncer.finished


def test_turns_are_fair_and_those_that_lag_behind_come_last() -> None:
    syncer, _ = asked("a", "b", "c", total_steps=99, every=1)
    ranks: list[str] = []
    for number in range(1, 7):
        ranks.append(*syncer.evaluations.asked)
        syncer.on_message(score(ranks[-1], number), 4.0)
        syncer.progress.global_step += 5
        for name in "ab":
            syncer.membership.members[name].global_step = syncer.global_step
        syncer.evaluations.on_merged(5.0)
    assert ranks == ["a", "b", "a", "b", "a", "b"]


def test_the_last_learner_may_come_back_and_in_the_end_nobody_is_waited_for() -> None:
    syncer, _ = asked("a", "b")
    syncer.on_message(Leave("b", 1, "run complete"), 4.0)
    assert not only(syncer.on_disconnect("a", 1, "killed", 5.0), Finish) and not syncer.over
    effects = syncer.on_message(hello("a", 2, (-1, -1, -1, -1)), 6.0)
    assert sent(effects, "a")[-1] == Evaluate(2, (0, 1, 0, 0)), "behind the fragments that it lacks"
    syncer.on_disconnect("a", 2, "killed", 7.0)
    assert syncer.next_deadline_s() is not None and syncer.on_restart((0, 1, 0, 0), syncer.digests, 8.0)
    syncer.on_tick(8.0 + WAIT_S - 1)
    assert not syncer.over
    effects = syncer.on_tick(8.0 + WAIT_S)
    assert only(effects, Finish) and syncer.over and "nobody came back" in syncer.evaluations.reason


def test_what_a_dead_syncer_had_asked_for_is_asked_for_again_after_the_next_merge() -> None:
    syncer, _ = asked("a", "b", total_steps=99, every=1)
    syncer.on_restart(syncer.versions, syncer.digests, 5.0)
    assert not syncer.evaluations.open
    for name in "ab":
        syncer.membership.members[name].state = ACTIVE
    syncer.evaluations.on_merged(6.0)
    assert syncer.evaluations.open and syncer.evaluations.next_step > syncer.global_step


def test_a_run_that_nobody_can_evaluate_ends_at_once() -> None:
    syncer, _ = asked("a", total_steps=2)
    syncer.membership.members["a"].evaluates = False
    syncer.progress.finished = True
    syncer.evaluations.conclude(4.0)
    assert only(syncer.evaluations.effects, Finish) and syncer.over and not syncer.evaluations.reason


def test_a_learner_evaluates_between_two_steps_and_does_nothing_else() -> None:
    learner = trained(steps=1)
    mailbox: Mailbox[None] = Mailbox(learner)
    assert mailbox.arrive(Evaluate(4, ()), None, 2.0) is None, "not while a step runs"
    given = mailbox.take(2.0)
    assert given is not None and given.effects == [EvaluateModel(4, learner.global_step, final=False)]
    mailbox.read(fragment(1, 1, 1), None, 2.0)
    assert not learner.may_step() and mailbox.take(2.0) is None and learner.answer(PullRequest(1, 1, 1), 2.0)
    found = Score("", 0, 0, 0, (), 2.0, nan, 64, (), 0.5, "")
    told = found._replace(learner_id="a", incarnation=1, number=4, versions=(0,) * 4)
    (answer,) = learner.on_evaluated(found, 3.0)
    assert repr(answer) == repr(Send(SYNCER, told._replace(global_step=learner.global_step)))
    assert learner.may_step() and learner.on_message(Evaluate(4, ()), 4.0) == [answer], "the same answer again"
    step(learner, 5.0)


def test_a_request_that_is_repeated_while_it_waits_or_runs_has_one_answer() -> None:
    learner = trained(steps=1)
    mailbox: Mailbox[None] = Mailbox(learner)
    for now_s in (2.0, 4.0):
        assert mailbox.arrive(Evaluate(4, ()), None, now_s) is None
    assert mailbox.take(5.0) is not None and learner.examination.running
    assert mailbox.arrive(Evaluate(4, ()), None, 8.0) is None
    (answer,) = learner.on_evaluated(Score("", 0, 0, 0, (), 2.0, nan, 64, (), 0.5, ""), 9.0)
    assert isinstance(answer, Send) and mailbox.take(9.0) is None, "the syncer would drop a second answer"
    mailbox.arrive(Evaluate(4, ()), None, 10.0)
    again = mailbox.take(10.0)
    assert again is not None and again.effects == [answer], "the answer may have been lost"


def test_a_learner_waits_for_the_final_model_and_makes_no_step_after_it() -> None:
    learner = trained(steps=1)
    wanted = Evaluate(7, (0, 1, 0, 0))
    assert learner.on_message(wanted, 2.0) == [] and learner.may_step()
    assert [type(effect) for effect in learner.on_message(wanted, 3.0)] == [Send], "it asks for what is missing"
    assert learner.on_message(fragment(1, 1, 1), 4.0)[-1] == EvaluateModel(7, 1, final=True)
    learner.on_evaluated(score("", 0), 5.0)
    assert not learner.may_step()
    learner.on_message(Welcome(1, (0, 1, 0, 0), 2), 6.0)
    assert learner.may_step(), "the syncer died, and may have lost the end of the run"


def test_a_lost_greeting_is_repeated_after_the_final_evaluation_though_no_step_follows() -> None:
    learner = trained(steps=1)
    learner.on_message(Evaluate(7, (0, 1, 0, 0)), 2.0)
    learner.on_message(fragment(1, 1, 1), 4.0)
    learner.on_evaluated(score("", 0), 5.0)
    learner.on_disconnected(6.0)
    assert [type(effect.message) for effect in only(learner.on_connected(7.0), Send)] == [Hello]
    deadline_s = 7.0 + learner.contact.config.resend_s
    sent_again = [type(effect.message) for effect in only(learner.on_tick(deadline_s), Send)]
    assert sent_again.count(Hello) == 1, (
        "otherwise the syncer would drop every heartbeat, and never say that the run is over"
    )
