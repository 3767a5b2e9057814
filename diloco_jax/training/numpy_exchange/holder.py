"""The owner of an island's parameters, when these are not JAX arrays: it copies pieces to and from CPU memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from diloco_jax.core.fragments import Slice
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.whole_state.moving import MOMENTS
from diloco_jax.training.whole_state.staging import CpuCopy

# The types of parameters.
FLOATS = ("float32", "bfloat16", "float16", "float64")
CpuArray = Shaped[np.ndarray, "..."]


@runtime_checkable
class HostHolder(Protocol):
    """Parameters and other state of an island, wherever their owner keeps them.

    All methods are called between two steps, from the thread that steps.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter, by path."""

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Return the type of every parameter, by path: float32, bfloat16, float16 or float64."""

    @property
    def axes(self) -> Mapping[str, LogicalAxes]:
        """Return the known logical axis names of parameters, by path."""

    def read(self, pieces: Sequence[Slice]) -> Mapping[str, CpuCopy]:
        """Start to copy pieces of the parameters, as they are after the newest step; return the copies by `Slice.key`.

        A piece is `parameter[piece.at]`. The next step must not change the copies.
        """

    def write(self, values: Mapping[Slice, CpuArray]) -> None:
        """Replace pieces of the parameters, in place, before the next step; keep no reference to the values."""

    def moments(self) -> Mapping[str, CpuCopy]:
        """Start to copy the state that stays on the island, such as the optimizer's; return the copies by name.

        Names start with `optimizer/`, or with `other/` for what must travel unrounded, such as batch statistics. Names,
        types and shapes must be the same at every call and on every island with the same program.
        """

    def set_moments(self, leaf: Callable[[str], CpuArray]) -> None:
        """Replace the state that stays on the island; `leaf` returns the array of a name."""


class NumpyArrays:
    """A `HostHolder` of NumPy arrays, which a training loop changes in place.

    Args:
      params: the parameters, by path.
      moments: the optimizer's state, by name; empty if the loop keeps it.
    """

    def __init__(self, params: Mapping[str, CpuArray], moments: Mapping[str, CpuArray] | None = None) -> None:
        for path, value in params.items():
            if not isinstance(value, np.ndarray) or not value.flags.writeable or value.dtype.name not in FLOATS:
                what = (
                    f"{value.dtype}, writable: {value.flags.writeable}"
                    if isinstance(value, np.ndarray)
                    else type(value)
                )
                raise ValueError(f"params[{path!r}] is {what}; give a writable NumPy array of {', '.join(FLOATS)}")
        self._params = dict(params)
        self._moments = dict(moments or {})
        self.shapes = {path: value.shape for path, value in self._params.items()}
        self.dtypes = {path: value.dtype for path, value in self._params.items()}
        self.axes: dict[str, LogicalAxes] = {}

    def read(self, pieces: Sequence[Slice]) -> dict[str, CpuArray]:
        """Copy pieces of the parameters."""
        return {piece.key: self._params[piece.path][piece.at].copy() for piece in pieces}

    def write(self, values: Mapping[Slice, CpuArray]) -> None:
        """Replace pieces of the parameters, in place."""
        for piece, value in values.items():
            self._params[piece.path][piece.at] = value

    def moments(self) -> dict[str, CpuArray]:
        """Copy the optimizer's state."""
        return {MOMENTS + name: np.array(value) for name, value in self._moments.items()}

    def set_moments(self, leaf: Callable[[str], CpuArray]) -> None:
        """Replace the optimizer's state, in place."""
        for name, value in self._moments.items():
            value[...] = leaf(MOMENTS + name)
