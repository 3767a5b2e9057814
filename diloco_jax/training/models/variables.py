"""Variables of a module beside its parameters: random streams, and state that its own forward pass changes.

Streams (dropout, the carry of an `nnx.RNN`) are made anew for every step, from the run's seed and the position in the
data at which the step's batch begins:

    key of stream i = fold(fold(fold(fold(key(seed), "draw"), low), high), i)        position = 2^32 high + low

A batch belongs to one learner, so no two islands draw the same, and whoever reads the same batch again draws the same:
a replay, a returning island, any number of devices. Nothing of a stream has to be kept or sent.

Everything else (batch statistics, counters) is the island's own: it is part of its state and goes where that goes, to
the disk and to a returning island. It is never merged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

Variables = dict[str, Shaped[Array, "..."]]  # path -> array
Draw = UInt32[Array, "2"]  # what a step's random streams are made from: low and high half of a position

_TAG = int.from_bytes(b"draw", "little")  # keeps streams apart from the keys that drew the parameters
_MODES = ("deterministic", "use_running_average")  # what `Module.train` and `Module.eval` set


def draw_of(position: int) -> UInt32[np.ndarray, "2"]:
    """Return both halves of a position in the global order of the samples."""
    return np.array([position & 0xFFFFFFFF, position >> 32], np.uint32)


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the path of a variable inside its module, for example `blocks/0/down/kernel`."""
    return "/".join(map(str, keys))


def prepare(model: nnx.Module) -> None:
    """Forget what building the module left behind, and train where nobody said whether to.

    Layers such as `nnx.MultiHeadAttention` leave the mode open until `Module.train` or `Module.eval` is called.
    """
    nnx.pop(model, nnx.Intermediate)
    for _, module in nnx.iter_modules(model):
        for mode in _MODES:
            if getattr(module, mode, False) is None:
                setattr(module, mode, False)


def other_variables(model: nnx.Module) -> tuple[Variables, Variables]:
    """Return state and streams of a module, by path: all variables but parameters and by-products of a call.

    A ValueError names a variable that holds something else than one array.
    """
    state: Variables = {}
    streams: Variables = {}
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.Intermediate)))
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
            state[path] = array.astype(array.dtype)  # a Python number has no dtype of its own until then
    return state, streams


def state_after(model: nnx.Module, before: Mapping[str, Shaped[Array, "..."]]) -> Variables:
    """Return the state of a module after a call, in its dtypes before that; ValueError if names or shapes differ."""
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

    seed: int = 0  # of the run
    kinds: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    """Dtype and shape of the streams' variables, by path: keys, and counts of what was drawn."""

    def at(self, draw: Draw | None, part: int | Array = 0) -> Variables:
        """Return the streams of a step, or of its micro-batch `part`; to be called inside of a program.

        `draw` is of `draw_of`; only a model without streams needs none.

        Raises:
          ValueError: a stream has keys of another kind than JAX's usual one.
        """
        if not self.kinds:
            return {}
        assert draw is not None, "a model with random streams needs to know what to draw from"
        base = jax.random.key(self.seed)
        for number in (_TAG, draw[0], draw[1], part):
            base = jax.random.fold_in(base, number)
        streams: Variables = {}
        for index, (path, kind) in enumerate(sorted(self.kinds.items())):
            if not jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
                streams[path] = jnp.zeros(kind.shape, kind.dtype)  # nothing was drawn yet
                continue
            if kind.dtype != base.dtype:
                raise ValueError(
                    f"random stream '{path}' has keys of kind {kind.dtype}, but {base.dtype} is what JAX makes here; "
                    "make streams from the `rngs` that from_config gets, or set jax_default_prng_impl"
                )
            key = jax.random.fold_in(base, index)
            streams[path] = jax.random.split(key, kind.shape) if kind.shape else key
        return streams
