"""Variables of a module beside its parameters: random streams, and state that its forward pass changes.

Streams (dropout, the carry of an `nnx.RNN`) are created again for every step. Their seeds are the run's seed and the
position in the data of the batch's first sample:

    key of stream i = fold(fold(fold(fold(key(seed), "draw"), low), high), i)        position = 2^32 high + low

A batch belongs to one learner, so no two islands draw the same numbers. Reading the same batch again draws the same
numbers, in a replay, on a returning island, and on any number of devices. So streams need not be saved or sent.

Other state (batch statistics, counters) belongs to the island's state. It is saved and sent with this state, and is
never merged.

Frozen variables (the weights below adapters) never change. Every island reads them from a folder at its start, so they
are neither saved nor sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

from diloco_jax.training.state import Variables

# The seed of a step's random streams: low and high half of a position.
Draw = UInt32[Array, "2"]

# Separates the keys of streams from the keys that drew the parameters.
_TAG = int.from_bytes(b"draw", "little")
# The attributes that `Module.train` and `Module.eval` set.
_MODES = ("deterministic", "use_running_average")


class Frozen(nnx.Variable[Any]):
    """A value that the model reads and no step changes, such as a weight below an adapter."""


def draw_of(position: int) -> UInt32[np.ndarray, "2"]:
    """Return the low and the high half of a position in the global order of samples."""
    return np.array([position & 0xFFFFFFFF, position >> 32], np.uint32)


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the path of a variable inside its module, for example `blocks/0/down/kernel`."""
    return "/".join(map(str, keys))


def prepare(model: nnx.Module) -> None:
    """Remove by-products of building a module, and set training mode where no mode is set.

    Layers such as `nnx.MultiHeadAttention` have no mode until `Module.train` or `Module.eval` is called.
    """
    nnx.pop(model, nnx.Intermediate)
    for _, module in nnx.iter_modules(model):
        for mode in _MODES:
            if getattr(module, mode, False) is None:
                setattr(module, mode, False)


def other_variables(model: nnx.Module) -> tuple[Variables, Variables]:
    """Return state and streams of a module by path: all variables that are not trained, frozen, or left by a call.

    Raises:
      ValueError: a variable does not hold exactly one array.
    """
    state: Variables = {}
    streams: Variables = {}
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, Frozen, nnx.Intermediate)))
    for keys, variable in nnx.to_flat_state(rest):
        path, value = path_of(keys), variable.get_value()
        if not isinstance(value, jax.Array | np.ndarray | bool | int | float):
            raise ValueError(
                f"variable '{path}' of the model holds a {type(value).__name__}; let every variable hold one array"
            )
        array = jnp.asarray(value)
        if isinstance(variable, nnx.RngState) or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            streams[path] = array
        else:
            # astype gives an array from a Python number a fixed dtype.
            state[path] = array.astype(array.dtype)
    return state, streams


def frozen_variables(model: nnx.Module) -> Variables:
    """Return the frozen variables of a module by path."""
    return {path_of(keys): variable[...] for keys, variable in nnx.to_flat_state(nnx.state(model, Frozen))}


def state_after(model: nnx.Module, before: Mapping[str, Shaped[Array, "..."]]) -> Variables:
    """Return the state of a module after a call, in the dtypes from before; ValueError if names or shapes changed."""
    after = other_variables(model)[0]
    if different := sorted(after.keys() ^ before.keys()):
        raise ValueError(
            f"the model's loss added or removed the variable '{different[0]}'; make all variables in from_config, or "
            "derive those that need not stay from nnx.Intermediate"
        )
    for path, value in before.items():
        if after[path].shape != value.shape:
            raise ValueError(
                f"the model's loss changed the shape of variable '{path}' from {value.shape} to {after[path].shape}; "
                "a variable must keep its shape"
            )
    return {path: after[path].astype(value.dtype) for path, value in before.items()}


@dataclass(frozen=True, slots=True)
class Streams:
    """The random streams of a model."""

    # The seed of the run.
    seed: int = 0
    kinds: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    """Dtype and shape of the streams' variables by path: random keys, and counters of draws."""

    def at(self, draw: Draw | None, part: int | Array = 0) -> Variables:
        """Return the streams of a step, or of its micro-batch `part`; call this inside a program.

        Args:
          draw: the result of `draw_of`; None only for a model without streams.

        Raises:
          ValueError: a stream's keys are not of JAX's default kind.
        """
        if not self.kinds:
            return {}
        assert draw is not None, "a model with random streams needs the position of its batch"
        base = jax.random.key(self.seed)
        for number in (_TAG, draw[0], draw[1], part):
            base = jax.random.fold_in(base, number)
        streams: Variables = {}
        for index, (path, kind) in enumerate(sorted(self.kinds.items())):
            if not jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
                # A counter of draws starts at 0.
                streams[path] = jnp.zeros(kind.shape, kind.dtype)
                continue
            if kind.dtype != base.dtype:
                raise ValueError(
                    f"random stream '{path}' has keys of kind {kind.dtype}, but {base.dtype} is what JAX makes here; "
                    "make streams from the `rngs` that from_config gets, or set jax_default_prng_impl"
                )
            key = jax.random.fold_in(base, index)
            streams[path] = jax.random.split(key, kind.shape) if kind.shape else key
        return streams
