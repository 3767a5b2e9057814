"""Bring your own model: a module from outside trains, and one that cannot is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import join_model, load_model, split_model
from tests.training.outlines import outline


class Bigram(nnx.Module):
    """The smallest language model: one table of logits. Written like a user would, without any import of ours."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("vocab", None))
        self.table = nnx.Param(init(rngs.params(), (vocab_size, vocab_size)))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Bigram:
        return cls(args["vocab_size"], rngs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        logits = self.table[...][batch["tokens"][:, :-1]]
        picked = jnp.take_along_axis(nnx.log_softmax(logits), batch["tokens"][:, 1:, None], axis=-1)
        return -picked.mean(), {"accuracy": (logits.argmax(-1) == batch["tokens"][:, 1:]).mean()}


class WithoutLoss(nnx.Module):
    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> WithoutLoss:
        return cls()


class WithoutParameters(WithoutLoss):
    def loss(self, batch: Mapping[str, Any]) -> None: ...


HERE = __name__


def test_a_module_from_outside_loads_and_comes_apart_and_together_again() -> None:
    model = load_model(f"{HERE}:Bigram", {"vocab_size": 5}, seed=1)
    graphdef, params = split_model(model)
    assert {path: v.shape for path, v in params.items()} == {"table": (5, 5)}
    batch = {"tokens": np.array([[0, 1, 2]], np.int32)}
    loss, metrics = jax.jit(lambda table, batch: join_model(graphdef, {"table": table}).loss(batch))(
        np.zeros((5, 5), np.float32), batch
    )
    assert float(loss) == pytest.approx(np.log(5)) and "accuracy" in metrics


def test_seeds_decide_the_parameters() -> None:
    tables = [split_model(load_model(f"{HERE}:Bigram", {"vocab_size": 5}, s))[1]["table"] for s in (1, 1, 2)]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])


def test_paths_and_axes_of_the_decoder() -> None:
    args = {"dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 8}
    axes = outline(lambda: load_model(ModelConfig().module, args, 0)).axes
    assert axes["blocks/0/down/kernel"] == ("mlp", "embed")
    assert axes["embed/embedding"] == ("vocab", "embed")
    assert axes["blocks/1/norm_mlp/scale"] == (None,)
    scanned = outline(lambda: load_model(ModelConfig().module, {**args, "scan_layers": True}, 0)).axes
    assert scanned["blocks/down/kernel"] == ("layers", "mlp", "embed")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (f"{HERE}:np", "not a flax.nnx.Module"),
        (f"{HERE}:WithoutLoss", "lacks loss"),
        (f"{HERE}:WithoutParameters", "no nnx.Param; there is nothing to train"),
    ],
)
def test_what_cannot_be_trained_is_refused(module: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(module, {"vocab_size": 5}, 0)


@pytest.mark.parametrize("args", [{"dim": "big"}, {"dim": True}, {"layers": 2}])
def test_wrong_arguments_are_named(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"args\.dim is .* must be a int|args\.layers is unknown.*num_layers"):
        load_model(ModelConfig().module, args, 0)
