"""An island trains the same on any mesh, in place, without compiling twice or moving data behind our back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diloco_jax.core.codec import decode
from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import GraphDef, load_model, split_model
from diloco_jax.training.optimizers import OptimizerConfig, make_inner
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.training.state import Params, TrainState
from diloco_jax.training.train_step import make_train_step, model_loss
from tests.limits import HANGS_S
from tests.sockets import free_port
from tests.training.islands import MakeIsland, assert_same, part, pointers, train
from tests.training.one_host import CASES, Alone, exercise

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
    assert island.blueprint.step._cache_size() == 1
    kernel = island.state.params["blocks/0/up/kernel"]
    share = math.prod(island.mesh.shape[axis] for axis in ("fsdp", "expert", "tensor"))
    assert kernel.addressable_shards[0].data.size * share == kernel.size
    moments = [v for v in jax.tree.leaves(island.state.opt_state) if v.shape == kernel.shape]
    assert moments and all(m.sharding.shard_shape(m.shape) == kernel.sharding.shard_shape(m.shape) for m in moments)


def test_neither_remat_nor_chunks_nor_micro_batches_change_the_trajectory(
    make_island: MakeIsland, batches: list[Sample], one_device_losses: list[float]
) -> None:
    for remat, count, lookup in (("full", 2, "gather"), ("minimal", 1, "exchange")):
        optimizer = OptimizerConfig(warmup_steps=0, accumulate_steps=count)
        args = {"remat": remat, "loss_chunk": 8, "lookup": lookup}
        island = make_island(fsdp=4, optimizer=optimizer, args=args)
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
    assert losses[-1] < 0.95 * losses[0] and island.blueprint.step._cache_size() == 1


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
    assert island.blueprint.step._cache_size() == 1


def test_nothing_crosses_the_border_unasked(make_island: MakeIsland, batches: list[Sample]) -> None:
    island = make_island(data=2)
    whole = island._whole()
    island.adopt(whole, island.parameters())
    with jax.transfer_guard("disallow"):
        handle = island.step(island.put_batch(batches[0]), 1e-2)
        staged = island.exchange.stage(island.state.params, whole)
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
    """Module of a user with named axes on one parameter only, other metrics, and a free use of tokens."""

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


ARGS = {"vocab_size": 8, "dim": 4, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "mlp_dim": 4}


def decoder() -> tuple[GraphDef, Params]:
    return split_model(load_model("diloco_jax.training.models.decoder:Decoder", ARGS, 0))


def test_a_step_follows_the_negative_gradient_and_reports_its_norm() -> None:
    graphdef, params = decoder()
    tx = optax.sgd(1.0)
    batch = {"tokens": jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)}
    step = jax.jit(make_train_step(graphdef, tx))
    loss_of = jax.jit(lambda p: model_loss(graphdef, p, batch)[0])
    state, metrics = step(TrainState(params, tx.init(params)), batch, jnp.float32(0.125))
    gradient = {path: (np.asarray(params[path]) - np.asarray(state.params[path])) / 0.125 for path in params}
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert float(metrics["loss"]) == pytest.approx(float(loss_of(params)))
    path, nudge = "blocks/0/up/kernel", 1e-2
    for index in ((0, 0), (3, 2)):
        losses = [float(loss_of({**params, path: params[path].at[index].add(sign * nudge)})) for sign in (1, -1)]
        assert gradient[path][index] == pytest.approx((losses[0] - losses[1]) / (2 * nudge), abs=2e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_make_the_step_of_the_whole_batch(count: int) -> None:
    graphdef, params = decoder()
    tx = optax.adam(1.0)
    rng = np.random.default_rng(0)
    batch = {"tokens": jnp.asarray(rng.integers(0, 8, (8, 6)), jnp.int32)}
    found = []
    for accumulate_steps in (1, count):
        step = jax.jit(make_train_step(graphdef, tx, accumulate_steps))
        found.append(step(TrainState(params, tx.init(params)), batch, jnp.float32(0.1)))
    with pytest.raises(ValueError, match="make the batch size a multiple of 3"):
        make_train_step(graphdef, tx, 3)(TrainState(params, tx.init(params)), batch, jnp.float32(0.1))
    (whole, whole_metrics), (parts, parts_metrics) = found
    # Moments are compared instead of parameters, because adam's first step is the gradient's sign.
    for path in params:
        # The order of sums differs, so elements differ by a few units in the last place of the largest, which is 0.3.
        np.testing.assert_allclose(parts.opt_state[0].mu[path], whole.opt_state[0].mu[path], atol=4e-7)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(parts_metrics[name], whole_metrics[name], rtol=1e-5)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_and_their_moments_stay_narrow(dtype: str, accumulate_steps: int, inner: str) -> None:
    """A program that is compiled for one type cannot be called with another."""
    graphdef, params = decoder()
    narrow = {path: jax.ShapeDtypeStruct(value.shape, dtype) for path, value in params.items()}
    tx = make_inner(OptimizerConfig(name=inner), narrow)
    state = TrainState(narrow, jax.eval_shape(tx.init, narrow))  # type: ignore[arg-type]
    batch = {"tokens": jax.ShapeDtypeStruct((4, 6), jnp.int32)}
    step = make_train_step(graphdef, tx, accumulate_steps)
    after, _ = jax.eval_shape(step, state, batch, jax.ShapeDtypeStruct((), jnp.float32))
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


@pytest.fixture(scope="module")
def of_hosts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Return what each of two processes found."""
    folder, port = tmp_path_factory.mktemp("hosts"), free_port()
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    # The child compiles as this process does, because the bits are compared.
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-m", "tests.training.one_host", str(folder)]
    logs = [folder / f"{host}.log" for host in range(2)]
    processes = []
    for host, path in enumerate(logs):
        with path.open("wb") as log:
            words = [*command, str(host), str(port)]
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        for process, path in zip(processes, logs, strict=True):
            assert process.wait(HANGS_S) == 0, path.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for host in range(2):
        with np.load(folder / f"{host}.npz") as arrays:
            found.append({name.replace("|", "/"): arrays[name] for name in arrays.files})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_processes_give_the_parts_of_what_one_gives(of_hosts: list[dict[str, np.ndarray]], case: int) -> None:
    alone = exercise(case, Alone())
    payloads = [name for name in alone if name.startswith(f"{case}-") and name.count("-") == 2]
    assert len(payloads) == 6
    for name in payloads:
        parts = [bytes(found[name]) for found in of_hosts]
        assert bytes(join_host_bytes(parts, 1 << 30)) == bytes(alone[name]), name
    sent = [sum(found[name].size for name in payloads) for found in of_hosts]
    assert min(sent) > sum(sent) / 4, f"the hosts share the work: {sent} bytes"
    states = [name for name in alone if "/" in name]
    assert states
    for found in of_hosts:
        assert not found[f"{case}-collectives"].any() and found[f"{case}-collectives"].size
        # All operations are elementwise up to here, so the bits are equal.
        for name in states:
            np.testing.assert_array_equal(found[name], alone[name], err_msg=name)
        # Sums over devices of several processes are made in another order.
        np.testing.assert_allclose(found[f"{case}-losses"], alone[f"{case}-losses"], rtol=1e-5)
    read = [found[f"{case}-read"].tolist() for found in of_hosts]
    assert [len(rows) for rows in read] == [12, 12] and sorted(read[0] + read[1]) == sorted([*range(12)] * 2), (
        "two epochs of 12 samples; each host read the rows of its devices"
    )
    assert alone[f"{case}-losses"][2] < alone[f"{case}-losses"][0]
