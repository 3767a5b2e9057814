"""Corpora of single islands: separate leases, refusals, evaluations on each, and what older releases wrote."""

import json
from typing import Any

import pytest

from diloco_jax.protocol.corpora import CORPORA_MAX, Corpora, Corpus
from diloco_jax.protocol.effects import Drop, Evaluated, Finish, Send
from diloco_jax.protocol.leases import COMMON
from diloco_jax.protocol.messages import Evaluate, Lease, Leave, Metric, Refuse, Score, Stop, Welcome
from diloco_jax.protocol.syncer.evaluations import EvaluationPlan
from diloco_jax.protocol.syncer.machine import Syncer
from tests.protocol.syncer_inputs import LEASED, hello, leases, merged, new, only, report, sent, value

FRENCH: dict[str, Any] = {"corpus": "french", "content": "9 tokens", "corpus_samples": 400, "tokenizer": "t"}
GERMAN = FRENCH | {"corpus": "german", "content": "7 tokens"}
WAIT_S = 50.0


def refused(syncer: Syncer, *words: str, **changed: Any) -> None:
    """Check that a learner with this greeting is refused, and that nothing else happens."""
    (refusal,) = sent(syncer.on_message(hello("z", **changed), 1.0), "z")
    assert isinstance(refusal, Refuse) and all(word in refusal.reason for word in words), refusal


def test_each_corpus_has_an_order_of_its_own() -> None:
    syncer = new()
    for name, corpus in (("a", FRENCH), ("b", GERMAN), ("c", FRENCH), ("d", {})):
        effects = syncer.on_message(hello(name, **corpus), 0.0)
        first = LEASED if name == "c" else 0
        assert leases(effects, name) == [Lease(0, first, first + LEASED)]
    fates = {name: tuple(book.fates) for name, book in syncer.leases.books.items()}
    one = (LEASED, 0, 0, 0, LEASED)
    assert fates == {COMMON: one, "german": one, "french": (2 * LEASED, 0, 0, 0, 2 * LEASED)}
    assert tuple(syncer.leases.fates) == (4 * LEASED, 0, 0, 0, 4 * LEASED)
    # What a leaves goes to the next island with the same corpus, and to no other.
    syncer.on_message(Leave("a", 1, "drained"), 1.0)
    assert leases(syncer.on_message(hello("e", **GERMAN), 2.0), "e") == [Lease(0, LEASED, 2 * LEASED)]
    assert leases(syncer.on_message(hello("f", **FRENCH), 2.0), "f") == [Lease(0, 0, LEASED)]


def test_a_learner_may_return_with_another_corpus() -> None:
    syncer = new()
    syncer.on_message(hello("a", **FRENCH), 0.0)
    assert leases(syncer.on_message(hello("a", 2, **GERMAN), 1.0), "a") == [Lease(0, 0, LEASED)]
    assert not syncer.leases.of("french").holdings and syncer.leases.of("french").pool == [(0, LEASED)]
    (refusal,) = sent(syncer.on_message(hello("a", 2, **FRENCH), 2.0), "a")
    assert isinstance(refusal, Refuse) and "before with 'german'" in refusal.reason


def test_merges_settle_samples_of_every_corpus() -> None:
    """One fragment takes values of both islands; both corpora have one merged sample."""
    syncer = new(quorum=2, sync_every=1, num_fragments=1)
    for name, corpus in (("a", FRENCH), ("b", GERMAN)):
        syncer.on_message(hello(name, 1, (0,), **corpus), 0.0)
    for name in "ab":
        syncer.on_message(report(name, 1, report(name, 1).adopted[:1]), 1.0)
    for name in "ab":
        syncer.on_message(value(name, 1, 0, 1), 2.0)
    merged(syncer, 1, 3.0)
    held = report("a", 2).adopted[0]._replace(version=1, local_step=1)
    syncer.on_message(report("a", 2, (held,)), 4.0)
    assert [syncer.leases.of(name).fates.merged for name in ("french", "german", COMMON)] == [1, 1, 0]


