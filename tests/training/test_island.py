"""An island trains the same on any mesh, in place, without compiling twice or moving data behind our back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.core.codec import decode
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from tests.training.islands import MakeIsland, assert_same, part, pointers, train

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def one_device_losses(make_island: MakeIsland, batches: list[Sample]) -> list[float]:
    return train(make_island(), batches)


@pytest.mark.parametrize(
    "mesh",
    [{"data": 4}, {"fsdp": 4}, {"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}],
    ids=lambda m: "-".join(f"{k}{v}" for k, v in m.items()),
)
def test_the_mesh_does_not_change_the_trajectory(
    make_island: MakeIsland, batches: list[Sample], one_device_losses: list[float], mesh: dict[str, int]
) -> None:
    island = make_island(**mesh)
    np.testing.assert_allclose(train(island, batches), one_device_losses, rtol=2e-4)
    # Everything lies where it was put, so nothing was compiled for a second layout; and parameters are really split.
    assert island._blueprint.step._cache_size() == 1
    kernel = island.state.params["blocks/0/up/kernel"]
    share = math.prod(island.mesh.shape[axis] for axis in ("fsdp", "expert", "tensor"))
    assert kernel.addressable_shards[0].data.size * share == kernel.size
    moments = [v for v in jax.tree.leaves(island.state.opt_state) if v.shape == kernel.shape]
    assert moments and all(m.sharding.shard_shape(m.shape) == kernel.sharding.shard_shape(m.shape) for m in moments)


def test_neither_remat_nor_chunks_nor_micro_batches_change_the_trajectory(
    make_island: MakeIsland, batches: list[Sample], one_device_losses: list[float]
) -> None:
    for remat, count in (("full", 2), ("dots_with_no_batch_dims_saveable", 1)):
        optimizer = OptimizerConfig(warmup_steps=0, accumulate_steps=count)
        island = make_island(fsdp=4, optimizer=optimizer, args={"remat": remat, "loss_chunk": 8})
        np.testing.assert_allclose(train(island, batches), one_device_losses, rtol=2e-4)


def test_training_learns(one_device_losses: list[float]) -> None:
    assert one_device_losses[0] == pytest.approx(np.log(16), abs=0.3)
    assert one_device_losses[-1] < 0.9 * one_device_losses[0]


@pytest.mark.parametrize("scan_layers", [False, True])
def test_muon_trains_on_a_mesh_too(make_island: MakeIsland, batches: list[Sample], scan_layers: bool) -> None:
    muon = OptimizerConfig(name="muon", learning_rate=2e-2, warmup_steps=0)
    args = {"scan_layers": scan_layers, "num_layers": 1 + scan_layers}
    island = make_island(data=2, fsdp=2, optimizer=muon, args=args)
    losses = train(island, batches, 2e-2)
    assert losses[-1] < 0.95 * losses[0] and island._blueprint.step._cache_size() == 1


def test_the_step_works_in_place(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(fsdp=2)
    path = "blocks/0/up/kernel"
    before = island.state.params[path]
    where = pointers(island, path)
    train(island, batches[:2])
    assert before.is_deleted() and pointers(island, path) == where


def test_the_learning_rate_is_that_of_the_call(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island()
    before = island.parameters()
    train(island, batches[:1], learning_rate=0.0)
    assert_same(island.parameters(), before)
    path = "blocks/0/up/kernel"
    moved = []
    for rate in (1e-3, 3e-3):
        island = make_island()
        train(island, batches[:1], rate)
        moved.append(island.parameters()[path] - before[path])
    np.testing.assert_allclose(moved[1], 3 * moved[0], rtol=1e-3, atol=1e-6)
    assert island._blueprint.step._cache_size() == 1


def test_nothing_crosses_the_border_unasked(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(data=2)
    whole = island._whole()
    island.adopt(whole, island.parameters())
    with jax.transfer_guard("disallow"):
        handle = island.step(island.put_batch(batches[0]), 1e-2)
        staged = island.stage(whole)
        island.wait(handle)
        values = decode(staged.encode(), whole.keys_shapes, "float32")
        island.adopt(whole, values, mode="blend", alpha=0.5, sent=staged)
    elsewhere = {"tokens": jax.device_put(batches[0]["tokens"], jax.devices()[5])}
    with pytest.raises(Exception, match=r"Disallowed|incompatible devices"):
        island.step(elsewhere, 1e-2)


def test_steps_that_nobody_waits_for_do_not_pile_up(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(data=4)
    handles = [island.step(island.put_batch(batches[i % 8]), 1e-2) for i in range(30)]
    assert all(h.metrics["loss"].is_ready() for h in handles[:-1])
    assert np.isfinite([island.wait(h)["loss"] for h in handles]).all()


def test_the_callers_batch_may_be_overwritten_at_once(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(data=2)
    for batch in batches * 4:
        buffer = {"tokens": batch["tokens"].copy()}
        placed = island.put_batch(buffer)
        buffer["tokens"][:] = 0
        np.testing.assert_array_equal(placed["tokens"], batch["tokens"])


def test_a_batch_that_the_devices_cannot_share_is_refused(make_island: MakeIsland, batches: list[Sample]) -> None:
    for mesh, count, parts in (({"data": 2, "fsdp": 2}, 6, 4), ({"expert": 2}, 3, 2)):
        with pytest.raises(ValueError, match=f"make the batch size a multiple of {parts}"):
            make_island(**mesh).put_batch(part(batches[0], count))


def test_evaluation_is_the_mean_loss_and_changes_nothing(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(fsdp=2)
    before = island.parameters()
    result = island.evaluate(iter(batches[:3]))
    assert result["tokens"] == 3 * 8 * 8
    singles = [island.evaluate([b])["loss"] for b in batches[:3]]
    assert result["loss"] == pytest.approx(np.mean(singles), rel=1e-6)
    first_training_loss = train(island, batches[:1], 0.0)[0]
    assert first_training_loss == pytest.approx(singles[0], rel=1e-5)
    assert_same(island.parameters(), before)
    with pytest.raises(ValueError, match="no batch"):
        island.evaluate([])


def test_parameters_are_host_copies_and_load_puts_them_back(make_island: MakeIsland, batches: list[Sample]) -> None:
    source, target = make_island(fsdp=2), make_island(tensor=2)
    train(source, batches[:2])
    saved = source.parameters()
    assert list(saved) == sorted(saved) and {v.dtype for v in saved.values()} == {np.dtype("float32")}
    kept = {path: value.copy() for path, value in saved.items()}
    target.load(saved)
    for value in saved.values():
        value[...] = 0
    assert_same(target.parameters(), kept)
    assert target.evaluate(batches[:1])["loss"] == pytest.approx(source.evaluate(batches[:1])["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="not in the model"):
        target.load({**kept, "extra": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"'norm_final/scale' has shape None, expected \(16,\)"):
        target.load({path: v for path, v in kept.items() if path != "norm_final/scale"})


class Regression(nnx.Module):
    """A user's own module: named axes on one parameter only, metrics of its own, tokens used as it likes."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(
            9, width, kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp")), rngs=rngs
        )
        self.readout = nnx.Linear(width, 1, rngs=rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Regression:
        return cls(args["width"], rngs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = batch["tokens"].astype(jnp.float32) / 16
        error = self.readout(nnx.relu(self.hidden(x)))[:, 0] - x.mean(axis=1)
        return jnp.mean(error**2), {"worst": jnp.abs(error).max()}


def test_a_module_from_outside_trains_on_a_mesh(batches: list[Sample]) -> None:
    island = Island(
        ModelConfig(module=f"{__name__}:Regression", args={"width": 8}),
        OptimizerConfig(warmup_steps=0),
        MeshConfig(data=-1, tensor=2),
        seed=3,
        devices=jax.devices()[:4],
    )
    assert island.shapes == {
        "hidden/bias": (8,), "hidden/kernel": (9, 8), "readout/bias": (1,), "readout/kernel": (8, 1),
    }  # fmt: skip
    assert island.state.params["hidden/kernel"].sharding.shard_shape((9, 8)) == (9, 4)
    first = island.wait(island.step(island.put_batch(batches[0]), 3e-2))
    assert set(first) == {"loss", "grad_norm", "worst"}
    assert train(island, batches * 3, 3e-2)[-1] < 0.3 * first["loss"]
