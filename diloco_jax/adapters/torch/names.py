"""Names and layouts of a module's parameters in the run.

A parameter `layers.0.weight` is called `layers/0/weight` in the run, unless `names` says otherwise. An island of
another library may have the same tensor under another name, with its axes in another order: a PyTorch `Linear` has
[out, in], a Flax `Linear` [in, out].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from diloco_jax.adapters.torch.copies import DTYPES
from diloco_jax.core.fragments import Slice
from diloco_jax.training.numpy_exchange.holder import FLOATS

# A path in the run; or a path, and the parameter's axes in the order of the run's tensor.
Target = str | tuple[str, tuple[int, ...]]
Names = Mapping[str, Target] | Callable[[str], Target]
# Parts of names that wrappers add.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


class Placed(NamedTuple):
    """A parameter, and its place in the run."""

    # Its name in the module, without the parts that wrappers add.
    name: str
    # Its name in the module as it is now.
    full_name: str
    parameter: nn.Parameter
    # Its axes in the order of the run's tensor; None for the module's own order.
    order: tuple[int, ...] | None

    @property
    def tensor(self) -> torch.Tensor:
        """Return the parameter's memory, in the layout of the run."""
        plain = self.parameter.detach()
        return plain if self.order is None else plain.permute(self.order)

    def piece(self, part: Slice) -> torch.Tensor:
        """Return a piece of the parameter's memory, in the layout of the run."""
        return self.tensor[part.at]

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the run in the module's own layout."""
        if self.order is None:
            return value
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return value.permute(back).contiguous()


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers that add a prefix to all names: torch.compile, DistributedDataParallel."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def plain(name: str) -> str:
    """Return a name without the parts that wrappers of inner modules add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def placed_parameters(module: nn.Module, names: Names | None = None) -> dict[str, Placed]:
    """Return the trained parameters of an unwrapped module, by path in the run; a shared one once.

    Args:
        names: From the name of a parameter to its path in the run, and its axes in the order of the run. A mapping may
            leave out parameters, which keep their own names with slashes for dots.

    Raises:
        ValueError: A parameter cannot be exchanged, a name is wrong, or two parameters have one path.
    """
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise ValueError("the module has no parameter with requires_grad; nothing would be trained")
    known = {plain(name) for name, _ in module.named_parameters()}
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise ValueError(f"names is a {type(names).__name__}; give a mapping from names of parameters, or a function")
    if isinstance(names, Mapping) and (unknown := sorted(set(names) - known)):
        raise ValueError(
            f"names has {unknown[0]!r}, which is not a parameter; they are {', '.join([*map(plain, trained)][:8])}"
        )
    found: dict[str, Placed] = {}
    for full_name, parameter in trained.items():
        name = plain(full_name)
        _check(name, parameter)
        target: Any = names(name) if callable(names) else (names or {}).get(name, name.replace(".", "/"))
        path, order = _target(name, target)
        if order is not None and sorted(order) != list(range(parameter.ndim)):
            raise ValueError(f"names[{name!r}] has the axes {order}; list each of 0 to {parameter.ndim - 1} once")
        if path in found:
            raise ValueError(f"{found[path].name!r} and {name!r} have the one path {path!r}; give each its own")
        found[path] = Placed(name, full_name, parameter, order)
    return dict(sorted(found.items()))


def like_flax(module: nn.Module) -> dict[str, Target]:
    """Return names and layouts as in a Flax NNX module with the same attributes, for `names`.

    Kernels of `Linear` and convolutions are [..., in, out] there; tables are called `embedding`, and scales of norms
    `scale`.
    """
    norms = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found: dict[str, Target] = {}
    for prefix, inner in unwrapped(module).named_modules():
        for name, value in inner.named_parameters(recurse=False):
            full = plain(f"{prefix}.{name}" if prefix else name)
            folder = full.replace(".", "/").removesuffix(name)
            if name != "weight":
                found[full] = folder + name
            elif isinstance(inner, nn.Linear):
                found[full] = folder + "kernel", (1, 0)
            elif isinstance(inner, convolutions):
                found[full] = folder + "kernel", (*range(2, value.ndim), 1, 0)
            elif isinstance(inner, nn.Embedding):
                found[full] = folder + "embedding"
            elif isinstance(inner, norms):
                found[full] = folder + "scale"
            else:
                found[full] = folder + name
    return found


def tables(module: nn.Module) -> set[str]:
    """Return the names of parameters that are tables: a row for each token or category."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [name for name, inner in module.named_modules() if isinstance(inner, kinds)]
    return {plain(f"{name}.weight" if name else "weight") for name in found}


def _target(name: str, target: Any) -> tuple[str, tuple[int, ...] | None]:
    match target:
        case str(path):
            return path, None
        case str(path), tuple() | list() as order:
            return path, tuple(order)
    raise ValueError(f"names[{name!r}] is {target!r}; give a path, or a path and a tuple with the order of the axes")


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"parameter {name!r} has no shape yet; run the module once before attach()")
    if _is_distributed(parameter) or "_fsdp" in name or type(parameter).__name__ == "FlatParameter":
        raise ValueError(
            f"parameter {name!r} is sharded over processes (FSDP or DTensor), which is not supported; use one process "
            "for an island, or JAX for islands of several hosts"
        )
    if parameter.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device and has no values; initialise it before attach()")
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter {name!r} has the layout {parameter.layout}; only dense parameters can be merged")
    dtype = DTYPES.get(parameter.dtype)
    if dtype is None or dtype.name not in FLOATS:
        raise ValueError(f"parameter {name!r} is {parameter.dtype}; only {', '.join(FLOATS)} can be merged")


def _is_distributed(parameter: nn.Parameter) -> bool:
    # The import takes seconds, and a program with such a tensor has done it.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)