def test_what_differs_is_refused_with_a_remedy() -> None:
    syncer = new()
    syncer.on_message(hello("a", **FRENCH), 0.0)
    changed = FRENCH | {"content": "8 tokens"}
    # Nobody learns the content of a corpus by greeting with its name.
    refused(syncer, "differs from the one", "z has 8 tokens", "another name (data.corpus)", **changed)
    (known,) = sent(syncer.on_message(hello("z", **changed), 1.0), "z")
    assert isinstance(known, Refuse) and "9 tokens" not in known.reason
    refused(syncer, "stands for the corpus of the run", **GERMAN | {"corpus": "run"})
    refused(syncer, "the tokenizer differs", "is t in this run and u on z", **GERMAN | {"tokenizer": "u"})
    refused(syncer, "the tokenizer differs", **{"tokenizer": "u"})
    for name in ("two words", "x" * 65, "é", "../up"):
        refused(syncer, "is not allowed", **GERMAN | {"corpus": name})
    # A learner with a known name, or of an older release, which tells no tokenizer, joins.
    assert only(syncer.on_message(hello("b", **FRENCH | {"tokenizer": ""}), 1.0), Send)
    assert any(isinstance(m, Welcome) for m in sent(syncer.on_message(hello("c"), 1.0), "c"))


def test_learners_that_lease_nothing_make_no_books() -> None:
    """Else one learner could make a book with each incarnation."""
    syncer = new()
    for number in range(1, 6):
        syncer.on_message(hello("a", number, **FRENCH | {"corpus": f"c{number}", "step_samples": 0}), 0.0)
    syncer.on_message(Leave("a", 5, "drained"), 1.0)
    assert [*syncer.leases.books] == [COMMON] and not syncer.membership.corpora.known
    assert syncer.membership.members["a"].corpus == COMMON


def test_the_run_s_data_is_not_compared_with_a_separate_corpus() -> None:
    """The first learner must not decide what the run's corpus is, either."""
    pairs = (("corpus", ""), ("data", "{}"), ("model", "abc"))
    own = (("corpus", "separate corpus french"), ("data", "separate corpus french"), ("model", "abc"))
    syncer = Syncer(new().config, 100, pairs)
    first = hello("a", **FRENCH)._replace(fingerprint=own)
    assert any(isinstance(m, Welcome) for m in sent(syncer.on_message(first, 0.0), "a"))
    shared = hello("b")._replace(fingerprint=(("corpus", "7 tokens"), ("data", "{}"), ("model", "abc")))
    assert any(isinstance(m, Welcome) for m in sent(syncer.on_message(shared, 0.0), "b"))
    assert syncer.membership.agreed == {"corpus": "7 tokens"}
    # A syncer of an older release reads no name of a corpus, and compares.
    (refusal,) = sent(syncer.on_message(first._replace(learner_id="c", corpus="", content=""), 0.0), "c")
    assert isinstance(refusal, Refuse) and "separate corpus french" in refusal.reason


def test_the_number_of_corpora_is_limited() -> None:
    corpora = Corpora()
    for number in range(CORPORA_MAX):
        corpora.join(hello("a", **FRENCH | {"corpus": f"c{number}"}))
    assert "the limit is 1024" in corpora.refusal(hello("a", **FRENCH))
    assert corpora.refusal(hello("a", **FRENCH | {"corpus": "c7"})) == ""


def test_a_restart_keeps_every_corpus() -> None:
    syncer = new()
    for name, corpus in (("a", FRENCH), ("b", GERMAN), ("c", {})):
        syncer.on_message(hello(name, **corpus), 0.0)
    again = new()
    again.restore(json.loads(json.dumps(syncer.state())))
    # A member's loss is NaN before its first report.
    assert json.dumps(again.state()) == json.dumps(syncer.state())
    assert again.membership.corpora.known == {
        "french": Corpus("9 tokens", 400),
        "german": Corpus("7 tokens", 400),
        COMMON: Corpus("", 0),
    }
    refused(again, "the corpus 'french' differs", **FRENCH | {"content": "8 tokens"})


def evaluating(total_steps: int, every: int, **corpora: dict[str, Any]) -> tuple[Syncer, list[Any]]:
    """Return the machine and the effects of the merge of round 1, behind which an evaluation is due."""
    syncer = new(total_steps, quorum=len(corpora))
    syncer.evaluations.plan, syncer.evaluations.next_step = EvaluationPlan(WAIT_S, every), every
    for name, corpus in corpora.items():
        syncer.on_message(hello(name, **corpus), 0.0)
    for name in corpora:
        syncer.on_message(report(name, 1), 1.0)
    for name in corpora:
        syncer.on_message(value(name, 1, 1, 1), 2.0)
    return syncer, merged(syncer, 1, 3.0)


def score(name: str, number: int, loss: float, **changed: Any) -> Score:
    return Score(name, 1, number, 1, (0, 1, 0, 0), loss, 2 * loss, 64, (), 0.5, "")._replace(**changed)


