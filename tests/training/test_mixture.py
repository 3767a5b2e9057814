"""Mixtures of sources: their shares, their epochs, and one order for all readers."""

from pathlib import Path

import numpy as np
import pytest

from diloco_jax.training.data.config import DataConfig, SourceConfig
from diloco_jax.training.data.corpus import Source, Windows, load_source
from diloco_jax.training.data.mixture import PATTERN, Order, Pattern, mixed
from diloco_jax.training.data.order import SampleOrder, eval_batches
from diloco_jax.training.data.sample import TOKENS


def numbered(*lengths: int, weights: tuple[float, ...]) -> Source:
    """Make a mixture whose windows start with 1000 x source + window as first id."""
    parts = {
        str(source): Source(
            *[Windows(np.arange(length + 1, dtype=np.uint32) + 1000 * source, seq_len=1)] * 2, vocab_size=10**6
        )
        for source, length in enumerate(lengths)
    }
    windows = [part.train for part in parts.values()]
    return Source(mixed(windows), mixed(windows, weights), 10**6, parts=parts, weights=weights)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.7, 0.2, 0.1), (1.0, 1.0099, 1.0099), (1000.0, 1.0), (1.0,) * 64])
def test_shares_are_those_of_the_weights_in_every_prefix(weights: tuple[float, ...]) -> None:
    pattern, shares = Pattern(weights), np.array(weights) / sum(weights)
    taken = np.array([pattern[position][0] for position in range(100_000)])
    count = np.cumsum(taken[:, None] == np.arange(len(weights)), axis=0)
    assert np.abs(count[-1] / 100_000 - shares).max() < 0.0005
    assert np.abs(count - np.arange(1, 100_001)[:, None] * shares).max() < 1 + len(weights) / 8


def test_each_source_gives_its_own_samples_in_turn_beyond_the_pattern() -> None:
    pattern = Pattern((0.7, 0.3))
    positions = [*range(1000), *range(PATTERN - 500, PATTERN + 500), *range(3 * PATTERN, 3 * PATTERN + 500)]
    last: dict[int, int] = {}
    for before, position in zip([-1, *positions], positions, strict=False):
        source, number = pattern[position]
        if position == before + 1 and source in last:
            assert number == last[source] + 1
        last = {**last, source: number} if position == before + 1 else {source: number}


def test_a_small_source_restarts_in_another_order() -> None:
    order = Order([50, 7], (1.0, 1.0), seed=3)
    found = [order[position] for position in range(140)]
    small = [number - 50 for number in found if number >= 50]
    epochs = [small[start : start + 7] for start in range(0, 70, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) > 8
    assert sorted(number for number in found if number < 50)[:50] != found[:50]


@pytest.mark.parametrize("islands", [1, 2, 4])
def test_all_leases_together_are_the_order(islands: int) -> None:
    source = numbered(900, 700, 500, weights=(4.0, 2.0, 1.0))
    whole = SampleOrder(source, seed=1).batch(((0, 240),))[TOKENS]
    found = np.zeros_like(whole)
    batch = 24 // islands
    for number, start in enumerate(range(0, 240, batch)):
        # Everybody starts again, as after a resume.
        if number in (0, 4):
            orders = [SampleOrder(source, seed=1) for _ in range(islands)]
        found[start : start + batch] = orders[number % islands].batch(((start, start + batch),))[TOKENS]
    np.testing.assert_array_equal(found, whole)
    assert len({tuple(row) for row in whole}) == 240
    assert (SampleOrder(source, seed=2).batch(((0, 240),))[TOKENS] != whole).any()


def test_evaluation_has_of_each_source_as_much_as_its_weight_says() -> None:
    source = numbered(900, 300, weights=(1.0, 3.0))
    rows = np.concatenate([batch[TOKENS] for batch in eval_batches(source, 10, 20)])
    assert (rows[:, 0] >= 1000).mean() == 0.75 and len(source.held_out) == 400


def test_a_mixture_of_files_has_named_sets_and_knows_what_it_holds(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 500)
    part = {
        name: SourceConfig(path=str(tmp_path / name), format="bytes", weight=float(ord(name) - 96)) for name in "abc"
    }
    config = DataConfig(mixture={name: part[name] for name in "ba"}, evaluation={"c": part["c"]}, held_out_fraction=0.2)
    source = load_source(config, seq_len=10)
    other_order = load_source(DataConfig(mixture={n: part[n] for n in "ab"}, held_out_fraction=0.2), seq_len=10)
    assert list(source.evaluation) == ["a", "b", "c"] and config.ids == 256
    assert {name: chr(samples[0][TOKENS][0]) for name, samples in source.evaluation.items()} == {n: n for n in "abc"}
    first = SampleOrder(source, 0).batch(((0, 90),))[TOKENS]
    np.testing.assert_array_equal(first, SampleOrder(other_order, 0).batch(((0, 90),))[TOKENS])
    assert (first[:, 0] == ord("b")).sum() == 60
    assert source.corpus == other_order.corpus
    (tmp_path / "b").write_text("d" * 500)
    assert load_source(config, seq_len=10).corpus != source.corpus


A, TEXT = SourceConfig(path="a"), SourceConfig(path="a", format="text")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": {"a": A}, "path": "b"}, "data.mixture replaces data.path"),
        ({"mixture": {"a": A, "b": SourceConfig(path="b", weight=1e5)}}, "data.mixture.a has 1.0 of all weights"),
        ({"mixture": {str(n): A for n in range(65)}}, "have 65 sources; 64 is the limit"),
        ({"evaluation": {"a b": A}}, "'a b' names a source of data; use letters"),
        ({"mixture": {"a": A}, "evaluation": {"a": A}}, "and each name once"),
        ({"documents": "whole", "module": "a:B"}, "data.module decides itself"),
        ({"documents": "whole"}, "format bytes of .* has no ends of documents"),
        ({"format": "jsonl", "path": "a"}, "needs data.tokenizer, which is ''"),
        ({"mixture": {"a": TEXT}, "tokenizer": "train:300"}, "or for a single source train:SIZE"),
    ],
)
def test_sources_that_do_not_belong_together_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)  # type: ignore[arg-type]
    # A weight of 1e-320 makes a share overflow.
    for weight in (0.0, 1e-320):
        with pytest.raises(ValueError, match=r"the weight of 'a' is .* from 1e-9 to 1e9"):
            SourceConfig(path="a", weight=weight)
