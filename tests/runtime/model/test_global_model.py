"""The model changes only when its owner publishes, no value makes it useless, and shares compute the same bits."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import FINEST
from diloco_jax.core.layout import value_digest
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import RATES_KEPT, RATES_MIN
from diloco_jax.runtime.model import arithmetic
from diloco_jax.runtime.model.arithmetic import FREE_MAX
from diloco_jax.runtime.model.buffers import Buffers
from diloco_jax.runtime.model.global_model import GlobalModel
from diloco_jax.settings.text import load
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MeshConfig
from tests.limits import HANGS_S
from tests.runtime.models import (
    FRAGMENTS,
    LEAFY,
    LEAFY_PLAN,
    OWN,
    SHAPES,
    drawn,
    go_on,
    gradient,
    leafy_payload,
    make_model,
    merge,
    model_of,
    order,
    saved,
)


def settle(model: GlobalModel, rounds: int = RATES_MIN, norm: float = 1.0, fragment_id: int = 0) -> int:
    """Rounds of one learner whose values have this norm per step; returns the next global step."""
    for step in range(1, rounds + 1):
        assert merge(model, step, {"a": gradient(model, fragment_id, step, norm)}, fragment_id).state is not None
    return rounds + 1


def test_a_merge_changes_nothing_until_it_is_published() -> None:
    model = make_model()
    before, payload, digests = model.parameters(), model.payload(0), model.digests
    merged = model.merge(order(model, 1, 0, "a"), {"a": gradient(model, 0, 1)})
    assert model.payload(0) == payload and model.digests == digests and model.versions == [0, 0]
    assert all(np.array_equal(before[path], value) for path, value in model.parameters().items())
    model.publish(merged)
    assert merged.state is not None and merged.excluded == {}
    assert model.versions == [1, 0] and model.payload(0) != payload
    assert model.digests[0] == value_digest(model.slices(model.capture(), 0)) == merged.state.digest
    assert model.digests[1] == digests[1]


def test_a_capture_stays_as_it_was_and_can_be_gone_back_to() -> None:
    model = make_model()
    step = settle(model, 3)
    capture, payloads = model.capture(), [model.payload(p) for p in range(FRAGMENTS)]
    first = [merge(model, step + n, {"a": gradient(model, n % 2, 50 + n)}, n % 2) for n in range(4)]
    assert model.payload(0) != payloads[0]
    after = [model.payload(p) for p in range(FRAGMENTS)]
    model.load(capture)
    assert [model.payload(p) for p in range(FRAGMENTS)] == payloads
    again = [merge(model, step + n, {"a": gradient(model, n % 2, 50 + n)}, n % 2) for n in range(4)]
    assert [model.payload(p) for p in range(FRAGMENTS)] == after, "the outer state went back as well"
    assert [m.state.digest for m in first if m.state] == [m.state.digest for m in again if m.state]


def test_values_of_another_model_are_refused() -> None:
    model = make_model()
    pieces, plain = saved(model)
    with pytest.raises(ValueError, match="fragment 1 has another digest"):
        go_on(model, (pieces, {**plain, "digests": [plain["digests"][0], 5]}))
    with pytest.raises(ValueError, match="shape"):
        model.begin({**drawn(SHAPES), "embed": np.zeros((4, 8), np.float32)}.items())
    with pytest.raises(ValueError, match="no initial values of parameter 'embed'"):
        model.begin([item for item in drawn(SHAPES).items() if item[0] != "embed"])


def test_a_restored_value_replaces_the_newest_and_keeps_the_outer_state() -> None:
    model, ahead, before = make_model(), make_model(), make_model()
    settle(model, 2)
    settle(ahead, 4)
    settle(before, 2)
    assert model.fits(0, ahead.digests[0], ahead.payload(0))
    model.restore(0, 4, ahead.payload(0))
    assert model.versions == [4, 0] and model.digests == ahead.digests and model.payload(0) == ahead.payload(0)
    assert model.capture().marks[0].history.rates == before.capture().marks[0].history.rates
    kept, was = model.capture().state(0), before.capture().state(0)
    pairs = zip(jax.tree.leaves(kept.outer), jax.tree.leaves(was.outer), strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_a_damaged_value_does_not_fit() -> None:
    model = make_model()
    payload, digest = bytes(model.payload(0)), model.digests[0]
    flipped = bytes([payload[0] ^ 1]) + payload[1:]
    assert model.fits(0, digest, payload)
    assert not model.fits(0, digest, flipped)
    assert not model.fits(0, digest, payload[:-1]) and not model.fits(0, digest, payload + b"\0")
    assert not model.fits(FRAGMENTS, digest, payload) and not model.fits(-1, digest, payload)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_left_out_and_named(poison: float) -> None:
    model, clean = make_model(), make_model()
    bad = np.frombuffer(gradient(model, 0, 9), np.float32).copy()
    bad[3] = poison
    merged = merge(model, 1, {"a": gradient(model, 0, 1), "b": bad.tobytes()})
    merge(clean, 1, {"a": gradient(model, 0, 1)})
    assert merged.excluded.keys() == {"b"} and "NaN or infinity" in merged.excluded["b"]
    assert model.payload(0) == clean.payload(0)


def test_a_value_that_cannot_be_decoded_is_excluded() -> None:
    merged = merge(make_model(), 1, {"a": gradient(make_model(), 0, 1), "b": b"", "c": b"x" * 7})
    assert merged.excluded.keys() == {"b", "c"}


def test_a_wildly_large_value_is_left_out_once_the_usual_size_is_known() -> None:
    model = make_model()
    step = settle(model)
    assert merge(model, step, {"a": gradient(model, 0, 1, norm=90.0)}).state is not None
    before = model.payload(0)
    merged = merge(model, step + 1, {"a": gradient(model, 0, 2, norm=110.0)})
    assert merged.state is None and "is usual (merge.outlier_factor 100)" in merged.excluded["a"]
    assert model.payload(0) == before
    steps = merge(model, step + 2, {"a": gradient(model, 0, 2, norm=110.0)}, steps=2)
    assert steps.state is not None, "the limit is per inner step"


@pytest.mark.parametrize(
    ("factor", "rounds", "fragment_id"), [(0.0, RATES_MIN, 0), (100.0, RATES_MIN - 1, 0), (100.0, RATES_MIN, 1)]
)
def test_no_limit_when_it_is_off_or_the_fragments_own_past_is_short(
    factor: float, rounds: int, fragment_id: int
) -> None:
    model = make_model(outlier_factor=factor)
    step = settle(model, rounds)
    assert merge(model, step, {"a": gradient(model, fragment_id, 2, norm=1e4)}, fragment_id).state is not None


def test_one_of_three_is_judged_by_the_others_from_the_first_round_on() -> None:
    model = make_model()
    payloads = {"a": gradient(model, 0, 1), "b": gradient(model, 0, 2), "c": gradient(model, 0, 3, norm=300.0)}
    merged = merge(model, 1, payloads)
    assert merged.excluded.keys() == {"c"} and merged.state is not None


@pytest.mark.parametrize("before", [1e-3, 0.0])
def test_a_change_that_concerns_everybody_leaves_nobody_out(before: float) -> None:
    """The end of a warm-up: all values are far above what was usual; steps at a rate of 0 set no standard."""
    model = make_model()
    step = settle(model, norm=before)
    assert bool(model.capture().marks[0].history.rates) == bool(before)
    loud = {name: gradient(model, 0, 20 + n, norm=1.0 + n / 10) for n, name in enumerate("abc")}
    assert merge(model, step, loud).excluded == {}


def test_what_is_small_against_the_fragment_is_never_wildly_large() -> None:
    """Rows of an embedding rest until their token occurs; their first large move is not damage."""
    model = make_model()
    step = settle(model, norm=1e-9)
    norm = math.sqrt(sum(float((value**2).sum()) for value in model.slices(model.capture(), 0).values()))
    assert merge(model, step, {"a": gradient(model, 0, 1, norm=0.9e-3 * norm)}).excluded == {}
    assert merge(model, step + 1, {"a": gradient(model, 0, 2, norm=0.2 * norm)}).excluded.keys() == {"a"}


def test_the_past_is_bounded() -> None:
    model = make_model()
    settle(model, RATES_KEPT + 5)
    assert len(model.capture().marks[0].history.rates) == RATES_KEPT


def test_finite_values_that_overflow_together_never_reach_the_model() -> None:
    model, clean = make_model(outlier_factor=0.0), make_model(outlier_factor=0.0)
    good = gradient(model, 0, 1)
    huge = np.full(len(good) // 4, 3e38, np.float32).tobytes()
    merged = merge(model, 1, {"a": good, "b": huge, "c": gradient(model, 0, 3)})
    merge(clean, 1, {"a": good, "c": gradient(model, 0, 3)})
    assert merged.excluded.keys() == {"b"} and "not finite" in merged.excluded["b"]
    assert model.payload(0) == clean.payload(0)
    assert all(np.isfinite(value).all() for value in model.parameters().values())


CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_fragments_of_a_shipped_config_are_even(path: Path) -> None:
    config = load(path)
    blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), 1, seed=0)
    count = config.protocol.num_fragments
    plan = config.fragments.plan(blueprint.shapes, blueprint.kinds, count)
    sizes = [fragment.num_elements for fragment in plan.fragments]
    share = math.ceil(sum(sizes) / count)
    assert max(sizes) <= 1.15 * sum(sizes) / count
    assert sum(len(fragment.slices) for fragment in plan.fragments) <= FINEST * count + len(blueprint.shapes)
    for piece in (piece for fragment in plan.fragments for piece in fragment.slices):
        shape, kind = blueprint.shapes[piece.path], blueprint.kinds[piece.path]
        # This tensor is cut: a stack between layers, so that each has one norm, or a tensor larger than a share.
        if piece.axis >= 0:
            assert piece.axis == 0 if kind.stack else math.prod(shape) > share, piece.key


def leafy_model(outer: OuterConfig, up: codec.Format = "int4") -> GlobalModel:
    return model_of(LEAFY_PLAN, drawn(LEAFY), outer, up=up, down="int4")


def story(model: GlobalModel, up: codec.Format) -> list[Any]:
    """Rounds with values against older versions, of another size, and unusable ones; everything that others see."""
    seen: list[Any] = []
    for step in range(1, 9):
        fragment_id = step % 2
        newest, capture = model.versions[fragment_id], model.capture()
        older = max(0, newest - 2) if step > 4 else newest
        parts = tuple(
            Contribution(name, step, 1 + n, 64 * (n + 1), base, 4)
            for n, (name, base) in enumerate(zip("abcd", [newest, older, newest, newest], strict=True))
        )
        payloads = {name: leafy_payload(fragment_id, 10 * step + n, up) for n, name in enumerate("abcd")}
        payloads["c"] = leafy_payload(fragment_id, step, up, 5.0 if step == 6 else 1e-3)
        payloads["d"] = b"" if step == 3 else payloads["d"]
        merged = model.merge(Merge(step, fragment_id, parts), payloads)
        model.publish(merged)
        delta_bytes = bytes(model.payload(fragment_id, newest))
        seen.append((sorted(merged.excluded), merged.state, delta_bytes, bytes(model.payload(fragment_id))))
        assert capture.marks[fragment_id].version == newest
    return [*seen, model.digests]


@pytest.mark.parametrize(
    "outer", [OuterConfig(learning_rate=0.7, momentum=0.9), OuterConfig(optimizer="adam"), OuterConfig(module=OWN)]
)
def test_another_model_continues_with_what_one_saved(outer: OuterConfig) -> None:
    model, other = leafy_model(outer), leafy_model(outer)
    story(model, "int4")
    pieces, plain = saved(model)
    go_on(other, (pieces, plain))
    assert other.digests == model.digests and other.versions == model.versions
    again, plain_again = saved(other)
    assert plain_again == plain and again.keys() == pieces.keys()
    assert all(np.array_equal(again[key], array) for key, array in pieces.items())
    payloads = {"a": leafy_payload(1, 1, "int4"), "b": leafy_payload(1, 2, "int4")}
    parts = tuple(Contribution(name, 9, 1, 64, model.versions[1], 4) for name in "ab")
    for one in (model, other):
        one.publish(one.merge(Merge(9, 1, parts), payloads))
    assert other.digests == model.digests


def test_a_restored_value_replaces_the_newest() -> None:
    model, ahead = leafy_model(OuterConfig()), leafy_model(OuterConfig())
    story(ahead, "int4")
    whole = ahead.payload(0)
    assert model.fits(0, ahead.digests[0], whole)
    model.restore(0, ahead.versions[0], whole)
    assert model.digests[0] == ahead.digests[0] and bytes(model.payload(0)) == bytes(whole)
    assert all(math.isfinite(float(value.sum())) for value in model.parameters().values())


@pytest.mark.parametrize("down", ["float32", "bfloat16", "int4"])
def test_a_value_against_an_older_version_counts_from_the_newest(down: codec.Format) -> None:
    plain = OuterConfig(learning_rate=1.0, momentum=0.0)
    models = [model_of(LEAFY_PLAN, drawn(LEAFY), plain, down=down, anchor_history=3) for _ in range(2)]
    was, moved = models[0].capture().value(0), np.zeros(models[0].layout(0).size, np.float32)
    for step in (1, 2):
        for model in models:
            order = Merge(step, 0, (Contribution("a", 1, 1, 64, step - 1, 4),))
            model.publish(model.merge(order, {"a": leafy_payload(0, step, "float32", 1.0)}))
        now = models[0].capture().value(0)
        if down == "float32":
            moved, was = moved + (now - was), now
        # Learners decode the deltas like this, the oldest first; no value of an older version is needed.
        else:
            layout, payload = models[0].layout(0), bytes(models[0].payload(0, step - 1))
            moved += layout.flat(codec.decode(payload, LEAFY_PLAN.fragments[0].keys_shapes, down))
    value = np.frombuffer(leafy_payload(0, 3, "float32", 1.0), np.float32)
    for model, base, sent in zip(models, (0, 2), (value, value + moved), strict=True):
        model.publish(model.merge(Merge(3, 0, (Contribution("a", 2, 1, 64, base, 4),)), {"a": sent.tobytes()}))
    ours, theirs = (model.capture().value(0) for model in models)
    assert np.abs(moved).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    if down != "float32":
        assert models[0].digests == models[1].digests, "bit for bit"


def test_a_bounded_capture_holds_up_its_replacement_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    merge(model, 1, {"a": gradient(model, 0, 1)})
    capture, wanted, merges = model.capture(bounded=True), saved(model)[0], ThreadPoolExecutor(2)
    waiting = [
        merges.submit(model.merge, order(model, 2 + number, number, "a"), {"a": gradient(model, number, 5)})
        for number in range(FRAGMENTS)
    ]
    pieces = model.pieces(capture)
    assert next(pieces).where.path in {each.path for each in model.plan.fragments[1].slices}, "the oldest version first"
    assert not any(merged.done() for merged in waiting)
    found = {(piece.group, piece.where): piece.value for piece in model.pieces(capture)}
    for merged in waiting:
        model.publish(merged.result(HANGS_S))
    assert found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted)
    monkeypatch.setattr(arithmetic, "PATIENCE_S", 0.01)
    late = model.capture(bounded=True)
    assert merge(model, 9, {"a": gradient(model, 0, 7)}).state is not None, "it was given up"
    with pytest.raises(ValueError, match="no fragment was written; the disk is too slow, or hangs"):
        list(model.pieces(late))


def test_buffers_are_written_again_and_bounded() -> None:
    buffers = Buffers(3000, FREE_MAX)
    arrays = [buffers.take(2000) for _ in range(FREE_MAX + 1)]
    for number, array in enumerate(arrays):
        array[:] = number
    # Each array is a view of a view.
    kept = [array[7:9].reshape(2, 1) for array in arrays[:2]]
    del arrays, array
    found = [buffers.take(3000)[:2000] for _ in range(FREE_MAX + 1)]
    assert {int(array[1]) for array in found} == {0, 2, 3, 4}, (
        "what a view shows is not written again, fresh memory is 0"
    )
    assert all((view == number).all() for number, view in enumerate(kept))
    del kept, found
    assert len(buffers._free) == FREE_MAX, "and no more of it waits"
    one = buffers.take(3000)
    one[:] = 8
    del one
    assert buffers.take(1000)[0] == 8 and (buffers.take(3000)[1024:] == 0).sum() > 900, "a shorter one frees the rest"


def test_an_anchor_is_held_against_the_snapshots_value() -> None:
    model = make_model()
    flat = np.frombuffer(bytes(model.payload(0)), np.float32)
    assert not model.anchor_problem(0, 5, flat.tobytes()) and not model.anchor_problem(0, 5, (2 * flat).tobytes())
    for wild in (flat * np.float32(1e30), np.full_like(flat, np.nan), np.full_like(flat, np.inf), flat * 1000):
        assert model.anchor_problem(0, 5, wild.tobytes())
    off = make_model(outlier_factor=0.0)
    assert not off.anchor_problem(0, 5, (flat * 1000).tobytes()) and off.anchor_problem(0, 5, (flat * np.nan).tobytes())


def test_an_anchor_may_be_as_far_as_so_many_steps_can_go() -> None:
    """The norm per inner step that `settle` makes usual is 1, so 100 times that is allowed."""
    model = make_model()
    settle(model)
    flat = np.frombuffer(bytes(model.payload(0)), np.float32)
    way = np.zeros_like(flat)
    way[0] = 1.0
    for steps in (1, 24):
        near, far = flat + way * np.float32(50 * steps), flat + way * np.float32(200 * steps)
        version = model.versions[0] + steps
        assert not model.anchor_problem(0, version, near.tobytes())
        assert "away from the snapshot's value" in model.anchor_problem(0, version, far.tobytes())
