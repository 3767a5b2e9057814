"""Batches that are dicts of the user's own: what a sample may be, and how batches of unequal weight are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from diloco_jax.protocol.watch.stats import LearnerStats, RunStats
from diloco_jax.runtime.records.status import starved
from diloco_jax.training.data.own import open_own
from diloco_jax.training.data.sample import batch_shapes, count_predicted, stack
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import split_model
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.training.state import Batch, TrainState
from diloco_jax.training.train_step import make_train_step

HERE = "tests.training.test_own_batches"
GIVEN: list[Any] = []  # what Samples gives


class Samples:
    def __len__(self) -> int:
        return len(GIVEN)

    def __getitem__(self, number: int) -> Any:
        return GIVEN[number]


class Masked(nnx.Module):
    """Mean squared distance of a parameter to the numbers that a mask leaves."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Masked:
        return cls()

    def loss(self, batch: Batch) -> Any:
        count = batch["mask"].sum().astype(jnp.float32)
        off = jnp.where(batch["mask"], self.w[...] - batch["x"], 0.0)
        return (off**2).sum() / jnp.maximum(count, 1), {"weight": count, "off": jnp.abs(off).sum() / count.clip(1)}


BATCH = {"x": np.array([1.0, 2.0, 3.0, 9.0], np.float32), "mask": np.array([True, True, True, False])}
IMAGE = {"image": np.zeros((2, 2), np.uint8), "label": np.asarray(3), "scale": np.asarray(0.5)}


def test_types_are_those_of_devices_and_images_stay_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GIVEN", [IMAGE, IMAGE, IMAGE])
    samples = open_own(f"{HERE}:Samples", {}, 1, 256)
    batch = stack([samples[0], samples[2]])
    found = {name: (value.shape, value.dtype.name) for name, value in batch.items()}
    assert found == {"image": ((2, 2, 2), "uint8"), "label": ((2,), "int32"), "scale": ((2,), "float32")}
    assert {name: (shape.shape, shape.dtype.name) for name, shape in batch_shapes(samples[0], 2).items()} == found


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (IMAGE | {"image": np.zeros((2, 3), np.uint8)}, r"1 as 'image' uint8 of shape \(2, 3\), the first .* \(2, 2\)"),
        (IMAGE | {"image": np.zeros((2, 2), np.float64)}, r"'image' float32 of shape .* has uint8"),
        (IMAGE | {"more": np.zeros(1)}, r"'more' float32 of shape \(1,\), the first sample has nothing"),
        ({"image": IMAGE["image"], "scale": IMAGE["scale"]}, "'label' nothing, the first sample has int32"),
        (IMAGE | {"label": np.asarray(2**31)}, "'label' numbers from 2147483648 to 2147483648; they need 32 bits"),
        (IMAGE | {"scale": np.asarray(1e300)}, r"'scale' numbers from 1e\+300 to 1e\+300; they need 32 bits"),
        (IMAGE | {"label": np.asarray("cat")}, "'label' <U3 .*; give numbers"),
    ],
)
def test_a_sample_that_is_unlike_the_first_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], words: str
) -> None:
    monkeypatch.setitem(globals(), "GIVEN", [IMAGE, wrong])
    samples = open_own(f"{HERE}:Samples", {}, 1, 256)
    with pytest.raises(ValueError, match=words):
        samples[1]
    with pytest.raises(ValueError, match=r"have image, label, scale and no 'tokens'.* which is 32, to 1"):
        open_own(f"{HERE}:Samples", {}, 32, 256)


def test_segments_are_those_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GIVEN", [{"tokens": np.arange(3), "segments": np.asarray(1)}])
    with pytest.raises(ValueError, match=r"int32 of shape \(\) as 'segments'; make it like 'tokens'"):
        open_own(f"{HERE}:Samples", {}, 2, 256)
    assert count_predicted({"image": np.zeros((5, 2)), "segments": np.zeros(5)}) == 5, "an array of the user's own"


def test_micro_batches_of_unequal_weight_make_the_step_of_the_whole_batch() -> None:
    graphdef, params = split_model(Masked())
    tx = optax.sgd(1.0)
    found = []
    # One of four parts has no weight.
    for count in (1, 2, 4):
        step = jax.jit(make_train_step(graphdef, tx, count))
        state, metrics = step(TrainState(params, tx.init(params)), BATCH, jnp.float32(0.5))
        found.append([float(state.params["w"][0]), *(float(metrics[name]) for name in ("loss", "off", "weight"))])
    # Each value is w - 0.5 * -2 mean(x).
    assert found == [pytest.approx([2.0, 14 / 3, 2.0, 3.0])] * 3


def test_an_evaluation_weighs_batches_by_what_they_predict() -> None:
    model = ModelConfig(module=f"{HERE}:Masked")
    island = Island(model, OptimizerConfig(warmup_steps=0), MeshConfig(), seed=0, devices=jax.devices()[:1])
    halves = [{name: value[rows] for name, value in BATCH.items()} for rows in (slice(0, 2), slice(2, 4))]
    assert island.evaluate(halves) == {"loss": pytest.approx(14 / 3), "off": 2.0, "tokens": 3.0}


def test_waiting_for_data_is_not_goodput_and_is_reported_where_it_matters() -> None:
    members: Any = SimpleNamespace(membership=SimpleNamespace(members={}), merged_rounds=1)
    stats = RunStats(("a", "b"), 1, members)
    stats._learners = {"a": LearnerStats(busy_s=8.0), "b": LearnerStats(busy_s=4.0)}
    stats.on_waiting("a", 0.5)
    stats._learners["a"].busy_s = 10.0
    stats.on_waiting("a", 0.0)
    stats.on_waiting("a", float("nan"))
    stats.on_waiting("nobody", 0.5)
    assert [each.waiting for each in stats._learners.values()] == [0.4, 0.0]
    rows = [
        {"learner": name, "state": state, "metrics": {"waiting_for_data": share}}
        for name, state, share in (("a", "active", 0.4), ("b", "active", 0.049), ("c", "gone", 0.9))
    ]
    assert starved(rows) == "; data: a 40% of its time" and starved(rows[1:]) == ""
