"""Parts of a step: their mean is the step of the whole batch, with the same bits wherever a part was computed."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.parts import Flat, HeldRow, Part, PartSteps, ShardPlace, mean_chunk, mean_metrics
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.training.whole_state.staging import lengths
from tests import natural_models
from tests.training import test_own_batches
from tests.training.islands import MakeIsland, assert_same, pointers, state_of

pytestmark = pytest.mark.usefixtures("quick_compiler")

RATE = 1e-2
SGD: dict[str, Any] = {"module": "optax:sgd", "args": {"learning_rate": 1.0}, "warmup_steps": 0}
# An embedding and a linear layer, which compile in a tenth of the decoder's time.
SMALL = f"{natural_models.HERE}:Language"
# Sums in another order differ by a few units in the last place of the largest gradient, which is 0.3.
NEAR = 4e-7


def cut(batch: Sample, count: int) -> list[Sample]:
    """Return `count` equal parts of a batch, in its order."""
    size = len(next(iter(batch.values()))) // count
    return [{name: value[i * size : (i + 1) * size] for name, value in batch.items()} for i in range(count)]


def compute(island: Island, batch: Sample, position: int = 0) -> Part:
    steps = PartSteps(island)
    return steps.take(steps.gradient(island.put_batch(batch), position))


def update(island: Island, parts: list[Part], chunks: int = 1, rate: float = RATE) -> dict[str, float]:
    """Update an island with the mean of parts, which is computed in chunks."""
    weights = [each.weight for each in parts]
    pieces = [np.array_split(each.flat, chunks) for each in parts]
    mean = np.concatenate([mean_chunk([piece[j] for piece in pieces], weights) for j in range(chunks)])
    metrics = mean_metrics([each.metrics for each in parts], weights)
    return island.wait(PartSteps(island).apply(mean, rate, metrics))


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, atol=NEAR, err_msg=path)


def test_parts_make_the_step_of_the_whole_batch(make_island: MakeIsland, batches: list[Sample]) -> None:
    fused = make_island(module=SMALL, optimizer=OptimizerConfig(**SGD, accumulate_steps=4))
    want = fused.wait(fused.step(fused.put_batch(batches[0]), RATE))
    island = make_island(module=SMALL, optimizer=OptimizerConfig(**SGD))
    before = island.parameters()
    blueprint = island.blueprint
    plain = jax.jit(jax.grad(lambda params: blueprint.loss(params, {}, dict(batches[0]))[0]))(island.state.params)

    parts = [compute(island, each) for each in cut(batches[0], 4)]
    assert_same(island.parameters(), before)
    mean = sum(each.flat for each in parts) / np.float32(4)
    reference = np.concatenate([np.asarray(plain[path]).reshape(-1) for path in sorted(plain)])
    np.testing.assert_allclose(mean, reference, atol=NEAR)

    assert update(island, parts) == pytest.approx(want, rel=1e-6) and set(want) == {"loss", "grad_norm"}
    moved = np.concatenate([(value - before[path]).reshape(-1) for path, value in island.parameters().items()])
    np.testing.assert_allclose(moved, -RATE * mean, atol=NEAR)
    assert_close(island.parameters(), fused.parameters())


@pytest.mark.parametrize("count", [2, 4])
def test_neither_the_place_of_a_part_nor_the_number_of_chunks_changes_a_bit(
    make_island: MakeIsland, batches: list[Sample], count: int
) -> None:
    found: list[list[float]] = []
    # Two islands with equal meshes and separate programs.
    for chunks, owners in ((1, "aaaa"), (3, "abab"), (4, "bbba")):
        islands = {"a": make_island(module=SMALL, data=2), "b": make_island(module=SMALL, data=2, rebase=True)}
        losses = []
        for batch in batches[:3]:
            placed = zip(owners[:count], cut(batch, count), strict=True)
            parts = [compute(islands[name], each) for name, each in placed]
            metrics = [update(each, parts, chunks) for each in islands.values()]
            assert metrics[0] == metrics[1]
            losses.append(metrics[0]["loss"])
        assert_same(islands["a"].parameters(), islands["b"].parameters())
        assert state_of(islands["a"]) == state_of(islands["b"])
        found.append([*losses, *np.concatenate([each.reshape(-1) for each in islands["a"].parameters().values()])])
    assert found[0] == found[1] == found[2]


def test_small_tensors_are_fetched_together_and_once(make_island: MakeIsland, batches: list[Sample]) -> None:
    steps = PartSteps(island := make_island(module=SMALL, optimizer=OptimizerConfig(**SGD), data=2))
    ((array, pieces),) = steps.gradient(island.put_batch(batches[0])).rows
    assert len(steps.places) == len(pieces) == 3
    assert array.shape == (steps.size,), "both devices hold the whole gradient, and one is read"


def test_an_empty_tensor_hides_no_other_one(make_island: MakeIsland, batches: list[Sample]) -> None:
    steps = PartSteps(island := make_island(module=SMALL, optimizer=OptimizerConfig(**SGD)))
    batch = island.put_batch(batches[0])
    whole = steps.take(steps.gradient(batch)).flat
    # It starts where the first tensor does.
    steps._rows[0].insert(0, HeldRow((ShardPlace(0, 0, 0),), steps._rows[0][0].devices))
    handle = steps.gradient(batch)
    assert sum(piece.size for _, pieces in handle.rows for piece in pieces) == steps.size
    assert np.array_equal(steps.take(handle).flat, whole)


def test_parts_are_accumulated_inside_too(make_island: MakeIsland, batches: list[Sample]) -> None:
    whole = compute(make_island(module=SMALL, optimizer=OptimizerConfig(**SGD)), batches[0])
    accumulated = compute(make_island(module=SMALL, optimizer=OptimizerConfig(**SGD, accumulate_steps=4)), batches[0])
    np.testing.assert_allclose(accumulated.flat, whole.flat, atol=NEAR)
    assert accumulated.metrics == pytest.approx(whole.metrics, rel=1e-6)


def tensors_of(steps: PartSteps, flat: Flat) -> dict[str, np.ndarray]:
    """Put the shards of a flat gradient together."""
    found, start = {}, 0
    for path, places in steps.places.items():
        shape = [max(spans[axis][1] for spans in places) for axis in range(len(places[0]))]
        found[path] = np.full(shape, np.nan, np.float32)
        for spans in places:
            size = math.prod(lengths(spans))
            found[path][tuple(slice(*span) for span in spans)] = flat[start : start + size].reshape(lengths(spans))
            start += size
    assert start == len(flat)
    return found


@pytest.mark.long
def test_a_part_of_a_split_model_is_a_whole_gradient(make_island: MakeIsland, batches: list[Sample]) -> None:
    one = compute(whole := make_island(optimizer=OptimizerConfig(**SGD)), batches[0])
    split = make_island(optimizer=OptimizerConfig(**SGD), data=2, fsdp=2, tensor=2)
    part = compute(split, batches[0])
    expected = tensors_of(PartSteps(whole), one.flat)
    for path, value in tensors_of(PartSteps(split), part.flat).items():
        np.testing.assert_allclose(value, expected[path], atol=1e-6)
    assert PartSteps(split).size == one.flat.size == sum(value.size for value in split.parameters().values())
    rows = PartSteps(split).gradient(split.put_batch(batches[0])).rows
    starts = [piece.start for _, pieces in rows for piece in pieces]
    assert len(rows) == 4 and len(starts) == len({*starts}), "each shard is read once"
    update(split, [part])
    assert split.state.params["blocks/0/up/kernel"].sharding == split.blueprint.tensors["blocks/0/up/kernel"].sharding


def test_a_part_draws_by_its_position(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(module=f"{natural_models.HERE}:Dropping", optimizer=OptimizerConfig(**SGD))
    first, again, other = (compute(island, batches[0], position) for position in (8, 8, 16))
    assert first.metrics == again.metrics != other.metrics
    np.testing.assert_array_equal(first.flat, again.flat)
    stepped = island.wait(island.step(island.put_batch(batches[0]), RATE, 8))
    assert stepped["loss"] == first.metrics["loss"]


def test_unequal_weights_make_the_step_of_the_whole_batch() -> None:
    island = Island(
        ModelConfig(module=f"{test_own_batches.HERE}:Masked"),
        OptimizerConfig(**SGD),
        MeshConfig(),
        seed=0,
        devices=jax.devices()[:1],
    )
    halves, quarters = ([compute(island, each) for each in cut(test_own_batches.BATCH, count)] for count in (2, 4))
    # One of four parts has no weight. The numbers are those of micro-batches in test_own_batches.py.
    for parts, weights in ((halves[::-1], [1.0, 2.0]), (quarters, [1.0, 1.0, 1.0, 0.0])):
        assert [each.weight for each in parts] == weights
        island.load({"w": np.zeros(1, np.float32)})
        metrics = update(island, parts, rate=0.5)
        assert float(island.state.params["w"][0]) == pytest.approx(2.0)
        assert metrics == pytest.approx({"loss": 14 / 3, "off": 2.0, "weight": 3.0, "grad_norm": 4.0})


def test_a_model_with_other_state_is_refused(make_island: MakeIsland) -> None:
    island = make_island(module=f"{natural_models.HERE}:Normalised")
    with pytest.raises(ValueError, match=r"such as 'calls', and an island of several slices .* islands\.slices to 1"):
        PartSteps(island)


def test_programs_that_are_compiled_ahead_run_in_place(
    make_island: MakeIsland, batches: list[Sample], compilations: list[str]
) -> None:
    island = make_island(module=SMALL, fsdp=2)
    steps = PartSteps(island)
    steps.warm_up(cut(batches[0], 2)[0])
    before, where = island.state.params["head/kernel"], pointers(island, "head/kernel")
    compilations.clear()
    for batch in batches[:2]:
        parts = [steps.take(steps.gradient(island.put_batch(each))) for each in cut(batch, 2)]
        mean = mean_chunk([each.flat for each in parts], [1.0, 1.0])
        handle = steps.apply(mean, RATE, parts[0].metrics)
        # The program must not read the memory of the caller.
        mean[:] = np.nan
        assert np.isfinite(list(island.wait(handle).values())).all()
    assert compilations == []
    assert before.is_deleted() and pointers(island, "head/kernel") == where
    with pytest.raises(ValueError, match=r"the mean gradient has shape \(3,\), expected \(\d+,\)"):
        steps.apply(np.zeros(3, np.float32), RATE, {})


def test_the_mean_is_that_of_float32_from_left_to_right() -> None:
    big = np.float32(2**24)
    columns = np.array([[big, 1.0, 0.0], [1.0, 2.0, 5.0], [1.0, 6.0, np.inf]], np.float32)
    # 2^24 + 1 is 2^24 in float32, and the sum of ones before would be 2.
    np.testing.assert_array_equal(mean_chunk(list(columns), [1.0] * 3), [big / np.float32(3), 3.0, np.inf])
    np.testing.assert_array_equal(mean_chunk(list(columns[::-1]), [1.0] * 3)[0], (big + 2) / np.float32(3))
    np.testing.assert_array_equal(mean_chunk(list(columns[:2, 1:]), [3.0, 1.0]), [1.25, 1.25])
    np.testing.assert_array_equal(mean_chunk(list(columns[:2, 1:]), [0.0, 0.0]), [0.0, 0.0])
    assert columns[0, 0] == big, "the parts are left as they are"
    assert mean_metrics([{"loss": 2.0, "weight": 3.0}, {"loss": 4.0, "weight": 1.0}], [3.0, 1.0]) == {
        "loss": 2.5,
        "weight": 4.0,
    }
    assert mean_metrics([{"loss": 2.0}, {"loss": 4.0}], [1.0, 1.0]) == {"loss": 3.0}


def test_parts_that_do_not_fit_together_are_refused() -> None:
    three, four = np.zeros(3, np.float32), np.zeros(4, np.float32)
    for chunks, weights in (([], []), ([three], [1.0, 1.0]), ([three, four], [1.0, 1.0])):
        with pytest.raises(ValueError, match="have no mean; give pieces"):
            mean_chunk(chunks, weights)
    with pytest.raises(ValueError, match="only some parts report the metric 'worst'"):
        mean_metrics([{"loss": 1.0}, {"loss": 1.0, "worst": 2.0}], [1.0, 1.0])
