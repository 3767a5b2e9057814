"""The parameters and the state of a PyTorch module, as an island exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from diloco_jax.adapters.torch.copies import DTYPES, CpuArray, as_tensor, fill, start_copy
from diloco_jax.adapters.torch.moments import Scheduler, TorchMoments
from diloco_jax.adapters.torch.names import Names, placed_parameters, plain, tables, unwrapped
from diloco_jax.core.fragments import Slice, whole
from diloco_jax.runtime.own_loop.cpu_arrays import CpuArrays
from diloco_jax.training.island_state import IslandState
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.whole_state.staging import CpuCopy


class TorchHolder:
    """A `HostHolder` of a module's parameters, which the loop trains in place.

    Args:
        module: The module, in any wrapper.
        optimizers: Its optimizers.
        schedulers: Learning-rate schedulers.
        names: Names and layouts in the run, as for `attach`.

    Raises:
        ValueError: A parameter or an optimizer's state cannot be exchanged or saved.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Scheduler] = (),
        names: Names | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"the module is a {type(module).__name__}; give a torch.nn.Module")
        for scheduler in schedulers:
            if not isinstance(scheduler, Scheduler):
                raise ValueError(
                    f"scheduler is a {type(scheduler).__name__}; give an object with state_dict and "
                    "load_state_dict, or a list of them"
                )
        self._given = module
        self._module = unwrapped(module)
        self._placed = placed_parameters(self._module, names)
        self._moments = TorchMoments(self._module, optimizers, schedulers)
        self.shapes = {path: tuple(placed.tensor.shape) for path, placed in self._placed.items()}
        self.dtypes = {path: DTYPES[placed.parameter.dtype] for path, placed in self._placed.items()}
        of_tables = tables(self._module)
        self.axes: dict[str, LogicalAxes] = {
            path: ("vocab", None) for path, placed in self._placed.items() if placed.name in of_tables
        }

    def read(self, pieces: Sequence[Slice]) -> dict[str, CpuCopy]:
        """Start to copy pieces of the parameters; ValueError if the module has other parameters by now."""
        for path in {part.path for part in pieces}:
            self._check_present(path)
        return {part.key: start_copy(self._placed[part.path].piece(part)) for part in pieces}

    def write(self, values: Mapping[Slice, CpuArray]) -> None:
        """Replace pieces of the parameters, in place: optimizers and views keep them."""
        for part, value in values.items():
            fill(self._placed[part.path].piece(part), value)

    def _check_present(self, path: str) -> None:
        placed = self._placed[path]
        try:
            present = self._module.get_parameter(placed.full_name)
        except AttributeError:
            present = None
        if present is not placed.parameter:
            raise ValueError(
                f"parameter {placed.name!r} is another one than at attach(), or missing, so its training would never "
                "reach the run; change parameters in place (parameter.data.copy_), or attach after the replacement"
            )

    def moments(self) -> dict[str, CpuCopy]:
        """Start to copy the optimizers' state, the buffers and the schedulers' numbers."""
        return self._moments.read()

    def set_moments(self, leaf: Callable[[str], CpuArray]) -> None:
        """Replace the optimizers' state, the buffers and the schedulers' numbers."""
        self._moments.write(leaf)

    def tensors(self, values: Mapping[str, CpuArray]) -> dict[str, torch.Tensor]:
        """Return values by path as tensors on the CPU, by the module's names and in its layouts; shared ones twice."""
        by_parameter = {}
        for path, placed in self._placed.items():
            own = placed.own(as_tensor(np.array(values[path]))).to(placed.parameter.dtype)
            by_parameter[id(placed.parameter)] = own
        named = self._module.named_parameters(remove_duplicate=False)
        return {plain(name): by_parameter[id(value)] for name, value in named if id(value) in by_parameter}

    def evaluate(self, function: Callable[[nn.Module], Any], values: Mapping[str, CpuArray]) -> Any:
        """Call a function of the module, in evaluation mode, with these parameters for the time of the call."""
        parts = {path: whole(path) for path in self._placed}
        # Clones on the same device, because copies to CPU memory take long.
        before = {path: placed.parameter.detach().clone() for path, placed in self._placed.items()}
        modes = [(inner, inner.training) for inner in self._given.modules()]
        try:
            self.write({parts[path]: np.asarray(values[path]) for path in parts})
            self._given.eval()
            with torch.no_grad():
                return function(self._given)
        finally:
            for inner, mode in modes:
                inner.training = mode
            with torch.no_grad():
                for path, value in before.items():
                    self._placed[path].parameter.detach().copy_(value)


class TorchArrays:
    """The arrays of a module, for `AttachedIsland`: those of a `TorchHolder`, in PyTorch's form for the user."""

    def __init__(self, holder: TorchHolder, axes: Mapping[str, LogicalAxes] | None = None) -> None:
        self._holder = holder
        self._arrays = CpuArrays(holder, axes)
        self.forms, self.shapes, self.kinds = self._arrays.forms, self._arrays.shapes, self._arrays.kinds
        self.has_moments = self._arrays.has_moments
        self.devices: list[jax.Device] = []

    @property
    def initial(self) -> Mapping[str, CpuCopy]:
        """Return copies of the parameters, by path."""
        return self._arrays.initial

    def exchanged(self, wire: Any, rebase: bool) -> IslandState:
        """Return the exchanged state; arguments as for `Island`."""
        return self._arrays.exchanged(wire, rebase)

    def take_loaded(self, held: IslandState) -> None:
        """Do nothing: the module has what was loaded."""

    def metrics(self, given: Any) -> Any:
        """Start to copy tensors among a step's metrics to CPU memory."""
        if isinstance(given, Mapping):
            return {name: self.metrics(value) for name, value in given.items()}
        return start_copy(given) if isinstance(given, torch.Tensor) else given

    def tree(self, params: Mapping[str, CpuArray]) -> dict[str, CpuArray]:
        """Return parameters by path, for `TorchHolder.evaluate`."""
        return dict(params)

    def placed(self, values: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return parameters by the module's names."""
        return self._holder.tensors(self._arrays.placed(values))
