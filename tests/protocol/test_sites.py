"""Sites: what is told of corpora, and the alarm about one whose loss rises."""

from math import nan

from diloco_jax.protocol.leases import COMMON
from diloco_jax.protocol.messages import Metric, Score
from diloco_jax.protocol.watch.sites import RisingLosses, corpora_of
from tests.protocol.syncer_inputs import LEASED, hello, new

CORPORA = ("", "french", "german")


def score(loss: float, **losses: float) -> Score:
    named = tuple([Metric(f"{name} loss", value) for name, value in losses.items()])
    return Score("a", 1, 1, 1, (0,), loss, nan, 64, named, 0.5, "")


def test_corpora_are_told_with_their_epochs() -> None:
    syncer = new()
    assert corpora_of(syncer, {}) == []
    syncer.on_message(hello("b", corpus="french", content="9 tokens", corpus_samples=400), 0.0)
    syncer.on_message(hello("a", corpus="french", content="9 tokens"), 0.0)
    syncer.on_message(hello("c"), 0.0)
    shared = {"corpus": COMMON, "islands": ["c"], "samples": 0, "leased": LEASED, "epochs": None, "loss": 2.5}
    french = {"corpus": "french", "islands": ["a", "b"], "samples": 400, "leased": 2 * LEASED, "epochs": 5.0}
    assert corpora_of(syncer, {"run loss": 2.5}) == [shared, french | {"loss": None}]


def test_a_loss_that_rises_twice_while_the_mean_falls_is_an_alarm() -> None:
    losses = RisingLosses()
    for mean, french in ((3.0, 2.0), (2.9, 2.1)):
        losses.on_score(score(mean, french=french, german=1.0), CORPORA)
        assert losses.alarms() == []
    losses.on_score(score(2.8, french=2.2, german=0.9), CORPORA)
    (alarm,) = losses.alarms()
    assert alarm.kind == "rising" and "french loss rose to 2.2000 in the last 2 evaluations" in alarm.text
    losses.on_score(score(2.7, french=2.1, german=0.9), CORPORA)
    assert losses.alarms() == []


def test_only_corpora_count_and_only_means_of_the_same_ones_are_compared() -> None:
    for corpora, more in ((("",), {}), (CORPORA, {"german": 1.0})):
        losses = RisingLosses()
        for number in range(4):
            losses.on_score(score(3.0 - number, books=1.0 + number, **more), corpora)
        assert losses.alarms() == [], "a set of data.evaluation is not a corpus"
    losses = RisingLosses()
    losses.on_score(score(3.0, french=2.0, german=4.0), CORPORA)
    losses.on_score(score(2.1, french=2.1), CORPORA)
    losses.on_score(score(2.0, french=2.2), CORPORA)
    assert losses.alarms() == [], "the mean fell when a corpus was missing"
