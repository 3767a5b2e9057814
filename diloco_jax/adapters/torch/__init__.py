"""PyTorch loops as islands: `attach(module, optimizer)`.

    with diloco_jax.torch.attach(model, optimizer, samples_per_step=B, tokens_per_step=B * T) as island:
        while island.training:
            loss = train_step(model, optimizer, load(island.next_samples()))
            island.after_step(loss)

Only the fragments that are due are copied between the module and CPU memory; docs/pytorch.md explains it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import torch
from torch import nn

from diloco_jax.adapters.torch.holder import TorchArrays, TorchHolder
from diloco_jax.adapters.torch.moments import Scheduler
from diloco_jax.adapters.torch.names import Names, like_flax
from diloco_jax.runtime.own_loop.attached import AttachedIsland
from diloco_jax.runtime.own_loop.enter import LoopOptions, check_options, enter
from diloco_jax.training.sharding import LogicalAxes

__all__ = ["attach", "like_flax"]


def attach(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    syncer: str | None = None,
    *,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    names: Names | None = None,
    axes: Mapping[str, LogicalAxes] | None = None,
    **options: Unpack[LoopOptions],
) -> AttachedIsland:
    """Make a loop that trains a PyTorch module an island of a run; docs/pytorch.md explains it.

    The parameters with `requires_grad` are exchanged, and changed in place. The optimizer's state, the buffers and the
    schedulers' numbers stay on the island. The island saves them, and restores them after a failure.

    Args:
        module: The module; torch.compile and DistributedDataParallel (of one process) may wrap it.
        optimizer: Its optimizer, or several. If None, only parameters, buffers and schedulers are restored.
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        scheduler: Learning-rate scheduler, or several, saved with the optimizer.
        names: Mapping or function from the name of a parameter, such as `layers.0.weight`, to its path in the run, or
            to (path, order of the axes). By default the path is the name with slashes for dots. `like_flax(module)`
            returns the names of a Flax module.
        axes: Logical axis names of parameters, by path; tables of `nn.Embedding` have ("vocab", None) by default.
        options: As for `diloco_jax.join`. `evaluate` gets the module with the global parameters, in evaluation mode.

    Raises:
        ValueError: An argument is wrong, a parameter cannot be exchanged, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The run is complete.
    """
    check_options(options)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and _world_size() > 1:
        raise ValueError(
            f"torch.distributed has {_world_size()} processes, and an island of PyTorch has one; start one process for "
            "each island"
        )
    if not os.environ.get("JAX_PLATFORMS"):
        # Otherwise JAX, which has nothing to do here, would take the memory of a GPU.
        jax.config.update("jax_platforms", "cpu")
    holder = TorchHolder(module, _several(optimizer), _several(scheduler), names)
    if (function := options.get("evaluate")) is not None:
        options["evaluate"] = _evaluation(holder, function)
    arrays = TorchArrays(holder, axes)
    return AttachedIsland(enter(syncer, arrays, options), arrays)


def _evaluation(holder: TorchHolder, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def evaluate(values: Any) -> Any:
        found = holder.evaluate(function, values)
        if isinstance(found, Mapping):
            return {name: float(value) for name, value in found.items()}
        return float(found)

    return evaluate


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)


def _world_size() -> int:
    return int(torch.distributed.get_world_size())
