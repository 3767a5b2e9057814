"""The arrays of a loop that has no JAX arrays, as an island exchanges them: NumPy, PyTorch or any other library."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco_jax.core.fragments import whole
from diloco_jax.core.kinds import canonical_forms
from diloco_jax.runtime.own_loop.trees import NAME_THE_AXES
from diloco_jax.training.island_state import IslandState
from diloco_jax.training.numpy_exchange.holder import FLOATS, CpuArray, HostHolder
from diloco_jax.training.numpy_exchange.state import NumpyState
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.whole_state.staging import CpuCopy


class CpuArrays:
    """The arrays of a `HostHolder`, for `attach`.

    Args:
        holder: The owner of the arrays.
        axes: Logical axis names of parameters by path, in place of those of the holder.

    Raises:
        ValueError: There are no parameters, one is not of floats, or `axes` names another one.
    """

    def __init__(self, holder: HostHolder, axes: Mapping[str, LogicalAxes] | None = None) -> None:
        self._holder = holder
        stored = {path: tuple(shape) for path, shape in sorted(holder.shapes.items(), key=lambda item: str(item[0]))}
        if not stored:
            raise ValueError("there are no parameters; give the arrays that the optimizer updates")
        if unknown := sorted(set(axes or {}) - set(stored)):
            raise ValueError(
                f"axes names {unknown[0]!r}, which is not a parameter; they are {', '.join([*stored][:8])}"
            )
        if odd := [path for path in stored if not isinstance(path, str) or path not in holder.dtypes]:
            raise ValueError(f"parameter {odd[0]!r} has no type, or its path is not a text; give both for each path")
        for path, dtype in holder.dtypes.items():
            if not isinstance(dtype, np.dtype) or dtype.name not in FLOATS:
                raise ValueError(f"parameter {path!r} is {dtype}; it must be one of {', '.join(FLOATS)}")
        named = {**holder.axes, **(axes or {})}
        self.forms = canonical_forms(stored, named, NAME_THE_AXES)
        self.shapes = {path: form.shape for path, form in self.forms.items()}
        self.kinds = {path: form.kind for path, form in self.forms.items()}
        self.devices: list[jax.Device] = []
        self.has_moments = bool(holder.moments())

    @property
    def initial(self) -> Mapping[str, CpuCopy]:
        """Return copies of the parameters, by path."""
        return self._holder.read([whole(path) for path in self.shapes])

    def exchanged(self, wire: Any, rebase: bool) -> IslandState:
        """Return the exchanged state, which reads from the holder and writes to it; arguments as for `Island`."""
        return NumpyState(self._holder, self.forms, wire, rebase)

    def take_loaded(self, held: IslandState) -> None:
        """Do nothing: the holder has what was loaded."""

    def metrics(self, given: Any) -> Any:
        """Return a step's metrics as they are."""
        return given

    def tree(self, params: Mapping[str, CpuArray]) -> dict[str, CpuArray]:
        """Return parameters by path."""
        return dict(params)

    def placed(self, values: Mapping[str, np.ndarray]) -> dict[str, CpuArray]:
        """Return canonical values as parameters by path, in the types and layouts of the holder."""
        dtypes = self._holder.dtypes
        return {path: self.forms[path].stored(value).astype(dtypes[path]) for path, value in values.items()}
