"""Fragments on their way out and in: the right bytes of the right step, no collective, no compilation behind a step."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, FragmentPlan, plan_fragments, put, take
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.exchange.exchange import AdoptMode
from diloco_jax.training.exchange.windows import windows_of
from diloco_jax.training.island import Island
from tests.training.islands import MakeIsland, assert_same, pointers, train
from tests.training.one_host import COLLECTIVES

pytestmark = pytest.mark.usefixtures("quick_compiler")

MESHES = [{}, {"data": 2}, {"fsdp": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}]
IDS = ["one", "data2", "fsdp4", "all8", "four"]
# Rows of 512 elements among others: whole blocks, so that shards of them are rounded on the devices.
WIDE = {"dim": 32, "mlp_dim": 512, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


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


def updates(fragment: Fragment, seed: int, format: Format) -> dict[str, np.ndarray]:
    """Random updates whose blocks have scale 1, so that residuals are exact: fused multiply-adds round no less."""
    top = {"int4": 7, "int8": 127}.get(format, 127)
    rng = np.random.default_rng(seed)
    values = {}
    for key, shape in fragment.keys_shapes:
        flat = rng.integers(-8 * top, 8 * top + 1, int(np.prod(shape))) / 8
        flat[::256] = top
        values[key] = flat.reshape(shape).astype(np.float32)
    return values


@pytest.mark.parametrize(
    ("mesh", "format"),
    [
        *((mesh, "int4") for mesh in MESHES),
        *(({"fsdp": 2, "tensor": 2}, f) for f in ("float32", "bfloat16", "int8", "int2", "ternary")),
        # Three devices cannot share the blocks of any tensor equally.
        *(({"data": 3}, f) for f in ("int4", "bfloat16")),
    ],
)
def test_payloads_are_what_the_host_would_encode_with_what_rounding_kept_back(
    make_island: MakeIsland, mesh: dict[str, int], format: Format
) -> None:
    island = make_island(**mesh, wire=format, args=WIDE)
    along, across = cut_fragments(plan_of(island)), cut_fragments(plan_of(island, axis=1))
    for fragment in [*along[: 3 if format == "int4" else 1], *across[:1]]:
        island.exchange.held = {}
        anchor = random_values(fragment, seed=1)
        kept = {key: np.zeros(shape, np.float32) for key, shape in fragment.keys_shapes}
        sent = None
        for turn, used in enumerate((True, False, False)):
            island.adopt(fragment, anchor, sent=sent)
            update = updates(fragment, turn, format)
            island.overwrite(fragment, {key: anchor[key] - update[key] for key in anchor})
            unused, staged = (
                island.exchange.stage(island.state.params, fragment),
                island.exchange.stage(island.state.params, fragment),
            )
            whole = {key: update[key] + kept[key] for key in update}
            payload = codec.encode(whole, format)
            assert staged.encode() == payload == unused.encode()
            if used:
                decoded = codec.decode(payload, fragment.keys_shapes, format)
                kept = {key: whole[key] - decoded[key] for key in whole}
                assert any(value.any() for value in kept.values()) == (format != "float32")
            sent = staged if used else None
            anchor = random_values(fragment, seed=2 + turn)


def test_each_way_of_rounding_is_tried(make_island: MakeIsland) -> None:
    """Whole tensors, whole blocks of shards, rows of shards, and tensors whose shards cut blocks."""
    island = make_island(fsdp=2, tensor=2, wire="int4", args=WIDE)
    seen = set()
    for axis in (0, 1):
        for fragment in (*plan_of(island, axis).fragments, island._whole()):
            for window in windows_of(fragment, island.exchange._tensors):
                where = {None: "host", -1: "whole"}.get(window.block_dim, "shards")
                seen.add((where, window._split))
    assert seen >= {("host", False), ("host", True), ("whole", False), ("shards", False), ("shards", True)}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh", MESHES[2:4], ids=IDS[2:4])
def test_staged_updates_are_those_of_the_step_whatever_runs_next(
    make_island: MakeIsland, batches: list[Sample], mesh: dict[str, int], axis: int
) -> None:
    island = make_island(**mesh)
    plan = plan_of(island, axis)
    assert cut_fragments(plan)
    zeros = {path: np.zeros(shape, np.float32) for path, shape in island.shapes.items()}
    start = island.parameters()
    for fragment in plan.fragments:
        # Updates are then the negative parameters.
        island.adopt(fragment, take(zeros, fragment))
    island.load(start)
    collected = []
    for i in range(4):
        handle = island.step(island.put_batch(batches[i]), 1e-2)
        staged = [island.exchange.stage(island.state.params, fragment) for fragment in plan.fragments]
        want = island.parameters()
        # The step donates the arrays that were staged.
        following = island.step(island.put_batch(batches[i + 1]), 1e-2)
        with ThreadPoolExecutor(1) as thread:
            got = list(thread.map(lambda copy: copy.encode(), staged))
        island.wait(handle)
        island.wait(following)
        collected.append((want, got))
    for want, got in collected:
        for fragment, payload in zip(plan.fragments, got, strict=True):
            for key, value in codec.decode(payload, fragment.keys_shapes, "float32").items():
                np.testing.assert_array_equal(-value, take(want, fragment)[key])
    assert collected[0][1] != collected[1][1]


def test_staging_does_not_cost_the_next_step_its_donation(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(fsdp=2, wire="int4", rebase=True)
    path = "blocks/0/up/kernel"
    whole = island._whole()
    island.adopt(whole, island.parameters())
    before = pointers(island, path)
    train(island, batches[:1])
    staged = island.exchange.stage(island.state.params, whole)
    train(island, batches[1:2])
    assert pointers(island, path) == before
    assert len(staged.encode()) == codec.encoded_size(whole.shapes, "int4")


def test_little_goes_to_the_host_and_each_part_once(make_island: MakeIsland) -> None:
    for mesh in MESHES:
        island = make_island(**mesh, wire="int4", args=WIDE)
        whole = island._whole()
        island.adopt(whole, island.parameters())
        staged = island.exchange.stage(island.state.params, whole)
        assert all(len(copy.sharding.device_set) == 1 for _, _, copy in staged._copies)
        windows = windows_of(whole, island.exchange._tensors)
        cut = [w for w in windows if w.block_dim is None]
        whole_blocks = [w.shape for w in windows if w.block_dim is not None]
        sent = sum(copy.nbytes for _, _, copy in staged._copies)
        expected = codec.encoded_size(whole_blocks, "int4") + 4 * sum(np.prod(w.shape) for w in cut)
        # Per tensor, a device may send one of these blocks that another one has sent.
        block = codec.encoded_size([(1,)], "int4")
        assert expected <= sent <= expected + block * len(windows) * island.mesh.size
        assert not cut or max(island.mesh.shape["fsdp"], island.mesh.shape["tensor"]) > 1


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh", MESHES[1:4], ids=IDS[1:4])
def test_adoption_is_exact_in_every_mode(make_island: MakeIsland, mesh: dict[str, int], axis: int) -> None:
    island = make_island(**mesh, rebase=True)
    whole = island._whole()
    start = random_values(whole, seed=1)
    for fragment in cut_fragments(plan_of(island, axis))[:2]:
        new, then = random_values(fragment, seed=2), random_values(fragment, seed=3)
        local = take(start, fragment)
        expected = {
            "overwrite": new,
            "blend": {k: 0.25 * local[k] + 0.75 * new[k] for k in new},
            "rebase": {k: new[k] + (local[k] - then[k]) for k in new},
        }
        for mode, want in expected.items():
            island.load(start)
            island.adopt(fragment, random_values(fragment, seed=4))
            island.overwrite(fragment, then)
            sent = island.exchange.stage(island.state.params, fragment)
            island.overwrite(fragment, local)
            island.adopt(fragment, new, mode=mode, alpha=0.25, sent=sent)
            assert_same(island.parameters(), put(start, fragment, want))


def test_adoption_works_in_place_and_heals_what_is_not_finite(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(data=2, fsdp=2)
    fragment = cut_fragments(plan_of(island))[0]
    path = next(s.path for s in fragment.slices if s.axis >= 0)
    for i in range(3):
        train(island, batches[i : i + 1])
        before, where = island.state.params[path], pointers(island, path)
        island.adopt(fragment, random_values(fragment, seed=i))
        assert before.is_deleted() and island.state.params[path].sharding == before.sharding
        assert pointers(island, path) == where
    assert island.blueprint.step._cache_size() == 1
    island.overwrite(fragment, {k: np.full(v, np.nan, np.float32) for k, v in fragment.keys_shapes})
    island.adopt(fragment, random_values(fragment))
    assert_same(take(island.parameters(), fragment), random_values(fragment))


@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
def test_no_program_holds_a_collective(make_island: MakeIsland, mesh: dict[str, int]) -> None:
    island = make_island(**mesh, wire="int4", rebase=True, args=WIDE)
    fragments = [f for axis in (0, 1) for f in cut_fragments(plan_of(island, axis))[:1]] + [island._whole()]
    island.exchange.warm_up(fragments)
    made = [programs.cache_info().currsize for programs in (island.exchange._outgoing, island.exchange._incoming)]
    assert made == [len(fragments), 2 * len(fragments)]
    for program in island.exchange._compiled.values():
        text = program.as_text()
        assert not [name for name in COLLECTIVES if name in text]


def test_after_warming_up_nothing_is_compiled(
    make_island: MakeIsland, batches: list[Sample], compilations: list[str]
) -> None:
    # No other test has compiled this model.
    island = make_island(fsdp=2, wire="int4", rebase=True, args={"mlp_dim": 64})
    plan = plan_of(island, fragments=4)
    island.warm_up(batches[0])
    told: list[tuple[int, str]] = []
    island.exchange.warm_up(plan.fragments, lambda done, current: told.append((done, current)))
    done = [each for each, _ in told]
    assert done == sorted(done) and told[-1] == (island.exchange.count(plan.fragments), "")
    assert told[:4] == [
        (0, "adopt of fragment 0"),
        (1, "stage of fragment 0"),
        (2, "rebase of fragment 0"),
        (3, "adopt of fragment 1"),
    ]
    start = island.parameters()
    # JAX compiles small programs for itself at the first call.
    island.adopt(plan.fragments[0], take(start, plan.fragments[0]))
    compilations.clear()
    for fragment in plan.fragments:
        island.adopt(fragment, take(start, fragment))
    for batch in batches[:3]:
        handle = island.step(island.put_batch(batch), 1e-2)
        staged = [island.exchange.stage(island.state.params, fragment) for fragment in plan.fragments]
        island.wait(handle)
        for fragment, sent in zip(plan.fragments, staged, strict=True):
            island.adopt(fragment, take(start, fragment), mode="rebase", sent=sent)
    assert compilations == []


@pytest.mark.parametrize("format", ["int4", "bfloat16"])
def test_values_that_are_not_finite_leave_no_trace(make_island: MakeIsland, format: Format) -> None:
    island = make_island(fsdp=2, wire=format, args=WIDE)
    fragment = cut_fragments(plan_of(island))[0]
    anchor = random_values(fragment)
    island.adopt(fragment, anchor)
    island.overwrite(fragment, {k: np.full_like(v, np.inf) for k, v in anchor.items()})
    bad = island.exchange.stage(island.state.params, fragment)
    if format == "int4":
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            bad.encode()
        assert bad.residual() is None
    else:
        decoded = codec.decode(bad.encode(), fragment.keys_shapes, format)
        assert all(np.isneginf(value).all() for value in decoded.values())
    island.adopt(fragment, anchor, sent=bad)
    island.overwrite(fragment, {k: v - 1 for k, v in anchor.items()})
    ones = {k: np.ones_like(v) for k, v in anchor.items()}
    assert island.exchange.stage(island.state.params, fragment).encode() == codec.encode(ones, format)


@pytest.mark.parametrize("mode", ["overwrite", "blend", "rebase"])
def test_a_value_placed_by_another_thread_gives_the_same_bits(make_island: MakeIsland, mode: AdoptMode) -> None:
    island = make_island(fsdp=2, tensor=2, rebase=True)
    for fragment in cut_fragments(plan_of(island))[:2]:
        new, results = random_values(fragment, 2), []
        for place in (False, True):
            island.load(random_values(island._whole(), 1))
            island.adopt(fragment, random_values(fragment, 3))
            sent = island.stage(fragment)
            island.overwrite(fragment, random_values(fragment, 4))
            with ThreadPoolExecutor(1) as other:
                value = other.submit(island.place, fragment, new).result() if place else new
            island.adopt(fragment, value, mode=mode, alpha=0.25, sent=sent)
            anchor = [np.asarray(array) for array in island.exchange.held[fragment.fragment_id].anchor]
            results.append((island.parameters(), dict(enumerate(anchor))))
        for values, placed in zip(*results, strict=True):
            assert_same(values, placed)
        assert_same(dict(enumerate(new.values())), results[1][1])


def test_adopting_a_placed_value_copies_nothing(make_island: MakeIsland) -> None:
    island = make_island(fsdp=4)
    (fragment, *_) = plan_of(island).fragments
    # The first adoption puts the share of the local values and the residual on the devices.
    island.adopt(fragment, random_values(fragment, 1))
    placed = island.place(fragment, random_values(fragment, 2))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        island.adopt(fragment, placed)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            island.adopt(fragment, random_values(fragment, 3))
    assert_same(take(island.parameters(), fragment), random_values(fragment, 2))
    with pytest.raises(ValueError, match="expected"):
        island.place(fragment, {})


def test_values_are_copied(make_island: MakeIsland) -> None:
    island = make_island(fsdp=2)
    fragment = cut_fragments(plan_of(island))[0]
    for seed in range(10):
        values = random_values(fragment, seed)
        kept = {k: v.copy() for k, v in values.items()}
        island.adopt(fragment, values)
        for value in values.values():
            value[...] = 99
        island.overwrite(fragment, {k: np.zeros_like(v) for k, v in kept.items()})
        assert island.exchange.stage(island.state.params, fragment).encode() == codec.encode(kept, "float32")


def test_foreign_values_are_refused_by_name(make_island: MakeIsland) -> None:
    island = make_island()
    fragment = plan_of(island).fragments[0]
    values = random_values(fragment)
    key = next(iter(values))
    with pytest.raises(ValueError, match=r"fragment 0: .* has shape None"):
        island.adopt(fragment, {k: v for k, v in values.items() if k != key})
    with pytest.raises(ValueError, match=r"has shape \(1,\)"):
        island.adopt(fragment, {**values, key: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="needs `sent`"):
        island.adopt(fragment, values, mode="rebase")
    assert fragment.fragment_id not in island.exchange.held
