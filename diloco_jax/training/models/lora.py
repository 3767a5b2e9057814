"""Adapters of low rank (LoRA, arXiv 2106.09685) on a built model: only they are trained, and all other weights frozen.

    y = x W + (alpha / r) x A B          W [in, out] is frozen;  A [in, r] and B [r, out] are trained

A is drawn uniformly from +-1 / sqrt(in), as in PEFT, and B is zero, so that the model starts as the public one. In a
stack of layers, A and B have the axis `layers` in front, as W does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from diloco_jax.core.kinds import LAYER_AXES
from diloco_jax.training.blockwise import BITS, BLOCK, Blockwise
from diloco_jax.training.models.config import LoraConfig
from diloco_jax.training.models.layers import Linear
from diloco_jax.training.sharding import LogicalAxes, gather
from diloco_jax.training.variables import Frozen, path_of

# The target that stands for all linear maps of a layer.
ALL = "all"
# The first key of the paths of layers.
BLOCKS = "blocks"
# Separates the keys of adapters from those of the model.
_TAG = int.from_bytes(b"lora", "little")
# Characters of a target that an error shows.
NAME_SHOWN = 100


class Adapter(nnx.Module):
    """The trained change of a linear map, (alpha / r) x A B, or of the same map of several stacked layers."""

    def __init__(self, linear: Linear, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
        *stack, n_in, n_out = linear.kernel[...].shape
        names: LogicalAxes = ("layers",) * len(stack)
        into, out = linear.names
        bound = n_in**-0.5

        def draw(key: Array, shape: tuple[int, ...]) -> Array:
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        zeros = nnx.initializers.zeros_init()
        first = nnx.with_partitioning(draw, (*names, into, None))
        second = nnx.with_partitioning(zeros, (*names, None, out))
        self.a = nnx.Param(first(rngs.params(), (*stack, n_in, config.rank)))
        self.b = nnx.Param(second(rngs.params(), (*stack, config.rank, n_out)))
        self.names = linear.names
        self.scale = config.alpha / config.rank
        self.dtype = linear.dtype

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        into, out = self.names
        low = x @ gather(self.a[...].astype(self.dtype), into, None)
        return low @ gather(self.b[...].astype(self.dtype), None, out) * self.scale


def axes_of(variable: nnx.Variable[Any]) -> LogicalAxes:
    """Return the names of a variable's axes, with None for axes without a name."""
    names = variable.get_metadata().get("out_sharding")
    return tuple(names) if names else (None,) * variable[...].ndim


def linear_maps(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the linear maps of a model's layers with their names within a layer, such as q or down."""
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and keys[0] == BLOCKS:
            # The keys of a layer are `blocks`, or `blocks` and a number.
            yield path_of(keys[2 if isinstance(keys[1], int) else 1 :]), module


def adapt(model: nnx.Module, config: LoraConfig, seed: int) -> None:
    """Add adapters to the linear maps of a model that the config names, and freeze all its other parameters.

    Args:
      seed: seed of the adapters' initial values.

    Raises:
      ValueError: no layer of the model has a linear map of a target's name, the rank is larger than that of every
        target, or a map is not a multiple of blocks.
    """
    maps = sorted(linear_maps(model), key=lambda named: named[0])
    known = list(dict.fromkeys(name for name, _ in maps))
    for target in config.targets:
        if target not in (ALL, *known):
            raise ValueError(
                f"model.lora.targets names {target[:NAME_SHOWN]!r}, which is not a linear map of the model's layers; "
                f"use {', '.join(known) or 'another model'}, or {ALL}"
            )
    targets = [linear for name, linear in maps if name in config.targets or ALL in config.targets]
    # A matrix has at most the rank of its smaller side.
    limit = max((min(linear.kernel[...].shape[-2:]) for linear in targets), default=config.rank)
    if config.rank > limit:
        raise ValueError(
            f"model.lora.rank is {config.rank}, but no linear map in model.lora.targets has a rank above {limit}; use "
            f"{limit} or less"
        )
    for name, linear in maps if config.base_dtype in BITS else ():
        n_in = linear.kernel[...].shape[-2]
        if n_in % BLOCK:
            raise ValueError(
                f"model.lora.base_dtype {config.base_dtype} stores blocks of {BLOCK} inputs, but the linear map "
                f"'{name}' has {n_in}; use bfloat16"
            )
        blocks = Blockwise(linear.kernel[...], axes_of(linear.kernel), BITS[config.base_dtype])
        linear.kernel = nnx.data(blocks)
    _freeze(model, config)
    rngs = nnx.Rngs(params=jax.random.fold_in(jax.random.key(seed), _TAG))
    for linear in targets:
        linear.adapter = nnx.data(Adapter(linear, config, rngs=rngs))


def _freeze(model: nnx.Module, config: LoraConfig) -> None:
    """Turn all parameters of a model into frozen variables of the config's type.

    Vectors, such as the scales of norms, keep their type: they are small, and a norm computes with them as they are.
    """
    kind = jnp.float32 if config.base_dtype == "float32" else jnp.bfloat16
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        owner: Any = model
        for key in keys[:-1]:
            owner = owner[key] if isinstance(key, int) else getattr(owner, str(key))
        names = axes_of(variable)
        vector = variable[...].ndim - (names[:1] != () and names[0] in LAYER_AXES) < 2
        value = variable[...] if vector else variable[...].astype(kind)
        setattr(owner, str(keys[-1]), Frozen(value, out_sharding=names))
