"""Adapters above frozen weights, against a few lines of NumPy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.protocol.membership import difference
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.base import base_digest, read_base
from diloco_jax.training.blockwise import from_blocks, to_blocks
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.table import FAMILIES
from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.exchanged import by_name
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import DECODER, LoraConfig, ModelConfig
from diloco_jax.training.models.layers import Linear
from diloco_jax.training.models.lora import Adapter
from diloco_jax.training.models.protocol import join_model, load_model
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.training.variables import frozen_variables
from tests.tools.export.folders import model_of, public
from tests.training.outlines import outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

TOKENS = np.random.default_rng(1).integers(0, 300, (2, 33)).astype(np.int32)
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q", "v", "down"))
# All inputs of linear maps are whole blocks of 64.
WITH_BLOCKS = model_of("llama", dim=64, mlp_dim=64, num_heads=8)


def adapted(family: str = "llama", lora: LoraConfig = LORA, **args: Any) -> ModelConfig:
    """A small model with adapters, without a folder below them."""
    return replace(model_of(family, **args), weights="nowhere", lora=lora)


def loaded(model: ModelConfig) -> Any:
    return load_model(model.module, model.args, 0, model.lora)


def random_like(values: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(0, 0.3, value.shape).astype(np.float32) for path, value in values.items()}


def test_a_linear_map_with_an_adapter_is_that_of_numpy() -> None:
    with nnx.use_eager_sharding(False):
        linear = Linear(8, 6, ("embed", "heads"), "float32", bias=True, rngs=nnx.Rngs(0))
        adapter = Adapter(linear, LoraConfig(rank=2, alpha=5.0), rngs=nnx.Rngs(1))
    linear.adapter = nnx.data(adapter)
    assert adapter.a[...].shape == (8, 2) and not adapter.b[...].any(), "it starts as the map below it"
    assert 0.5 < float(abs(adapter.a[...]).max()) * 8**0.5 <= 1, "as PEFT draws it"
    rng = np.random.default_rng(2)
    x, b, bias = rng.normal(size=(3, 8)), rng.normal(size=(2, 6)), rng.normal(size=6)
    adapter.b[...], linear.bias[...] = jnp.asarray(b, jnp.float32), jnp.asarray(bias, jnp.float32)  # type: ignore
    w, a = (np.asarray(one[...], np.float64) for one in (linear.kernel, adapter.a))
    np.testing.assert_allclose(linear(jnp.asarray(x, jnp.float32)), x @ w + 5 / 2 * x @ a @ b + bias, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"scan_layers": True, "remat": "full"}])
def test_a_model_with_adapters_is_the_model_with_merged_weights(options: dict[str, Any]) -> None:
    model = adapted(**options)
    graphdef, adapters, _ = outline(lambda: loaded(model))
    stacks = 1 if "scan_layers" in options else 2
    assert len(adapters) == 2 * 3 * stacks, "two matrices for each target, in each layer or for all of them"
    below = jax.eval_shape(lambda: frozen_variables(loaded(model)))
    a_and_b, frozen = random_like(adapters, 1), random_like(below, 2)
    plain, like, _ = outline(lambda: load_model(model.module, model.args, 0))
    assert {path: value.shape for path, value in like.items()} == {path: v.shape for path, v in frozen.items()}
    whole = dict(frozen)
    for path in adapters:
        if path.endswith("/adapter/a"):
            linear = path.removesuffix("/adapter/a")
            product = a_and_b[path].astype(np.float64) @ a_and_b[f"{linear}/adapter/b"]
            whole[f"{linear}/kernel"] = (whole[f"{linear}/kernel"] + 7 / 3 * product).astype(np.float32)
    batch = {"tokens": jnp.asarray(TOKENS)}
    loss: Any = lambda p, below: join_model(graphdef, p, below).loss(batch)[0]  # type: ignore  # noqa: E731
    with_adapters = jax.jit(jax.value_and_grad(loss))
    merged = jax.jit(jax.value_and_grad(lambda p: join_model(plain, p).loss(batch)[0]))  # type: ignore
    (loss, gradient), (expected, of_whole) = with_adapters(a_and_b, frozen), merged(whole)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for path in adapters:
        linear, _, which = path.rpartition("/adapter/")
        above = np.asarray(of_whole[f"{linear}/kernel"], np.float64) * 7 / 3
        # The chain rule: W + s A B has the gradients s G B^T and s A^T G.
        other = a_and_b[f"{linear}/adapter/{'b' if which == 'a' else 'a'}"].swapaxes(-1, -2)
        found = above @ other if which == "a" else other @ above
        np.testing.assert_allclose(gradient[path], found, atol=2e-4 * np.abs(found).max())


def test_steps_change_adapters_alone_and_nothing_else_is_in_the_state(tmp_path: Path) -> None:
    model = replace(public(tmp_path, WITH_BLOCKS), lora=LoraConfig(rank=2, base_dtype="int4"))
    island = Island(model, OptimizerConfig(), MeshConfig(), seed=0, devices=jax.devices()[:1])
    before = {path: np.asarray(value) for path, value in island.base.values.items()}
    begun = {path: np.asarray(value) for path, value in island.state.params.items()}
    first = island.evaluate([{"tokens": TOKENS}])["loss"]
    for _ in range(5):
        island.wait(island.step(island.put_batch({"tokens": TOKENS}), 0.05))
    assert island.evaluate([{"tokens": TOKENS}])["loss"] < first - 0.1
    assert all("/adapter/" in path for path in island.shapes), "only these are exchanged"
    assert all("/adapter/" in name or name.endswith("count") for name in by_name(island.state)), "only these are saved"
    assert all((np.asarray(island.state.params[path]) != value).any() for path, value in begun.items())
    assert all((np.asarray(island.base.values[path]) == value).all() for path, value in before.items())


@pytest.mark.parametrize(
    ("base_dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2), ("int8", 1.0625), ("int4", 0.5625)]
)
def test_the_weights_below_are_those_of_the_files_in_their_type(
    tmp_path: Path, base_dtype: Any, element_bytes: float
) -> None:
    model = replace(public(tmp_path, WITH_BLOCKS), lora=LoraConfig(rank=2, base_dtype=base_dtype))
    blueprint = Blueprint(model, OptimizerConfig(), MeshConfig(), jax.devices()[:1], seed=0)
    found = {path: np.asarray(value) for path, value in read_base(blueprint).values.items()}
    theirs = dict(Weights(model.weights).read(model))
    if base_dtype == "float32":
        assert sorted(found) == sorted(theirs) and all((found[path] == theirs[path]).all() for path in theirs)
    kernel = "blocks/0/down/kernel"
    size = sum(value.nbytes for path, value in found.items() if path.startswith(kernel))
    assert size / theirs[kernel].size == element_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_hold_the_nearest_of_their_numbers(bits: int) -> None:
    weight = np.random.default_rng(0).normal(0, 0.1, (2, 128, 3)).astype(np.float32)
    weight[0, :64, 1] = 0
    codes, scales = to_blocks(weight, bits)
    found = np.asarray(from_blocks(jnp.asarray(codes), jnp.asarray(scales), bits))
    limit = {8: 127, 4: 7}[bits]
    for layer, block, column in np.ndindex(2, 2, 3):
        rows = slice(64 * block, 64 * block + 64)
        part = weight[layer, rows, column].astype(np.float64)
        scale = np.abs(part).max() / limit
        nearest = np.rint(part / scale) * scale if scale else part
        np.testing.assert_allclose(found[layer, rows, column], nearest, rtol=1e-6)
    again = to_blocks(jnp.asarray(weight), bits)
    assert (np.asarray(again[0]) == codes).all()
    np.testing.assert_allclose(again[1], scales, rtol=1e-6)


@pytest.mark.parametrize(("number", "family"), list(enumerate(FAMILIES)), ids=FAMILIES)
def test_the_frozen_variables_of_every_family_are_the_tensors_of_its_files(number: int, family: str) -> None:
    # Stacks are no property of a family, so every second one has them.
    model = adapted(family, LoraConfig(rank=2), scan_layers=number % 2 == 1)
    blueprint = Blueprint(model, OptimizerConfig(), MeshConfig(), 1, seed=0)
    assert {path: leaf.shape for path, leaf in blueprint.frozen.items()} == {m.path: m.shape for m in tensors(model)}


@pytest.mark.parametrize(
    ("family", "targets", "known"),
    [("llama", ("q", "wq"), "down, gate, k, out, q, up, v, or all"), ("mixtral", ("gate",), "k, out, q, v, or all")],
)
def test_an_unknown_or_absent_target_is_refused_with_the_list(
    family: str, targets: tuple[str, ...], known: str
) -> None:
    with pytest.raises(ValueError, match=f"'{targets[-1]}', which is not a linear map .* use {known}"):
        outline(lambda: loaded(adapted(family, LoraConfig(rank=2, targets=targets))))


def test_a_long_target_with_control_characters_is_shown_in_brief() -> None:
    with pytest.raises(ValueError, match=r"names 'a\\x1bx+', which is not a linear map") as refused:
        outline(lambda: loaded(adapted(lora=LoraConfig(rank=2, targets=("a\x1b" + "x" * 10_000,)))))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("targets", "largest"), [(("q", "k"), 32), (("k",), 16), (("all",), 32)])
def test_a_rank_above_those_of_all_targets_is_refused(targets: tuple[str, ...], largest: int) -> None:
    outline(lambda: loaded(adapted(lora=LoraConfig(rank=largest, targets=targets))))
    for rank in (largest + 1, 10**19):
        with pytest.raises(ValueError, match=f"rank is {rank}, but .* above {largest}; use {largest} or less"):
            outline(lambda r=rank: loaded(adapted(lora=LoraConfig(rank=r, targets=targets))))


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"rank": -1}, {"alpha": 0.0}, {"rank": 1, "targets": ()}):
        with pytest.raises(ValueError, match=f"model.lora.{list(wrong)[-1]}"):
            LoraConfig(**wrong)
    with pytest.raises(ValueError, match=r"model\.weights names no folder"):
        ModelConfig(lora=LoraConfig(rank=1))
    with pytest.raises(ValueError, match=r"'down' has 48; use bfloat16"):
        outline(lambda: loaded(adapted(lora=LoraConfig(rank=1, base_dtype="int8"))))


def test_islands_with_other_weights_below_are_refused(tmp_path: Path) -> None:
    digests = []
    for seed in (0, 0, 1):
        folder = tmp_path / f"{len(digests)}"
        model = replace(public(folder, model_of("llama"), seed), lora=LORA)
        blueprint = Blueprint(model, OptimizerConfig(), MeshConfig(), jax.devices()[:1], seed=0)
        digests.append(read_base(blueprint).digest)
        assert base_digest(blueprint) == digests[-1]
    run = resolve(RunConfig(model=model), blueprint.shapes, blueprint.kinds)
    syncer, first, same, other = (run.fingerprint("", digest) for digest in ("", *digests))
    assert difference(dict(syncer), first) == difference(dict(syncer), same, dict(first)) == ""
    assert difference(dict(syncer), other, dict(first)) == "base weights"
    plain = RunConfig(model=ModelConfig(module=DECODER))
    shapes = Blueprint(plain.model, OptimizerConfig(), MeshConfig(), 1, seed=0)
    names = dict(resolve(plain, shapes.shapes, shapes.kinds).fingerprint(""))
    assert not {"adapters", "base weights"} & names.keys(), "runs without adapters keep the fingerprint that they had"
