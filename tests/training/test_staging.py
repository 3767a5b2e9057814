"""Fragments on their way out and in: the right values at the right step, no collective, no recompilation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest

from diloco_jax.core.fragments import Fragment, FragmentPlan, plan_fragments, put, take
from diloco_jax.training.island import Island
from diloco_jax.training.staging import put_values, value_sharding

MakeIsland = Callable[..., Island]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
MESHES = [{}, {"data": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
IDS = ["one", "data2", "fsdp4", "all8"]


def plan_of(island: Island, axis: int = 0, fragments: int = 12) -> FragmentPlan:
    """More fragments than comfortable, so that several tensors are cut, across the shards' borders too."""
    axes = {path: min(axis, len(shape) - 1) for path, shape in island.shapes.items()}
    return plan_fragments(island.shapes, fragments, split_axis=axes)


def cut_fragments(plan: FragmentPlan) -> list[Fragment]:
    return [f for f in plan.fragments if any(s.axis >= 0 for s in f.slices)]


def random_values(fragment: Fragment, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Multiples of 1/8: sums, differences and halves are exact in float32, so equality can be demanded.
    return {k: (rng.integers(-64, 64, shape) / 8).astype(np.float32) for k, shape in fragment.keys_shapes}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
def test_staged_values_are_those_of_the_step_whatever_runs_next(
    make_island: MakeIsland, batches: list[np.ndarray], mesh: dict[str, int], axis: int
) -> None:
    island = make_island(**mesh)
    plan = plan_of(island, axis)
    assert cut_fragments(plan)
    collected: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
    for i in range(6):
        handle = island.step(island.put_batch(batches[i]), 1e-2)
        staged = [island.stage(fragment) for fragment in plan.fragments]
        want = {path: np.array(value) for path, value in jax.device_get(island.state.params).items()}
        following = island.step(island.put_batch(batches[i + 1]), 1e-2)  # donates what was staged
        got: dict[str, np.ndarray] = {}
        thread = threading.Thread(target=lambda got=got, staged=staged: [got.update(s.value()) for s in staged])
        thread.start()
        thread.join()
        island.wait(handle)
        island.wait(following)
        collected.append(({k: v for f in plan.fragments for k, v in take(want, f).items()}, got))
    for want, got in collected:
        assert got.keys() == want.keys()
        for key in want:
            np.testing.assert_array_equal(got[key], want[key])
            assert got[key].dtype == np.float32 and got[key].flags.owndata
    assert any(not np.array_equal(collected[0][1][k], collected[1][1][k]) for k in collected[0][1])


def test_staging_does_not_cost_the_next_step_its_donation(make_island: MakeIsland, batches: list[np.ndarray]) -> None:
    island = make_island(fsdp=2)
    path = "blocks/0/up/kernel"

    def where() -> list[int]:
        return [s.data.unsafe_buffer_pointer() for s in island.state.params[path].addressable_shards]

    before = where()
    island.wait(island.step(island.put_batch(batches[0]), 1e-2))
    staged = island.stage(island._whole())
    island.wait(island.step(island.put_batch(batches[1]), 1e-2))
    assert where() == before
    assert staged.value()[path].shape == island.shapes[path]


def test_each_part_is_staged_once_although_devices_hold_copies(make_island: MakeIsland) -> None:
    island = make_island(data=2, fsdp=2)
    for fragment in plan_of(island).fragments:
        staged = island.stage(fragment)
        assert sum(piece.copy.size for piece in staged.pieces) == fragment.num_elements
        assert {piece.copy.sharding.memory_kind for piece in staged.pieces} == {"pinned_host"}
        assert all(len(piece.copy.sharding.device_set) == 1 for piece in staged.pieces)  # so: no collective


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
def test_adoption_is_exact_in_every_mode(make_island: MakeIsland, mesh: dict[str, int], axis: int) -> None:
    island = make_island(**mesh)
    whole = island._whole()
    start = random_values(whole, seed=1)
    for fragment in cut_fragments(plan_of(island, axis))[:3]:
        new, sent = random_values(fragment, seed=2), random_values(fragment, seed=3)
        local = take(start, fragment)
        expected = {
            "overwrite": new,
            "blend": {k: 0.25 * local[k] + 0.75 * new[k] for k in new},
            "rebase": {k: new[k] + (local[k] - sent[k]) for k in new},
        }
        for mode, want in expected.items():
            island.load(start)
            island.adopt(fragment, new, mode=mode, alpha=0.25, staged=sent)
            merged = put(start, fragment, want)
            for path, value in island.parameters().items():
                np.testing.assert_array_equal(value, merged[path], err_msg=f"{mode} {path}")


def test_adoption_is_in_place_keeps_the_layout_and_compiles_once(
    make_island: MakeIsland, batches: list[np.ndarray]
) -> None:
    island = make_island(data=2, fsdp=2)
    fragment = cut_fragments(plan_of(island))[0]
    path = next(s.path for s in fragment.slices if s.axis >= 0)
    for i in range(3):
        island.wait(island.step(island.put_batch(batches[i]), 1e-2))
        before = island.state.params[path]
        where = [s.data.unsafe_buffer_pointer() for s in before.addressable_shards]
        island.adopt(fragment, random_values(fragment, seed=i))
        after = island.state.params[path]
        assert before.is_deleted() and after.sharding == before.sharding
        assert [s.data.unsafe_buffer_pointer() for s in after.addressable_shards] == where
    assert island._step_program._cache_size() == 1
    assert {p._cache_size() for p in island._adopt_programs.values()} == {1}


def test_adoption_holds_no_collective(make_island: MakeIsland) -> None:
    island = make_island(fsdp=4, tensor=2)
    for axis in (0, 1):
        for fragment in cut_fragments(plan_of(island, axis))[:4]:
            values = random_values(fragment)
            island.adopt(fragment, values, mode="rebase", staged=values)
            new = put_values(values, fragment, island._shardings)
            tensors = {s.path: island.state.params[s.path] for s in fragment.slices}
            share = jax.device_put(np.float32(0), island._layout.replicated)
            program = island._adopt_programs[fragment, "rebase"]
            text = program.lower(tensors, new, new, share).compile().as_text()
            assert not [name for name in COLLECTIVES if name in text]


def test_values_are_copied_and_lie_like_their_tensor(make_island: MakeIsland) -> None:
    island = make_island(fsdp=2)
    fragment = cut_fragments(plan_of(island))[0]
    part = next(s for s in fragment.slices if s.axis >= 0)
    assert not value_sharding(part, island._shardings[part.path]).spec[part.axis]
    for seed in range(10):
        values = random_values(fragment, seed)
        kept = {k: v.copy() for k, v in values.items()}
        island.adopt(fragment, values)
        for value in values.values():
            value[...] = 99
        for key, value in island.stage(fragment).value().items():
            np.testing.assert_array_equal(value, kept[key])


def test_foreign_values_are_refused_by_name(make_island: MakeIsland) -> None:
    island = make_island()
    fragment = plan_of(island).fragments[0]
    values = random_values(fragment)
    key = next(iter(values))
    with pytest.raises(ValueError, match=r"fragment 0: .* has shape None"):
        island.adopt(fragment, {k: v for k, v in values.items() if k != key})
    with pytest.raises(ValueError, match=r"has shape \(1,\)"):
        island.adopt(fragment, {**values, key: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="needs `staged`"):
        island.adopt(fragment, values, mode="rebase")