def test_the_model_is_evaluated_on_each_corpus() -> None:
    """The loss of the run is the mean of the corpora, and each has its own among the scores."""
    syncer, effects = evaluating(100, 1, a=FRENCH, b=GERMAN, c=FRENCH)
    assert {e.peer: e.message for e in only(effects, Send) if isinstance(e.message, Evaluate)} == {
        "a": Evaluate(1, ()),
        "b": Evaluate(2, ()),
    }
    assert syncer.evaluations.asked == {"a": 3.0, "b": 3.0}
    assert only(syncer.on_message(score("c", 1, 1.0), 4.0), Drop)
    assert not only(syncer.on_message(score("b", 2, 3.0, scores=(Metric("books loss", 7.0),)), 4.0), Evaluated)
    (done,) = only(syncer.on_message(score("a", 1, 2.0), 5.0), Evaluated)
    assert (done.score.loss, done.score.bits_per_byte, done.score.tokens) == (2.5, 5.0, 128)
    assert dict(done.score.scores) == {
        "german loss": 3.0,
        "german bits_per_byte": 6.0,
        "french loss": 2.0,
        "french bits_per_byte": 4.0,
        "german books loss": 7.0,
    }
    assert not syncer.evaluations.open and done.score.reason == ""


def test_the_final_model_is_evaluated_on_each_corpus_by_one_that_stays() -> None:
    syncer, effects = evaluating(1, 0, a=FRENCH, b=GERMAN, c=FRENCH)
    whom = {e.peer: type(e.message) for e in only(effects, Send) if isinstance(e.message, Evaluate | Stop)}
    assert whom == {"a": Evaluate, "b": Evaluate, "c": Stop}
    again = new(1, quorum=3)
    again.restore(json.loads(json.dumps(syncer.state())))
    for machine in (syncer, again):
        effects = machine.on_message(score("a", 1, 2.0), 4.0)
        assert [type(m) for m in sent(effects, "a")] == [Stop] and not only(effects, Finish)
        # b is lost, and comes back.
        machine.on_disconnect("b", 1, "gone", 5.0)
        assert machine.evaluations.final and not machine.over
        effects = machine.on_message(hello("b", 2, (0, 1, 0, 0), **GERMAN), 6.0)
        (request,) = [m for m in sent(effects, "b") if isinstance(m, Evaluate)]
        effects = machine.on_message(score("b", request.number, 4.0, incarnation=2), 7.0)
        assert only(effects, Evaluated)[0].score.loss == 3.0 and effects[-1] == Finish("run complete")


def test_the_end_waits_for_no_corpus_whose_learners_are_away() -> None:
    syncer, _ = evaluating(2, 0, a=FRENCH, b=GERMAN)
    syncer.on_disconnect("b", 1, "gone", 3.5)
    syncer.evaluations.conclude(5.0)
    assert [*syncer.evaluations.sittings] == ["french"]
    assert syncer.evaluations.missing == ["no learner with the corpus german was connected"]


def test_one_that_still_joins_evaluates_if_its_corpus_has_no_other() -> None:
    syncer = new(1, quorum=2)
    syncer.evaluations.plan = EvaluationPlan(WAIT_S, 0)
    for name, corpus in (("a", FRENCH), ("b", FRENCH), ("c", GERMAN)):
        syncer.on_message(hello(name, **corpus), 0.0)
    for name in "ab":
        syncer.on_message(report(name, 1), 1.0)
    for name in "ab":
        syncer.on_message(value(name, 1, 1, 1), 2.0)
    merged(syncer, 1, 3.0)
    assert {sitting.asked for sitting in syncer.evaluations.sittings.values()} == {"a", "c"}


def test_a_corpus_that_nobody_can_evaluate_is_named_beside_the_others() -> None:
    syncer, _ = evaluating(1, 0, a=FRENCH, b=GERMAN)
    syncer.on_message(score("a", 1, 2.0), 4.0)
    (done,) = only(syncer.on_tick(4.0 + WAIT_S), Evaluated)
    assert done.score.loss == 2.0 and done.score.reason == "b: no score within 50 s" and syncer.over
    assert dict(done.score.scores) == {"french loss": 2.0, "french bits_per_byte": 4.0}


@pytest.mark.parametrize("open_", [True, False])
def test_evaluations_of_older_releases_are_restored(open_: bool) -> None:
    syncer, _ = evaluating(100, 1, a={})
    old = [1, 2, open_, "a" if open_ else "", 1, ["b"], {"a": 1}, "", 3.0, 53.0 if open_ else None, 6.0, 3.0]
    syncer.evaluations.restore(old)
    assert syncer.evaluations.open == open_ and syncer.evaluations.next_step == 2
    if open_:
        (done,) = only(syncer.on_message(score("a", 1, 2.0), 4.0), Evaluated)
        assert done.score == score("a", 1, 2.0)
