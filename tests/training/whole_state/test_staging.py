"""A whole state on its way from one island to another: bit for bit, whatever the meshes; all of it or nothing."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.fragments import plan_fragments
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState
from tests.training.islands import MakeIsland, assert_same, part, pointers, state_of, train

pytestmark = pytest.mark.usefixtures("quick_compiler")

MUON = OptimizerConfig(name="muon", learning_rate=2e-2, warmup_steps=0)
# The usual mesh of several devices: tests of islands compile its step too, and some of its shards are copies.
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
# The size does not divide any other size.
PART_BYTES = 1000


def leaves(island: Island) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_flatten_with_path(island.state)[0]
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in found}


@pytest.mark.parametrize(
    ("optimizer", "args", "there"),
    [(None, None, MESH), (MUON, {"num_layers": 1}, {"fsdp": 2})],
    ids=["adamw-eight", "muon-fsdp2"],
)
def test_a_state_moves_bit_for_bit_between_meshes(
    make_island: MakeIsland,
    batches: list[Sample],
    optimizer: OptimizerConfig | None,
    args: dict[str, int] | None,
    there: dict[str, int],
) -> None:
    donor = make_island(optimizer=optimizer, args=args)
    receiver = make_island(optimizer=optimizer, args=args, **there)
    for source, target in ((donor, receiver), (receiver, donor)):
        train(source, batches[:3])
        staged, moments = source.stage_state(), source.stage_moments()
        want, source_parameters = leaves(source), source.parameters()
        # The training step donates the arrays that were staged.
        train(source, batches[3:4])
        moving = MovingState(layout := MovingLayout(source.state_layout, "float32"), moments.leaf)
        count = moving.count(PART_BYTES)
        with ThreadPoolExecutor(1) as thread:
            parts = list(thread.map(lambda i, moving=moving: b"".join(moving.part(i, PART_BYTES)), range(count)))
        assert {len(part) for part in parts[:-1]} == {PART_BYTES} and 0 < len(parts[-1]) <= PART_BYTES
        assert b"".join(parts) == b"".join(moving.part(0, layout.bytes.num_bytes))
        programs = target.blueprint.step._cache_size()
        parameters = target.parameters()
        target.load_moments(layout.read(bytearray(b"".join(parts))))
        assert_same(target.parameters(), parameters)
        target.load(source_parameters)
        assert_same(leaves(target), want)
        source.load_state(staged.value())
        assert_same(leaves(source), want)
        np.testing.assert_allclose(train(target, batches[4:]), train(source, batches[4:]), rtol=2e-4)
        assert target.blueprint.step._cache_size() == max(1, programs), "a loaded state was compiled for again"


def test_a_loaded_state_trains_on_as_the_donor_does(make_island: MakeIsland, batches: list[Sample]) -> None:
    """On equal meshes exactly so; and the receiver writes neither to the bytes nor to memory that devices share."""
    donor = make_island(**MESH)
    train(donor, batches[:3])
    state = state_of(donor)
    want = train(donor, batches[3:]), leaves(donor)
    buffer = bytearray(state)
    donor.load_state(buffer)
    buffer[:] = bytes(len(buffer))
    assert train(donor, batches[3:]) == want[0]
    assert_same(leaves(donor), want[1])
    donor.load_state(state)
    train(donor, batches[:2])
    assert donor.stage_state().layout.decode(state).keys() == {leaf.name for leaf in donor.state_layout.leaves}


def test_only_the_named_fragments_are_taken(make_island: MakeIsland, batches: list[Sample]) -> None:
    donor, receiver = make_island(), make_island(**MESH)
    fragments = plan_fragments(donor.shapes, 6, split_axis={}).fragments
    train(donor, batches[:3])
    train(receiver, batches[4:5])
    mine, theirs = receiver.parameters(), donor.parameters()
    receiver.load_state(state_of(donor), fragments[:2])
    taken = {part.path: (part.axis, part.start, part.stop) for f in fragments[:2] for part in f.slices}
    for path, value in receiver.parameters().items():
        want = mine[path].copy()
        if path in taken:
            axis, start, stop = taken[path]
            at = (slice(None),) * axis + (slice(start, stop),) if axis >= 0 else ...
            want[at] = theirs[path][at]
        np.testing.assert_array_equal(value, want, err_msg=path)
    receiver.load_state(state_of(donor), [])
    moments = {name: v for name, v in leaves(donor).items() if "opt_state" in name}
    assert_same({name: v for name, v in leaves(receiver).items() if "opt_state" in name}, moments)


def damaged(layout: StateLayout, state: bytes, other: bytes) -> dict[str, tuple[bytes, str]]:
    scale = b'["params/norm_final/scale","float32",[16]]'
    foreign = state.replace(scale, scale.replace(b"float32", b"float16"))
    renamed = state.replace(b"params/norm_final/scale", b"params/norm_other/scale")
    length = len(layout.header)
    return {
        "short": (state[:-1], "bytes instead of"),
        "long": (state + b"\0", "bytes instead of"),
        "empty": (b"", "not an island's state"),
        "header cut": (state[: length - 3], "not an island's state"),
        "another magic": (b"x" + state[1:], "not an island's state"),
        "huge length": (state[:8] + b"\xff" * 4 + state[12:], "not an island's state"),
        "no json": (state[:12] + b"{" * (length - 12) + state[length:], "cannot be read"),
        "deep json": (state[:12] + b"[" * (length - 12) + state[length:], "cannot be read"),
        "another dtype": (foreign, r"norm_final/scale' is float16 \(16,\) there, float32 \(16,\) here"),
        "another name": (renamed, "it has not 'params/norm_final/scale'"),
        "another optimizer": (other, "another model or optimizer"),
    }


def test_a_damaged_or_foreign_state_is_refused_and_nothing_changes(
    make_island: MakeIsland, batches: list[Sample]
) -> None:
    island = make_island(**MESH)
    state = state_of(island)
    train(island, batches[:2])
    before = leaves(island)
    other = state_of(make_island(optimizer=MUON, args={"num_layers": 1}))
    for what, (bad, message) in damaged(island.state_layout, state, other).items():
        assert bad != state, what
        with pytest.raises(ValueError, match=message):
            island.load_state(bad)
    values = island.stage_state().value()
    name = next(iter(values))
    for bad_values in (
        {k: v for k, v in values.items() if k != name},
        {**values, "extra": np.zeros(1)},
        {**values, name: values[name].astype(np.float64)},
        {**values, name: values[name][None]},
    ):
        with pytest.raises(ValueError, match="another model or optimizer"):
            island.load_state(bad_values)
    assert_same(leaves(island), before)
    train(island, batches[2:3])


def test_staging_costs_the_next_step_neither_its_donation_nor_a_wait(
    make_island: MakeIsland, batches: list[Sample]
) -> None:
    island = make_island(fsdp=4)
    train(island, batches[:1])
    path = "blocks/0/up/kernel"
    where = pointers(island, path)
    with jax.transfer_guard("disallow"):
        handle = island.step(island.put_batch(batches[1]), 1e-2)
        staged = island.stage_state()
        following = island.step(island.put_batch(batches[2]), 1e-2)
        assert len(staged._copies) == len(island.state_layout.leaves)
    island.wait(handle)
    island.wait(following)
    assert pointers(island, path) == where
    copies = [copy for held in staged._copies.values() for _, copy in held]
    assert sum(c.nbytes for c in copies) + len(staged.layout.header) == staged.layout.num_bytes
    assert {c.sharding.memory_kind for c in copies} == {"pinned_host"}


def test_a_step_that_was_compiled_ahead_compiles_nothing(
    make_island: MakeIsland, batches: list[Sample], compilations: list[str]
) -> None:
    # No other test has compiled this program.
    args = {"mlp_dim": 48, "num_layers": 1}
    island, donor = make_island(data=2, fsdp=2, args=args), make_island(args=args)
    train(donor, batches[:2])
    state = state_of(donor)
    batch = batches[2]
    compilations.clear()
    thread = threading.Thread(target=island.warm_up, args=(batch,))
    thread.start()
    # Recovery does the same meanwhile.
    island.load_state(state)
    thread.join()
    assert any("train_step" in name for name in compilations)
    compilations.clear()
    losses = train(island, [batch, *batches[3:]])
    assert compilations == []
    np.testing.assert_allclose(losses, train(donor, [batch, *batches[3:]]), rtol=2e-4)
    # Another size still works.
    train(island, [part(batch, 4)])
    assert any("train_step" in name for name in compilations)


ARRAYS = st.dictionaries(
    st.text("abc/", min_size=1, max_size=6),
    st.tuples(st.sampled_from(["float32", "bfloat16", "int32", "bool"]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@given(ARRAYS, st.integers(1, 64), st.randoms(use_true_random=False))
def test_any_arrays_survive_in_parts_of_any_size(
    described: dict[str, tuple[str, list[int]]], part_bytes: int, rng: object
) -> None:
    dtypes = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
    arrays = {}
    for number, (name, (dtype, shape)) in enumerate(described.items()):
        size = int(np.prod(shape))
        arrays[name] = ((np.arange(size) + number) % 2).reshape(shape).astype(dtypes.get(dtype, dtype))
    layout = StateLayout(arrays)
    bounds = [(start, min(start + part_bytes, layout.num_bytes)) for start in range(0, layout.num_bytes, part_bytes)]
    parts = [b"".join(layout.slices(*each, arrays.__getitem__)) for each in bounds]
    assert [len(part) for part in parts[:-1]] == [part_bytes] * (len(bounds) - 1)
    told = [[name, arrays[name].dtype.name, list(arrays[name].shape)] for name in sorted(arrays)]
    assert json.loads(layout.header[12:]) == told
    assert_same(layout.decode(b"".join(parts)), arrays)
