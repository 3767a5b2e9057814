"""A user's Flax module with layers at axis 1, which the built-in loop trains and evaluates as with layers at axis 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.core.fragments import FragmentConfig, take
from diloco_jax.core.kinds import Kind
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig, OptimizerName
from diloco_jax.training.sharding import MeshConfig
from tests.training.islands import train

IDS, DIM, LAYERS = 256, 16, 3
MODULE = f"{__name__}:Stacked"


class Stacked(nnx.Module):
    """Layers in a scan, stored at axis `at`."""

    def __init__(self, at: int, rngs: nnx.Rngs) -> None:
        self.at = at
        draw = np.random.default_rng(0)

        def param(*shape: int, names: tuple[str | None, ...], stacked: bool = True) -> nnx.Param[Any]:
            value = 0.2 * draw.normal(size=(LAYERS, *shape) if stacked else shape)
            where = [*names]
            if stacked:
                value = np.moveaxis(value, 0, at)
                where.insert(at, "layers")
            return nnx.Param(jnp.asarray(value, jnp.float32), out_sharding=tuple(where))

        self.table = param(IDS, DIM, names=("vocab", "embed"), stacked=False)
        self.up = param(DIM, 2 * DIM, names=("embed", "mlp"))
        self.down = param(2 * DIM, DIM, names=("mlp", "embed"))
        self.scale = param(DIM, names=(None,))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Stacked:
        return cls(args["at"], rngs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = batch["tokens"]
        layers = [jnp.moveaxis(each[...], self.at, 0) for each in (self.up, self.down, self.scale)]
        x = self.table[...][tokens[:, :-1]]
        for number in range(LAYERS):
            up, down, scale = (each[number] for each in layers)
            x = x + jnp.tanh(x * (1 + scale[None, None]) @ up) @ down
        logits = nnx.log_softmax(x @ self.table[...].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean(), {}


def make(at: int, name: OptimizerName, **mesh: int) -> Island:
    count = int(np.prod([*mesh.values(), 1]))
    optimizer = OptimizerConfig(name=name, weight_decay=0.3)
    return Island(
        ModelConfig(module=MODULE, args={"at": at}),
        optimizer,
        MeshConfig(**mesh),
        seed=0,
        devices=jax.devices()[:count],
    )


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("name", "mesh"), [("adamw", {}), ("muon", {"fsdp": 2, "tensor": 2})])
def test_training_and_fragments_are_those_of_layers_in_front(name: OptimizerName, mesh: dict[str, int]) -> None:
    rng = np.random.default_rng(1)
    batches = [{"tokens": rng.integers(0, IDS, (8, 9), dtype=np.int32)} for _ in range(4)]
    front, second = make(0, name, **mesh), make(1, name, **mesh)
    assert second.shapes == front.shapes and second.shapes["up"] == (LAYERS, DIM, 2 * DIM)
    assert second.kinds == front.kinds == {
        "down": Kind("matrix", 1), "scale": Kind("vector", 1), "table": Kind("table"), "up": Kind("matrix", 1),
    }  # fmt: skip
    assert second.state.params["up"].shape == (DIM, LAYERS, 2 * DIM)
    plans = [FragmentConfig().plan(island.shapes, island.kinds, 2) for island in (front, second)]
    assert plans[0] == plans[1]
    losses = [train(island, batches) for island in (front, second)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    want, got = front.parameters(), second.parameters()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=2e-4, atol=2e-5, err_msg=path)
    for fragment in plans[0].fragments:
        second.adopt(fragment, take(want, fragment))
    for path, value in second.parameters().items():
        np.testing.assert_array_equal(value, want[path], err_msg=path)


def test_the_global_model_is_drawn_and_evaluated_in_its_canonical_form(tmp_path: Any) -> None:
    (tmp_path / "text").write_text("all work and no play " * 400)
    found = []
    for at in (0, 1):
        config: RunConfig = parse(
            {
                "model": {"module": MODULE, "args": {"at": at}},
                "data": {"format": "bytes", "path": str(tmp_path / "text")},
                "train": {"seq_len": 16, "eval_batch_size": 4},
            },
            "the test",
        )
        evaluator = Evaluator(config)
        found.append((dict(evaluator.initial_parameters()), evaluator))
    (front, of_front), (second, of_second) = found
    for path, value in front.items():
        np.testing.assert_array_equal(second[path], value)
    clipped = {path: np.minimum(value, 0.3) for path, value in front.items()}
    results = [each.evaluate(clipped, 2)["loss"] for each in (of_front, of_second)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"'up' has shape \(16, 3, 32\), the model needs \(3, 16, 32\)"):
        of_second.evaluate({**front, "up": front["up"].transpose(1, 0, 2)}, 1)
