"""Any number of shares computes the same bits: digests, steps, values, and what is left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.effects import Merge, Part
from diloco_jax.runtime.model.global_model import GlobalModel
from tests.runtime.models import LEAFY, LEAFY_PLAN, OWN, drawn, leafy_payload, model_of


def make_model(shards: int, outer: OuterConfig, up: codec.Format = "int4") -> GlobalModel:
    return model_of(LEAFY_PLAN, drawn(LEAFY), outer, up=up, down="int4", shards=shards)


def story(model: GlobalModel, up: codec.Format) -> list[Any]:
    """Rounds with values against older versions, of another size, and unusable ones; everything that others see."""
    seen: list[Any] = []
    for step in range(1, 9):
        fragment_id = step % 2
        newest, capture = model.versions[fragment_id], model.capture()
        older = max(0, newest - 2) if step > 4 else newest
        parts = tuple(
            Part(name, step, 1 + n, 64 * (n + 1), base, 4)
            for n, (name, base) in enumerate(zip("abcd", [newest, older, newest, newest], strict=True))
        )
        payloads = {name: leafy_payload(fragment_id, 10 * step + n, up) for n, name in enumerate("abcd")}
        payloads["c"] = leafy_payload(fragment_id, step, up, 5.0 if step == 6 else 1e-3)
        payloads["d"] = b"" if step == 3 else payloads["d"]
        merged = model.merge(Merge(step, fragment_id, parts), payloads)
        model.publish(merged)
        step_bytes = bytes(model.payload(fragment_id, newest))
        seen.append((sorted(merged.left_out), merged.state, step_bytes, bytes(model.payload(fragment_id))))
        assert capture.marks[fragment_id].version == newest
    return [*seen, model.digests]


@pytest.mark.parametrize("up", ["int4", "float32"])
def test_any_number_of_shares_gives_the_same_bits(up: codec.Format) -> None:
    outer = OuterConfig(learning_rate=0.7, momentum=0.9)
    expected = story(make_model(1, outer, up), up)
    assert any("c" in left_out for left_out, *_ in expected[:-1]) and any(
        "d" in left_out for left_out, *_ in expected[:-1]
    )
    for shards in (2, 3, 4):
        assert story(make_model(shards, outer, up), up) == expected


@pytest.mark.parametrize(
    "outer", [OuterConfig(learning_rate=0.7, momentum=0.9), OuterConfig(optimizer="adam"), OuterConfig(module=OWN)]
)
def test_what_two_shares_saved_three_go_on_with(outer: OuterConfig) -> None:
    model, other = make_model(2, outer), make_model(3, outer)
    story(model, "int4")
    groups, plain = model.packed(model.capture())
    other.load(other.unpacked(groups, plain))
    assert other.digests == model.digests and other.versions == model.versions
    again, plain_again = other.packed(other.capture())
    assert plain_again == plain
    for group, arrays in groups.items():
        assert again[group].keys() == arrays.keys()
        assert all(np.array_equal(again[group][name], array) for name, array in arrays.items())
    payloads = {"a": leafy_payload(1, 1, "int4"), "b": leafy_payload(1, 2, "int4")}
    parts = tuple(Part(name, 9, 1, 64, model.versions[1], 4) for name in "ab")
    for one in (model, other):
        one.publish(one.merge(Merge(9, 1, parts), payloads))
    if outer.elementwise:  # XLA may fuse the same operations of a smaller program in another way
        assert other.digests == model.digests


def test_a_restored_value_reaches_every_share() -> None:
    model, ahead = make_model(3, OuterConfig()), make_model(1, OuterConfig())
    story(ahead, "int4")
    whole = ahead.payload(0)
    assert model.fits(0, ahead.digests[0], whole)
    model.restore(0, ahead.versions[0], whole)
    assert model.digests[0] == ahead.digests[0] and bytes(model.payload(0)) == bytes(whole)
    assert all(math.isfinite(float(value.sum())) for value in model.parameters().values())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_value_against_an_older_version_counts_from_the_newest(shards: int) -> None:
    models = [make_model(shards, OuterConfig(learning_rate=1.0, momentum=0.0), "float32") for _ in range(2)]
    initial = models[0].capture()
    for model in models:
        first = Merge(1, 0, (Part("a", 1, 1, 64, 0, 4),))
        model.publish(model.merge(first, {"a": leafy_payload(0, 1, "float32", 1.0)}))
    value = np.frombuffer(leafy_payload(0, 2, "float32", 1.0), np.float32)
    moved = models[0].capture().moment.value(0) - initial.moment.value(0)
    for model, base, sent in zip(models, (0, 1), (value, value + moved), strict=True):
        model.publish(model.merge(Merge(2, 0, (Part("a", 2, 1, 64, base, 4),)), {"a": sent.tobytes()}))
    ours, theirs = (model.capture().moment.value(0) for model in models)
    assert np.abs(moved).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
