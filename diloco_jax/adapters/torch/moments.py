"""The state that stays on an island: tensors and numbers of optimizers, buffers of the module, numbers of schedulers.

Most optimizers create their state at the first step. The layout of a saved state must be known before, so each new
optimizer makes one step on zeros of the parameters' shapes (`_foreseen`), and what it creates there is only described.
The optimizer itself is not touched until a state is loaded.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from diloco_jax.adapters.torch.copies import DTYPES, CpuArray, fill, start_copy
from diloco_jax.adapters.torch.names import plain
from diloco_jax.training.exchanged import OPTIMIZER, OTHER
from diloco_jax.training.whole_state.staging import CpuCopy

BUFFERS, SCHEDULER, GROUPS = OTHER + "buffers/", OTHER + "scheduler/", OTHER + "groups/"
# The entry of an optimizer's state that counts steps.
STEP = "step"


@runtime_checkable
class Scheduler(Protocol):
    """A learning-rate scheduler, or anything else whose state is a tree of numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Replace the state."""


class FirstTensor(NamedTuple):
    """A tensor of a new optimizer's state, which has one number everywhere."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    number: float

    def make(self) -> torch.Tensor:
        """Return the tensor."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return empty.fill_(self.number)


class Slot(NamedTuple):
    """An entry of an optimizer's state for one parameter."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str
    # The entry as a new optimizer has it.
    first: FirstTensor | bool | int | float

    def copy(self) -> CpuCopy:
        """Start to copy the entry; the first one if the parameter has made no step."""
        value = self.optimizer.state.get(self.parameter, {}).get(self.key, self.first)
        if isinstance(value, FirstTensor):
            return np.full(value.shape, value.number, DTYPES[value.dtype])
        return start_copy(value) if isinstance(value, torch.Tensor) else np.array(value)

    def set(self, value: CpuArray) -> None:
        """Replace the entry, in place if there is one."""
        state = self.optimizer.state[self.parameter]
        if not isinstance(self.first, FirstTensor):
            state[self.key] = type(self.first)(value.item())
            return
        if not isinstance(state.get(self.key), torch.Tensor):
            state[self.key] = self.first.make()
        fill(state[self.key], value)


class Group(NamedTuple):
    """The numbers of one of an optimizer's parameter groups: its learning rate, its betas, and what it counts there."""

    optimizer: torch.optim.Optimizer
    place: int
    # What the group has at the start; a scheduler that is made later may add entries. Switches stay those of the loop.
    first: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, place: int) -> Group:
        """Return the numbers of a group, by its place: `load_state_dict` replaces the groups of an optimizer."""
        group = optimizer.param_groups[place]
        others = {key: value for key, value in group.items() if key != "params" and not isinstance(value, bool)}
        return cls(optimizer, place, {key: value for key, value in others.items() if list(_numbers(value))})

    def numbers(self) -> dict[str, Any]:
        """Return the numbers by key; the first ones where an entry has another form by now."""
        group = self.optimizer.param_groups[self.place]
        now = {key: group.get(key) for key in self.first}
        return {key: now[key] if _form(now[key]) == _form(value) else value for key, value in self.first.items()}

    def set(self, numbers: Mapping[str, Any]) -> None:
        """Replace the numbers; a tensor is changed in place, because a compiled optimizer reads it."""
        group = self.optimizer.param_groups[self.place]
        for key, value in numbers.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


class TorchMoments:
    """The state of a training loop beside its parameters, by name.

    Args:
        module: The unwrapped module.
        optimizers: Its optimizers.
        schedulers: Learning-rate schedulers whose numbers are saved as well.

    Raises:
        ValueError: An optimizer's state cannot be foreseen, or has an entry that is neither tensor nor number; or an
            argument is another object.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Scheduler] = ()
    ) -> None:
        self._module = module
        alone = len(schedulers) == 1
        self._schedulers = {SCHEDULER if alone else f"{SCHEDULER}{n}/": each for n, each in enumerate(schedulers)}
        # A buffer that is not in the state_dict follows from other values.
        kept = module.state_dict(keep_vars=True).keys()
        self._buffers = [name for name, _ in module.named_buffers() if name in kept]
        for name, buffer in self._live_buffers().items():
            _check_buffer(name, buffer)
        names = {id(value): plain(name).replace(".", "/") for name, value in module.named_parameters()}
        self._slots: dict[str, Slot] = {}
        self._groups: dict[str, Group] = {}
        for number, optimizer in enumerate(optimizers):
            _check_optimizer(optimizer)
            for index in range(len(optimizer.param_groups)):
                self._groups[f"{GROUPS}{number}/{index}/"] = Group.of(optimizer, index)
            folder = OPTIMIZER if len(optimizers) == 1 else f"{OPTIMIZER}{number}/"
            for index, (group, parameter) in enumerate(_parameters(optimizer)):
                path = names.get(id(parameter), f"extra/{index}")
                first = optimizer.state.get(parameter) or _foreseen(optimizer, group, parameter, path)
                for key, value in first.items():
                    if value is not None:
                        self._slots[f"{folder}{path}/{key}"] = _slot(optimizer, parameter, path, key, value)
        updated = {id(parameter) for optimizer in optimizers for _, parameter in _parameters(optimizer)}
        if optimizers and updated.isdisjoint(names):
            raise ValueError(
                "the optimizer updates no parameter of the module; create it from the parameters of the module that "
                "attach() gets, or attach the module that it trains"
            )

    def read(self) -> dict[str, CpuCopy]:
        """Start to copy everything to CPU memory, and return the copies by name."""
        found: dict[str, CpuCopy] = {name: slot.copy() for name, slot in self._slots.items()}
        for name, buffer in self._live_buffers().items():
            found[BUFFERS + plain(name).replace(".", "/")] = start_copy(buffer)
        trees = {folder: scheduler.state_dict() for folder, scheduler in self._schedulers.items()}
        trees |= {folder: group.numbers() for folder, group in self._groups.items()}
        for folder, tree in trees.items():
            for name, number in _numbers(tree):
                # A number may be whole now and not later, so all have one type.
                found[folder + name] = np.array(number, np.float64)
        return found

    def write(self, leaf: Callable[[str], CpuArray]) -> None:
        """Replace everything; `leaf` returns the array of a name."""
        for name, slot in self._slots.items():
            slot.set(leaf(name))
        for name, buffer in self._live_buffers().items():
            fill(buffer, leaf(BUFFERS + plain(name).replace(".", "/")))

        def saved(tree: Any, folder: str) -> Any:
            return _replaced(tree, lambda name: leaf(folder + name).item(), "")

        for folder, scheduler in self._schedulers.items():
            scheduler.load_state_dict(saved(scheduler.state_dict(), folder))
        # Many schedulers compute the next rate from the one in the group, and some change betas or momentum.
        for folder, group in self._groups.items():
            group.set(saved(group.numbers(), folder))

    def _live_buffers(self) -> dict[str, torch.Tensor]:
        present = dict(self._module.named_buffers())
        return {name: present[name] for name in self._buffers}


def _check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer's state can be read; ValueError otherwise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, a list of them, or None"
        )
    for name, inner in vars(optimizer).items():
        # A step of the wrapper would be one of the inner optimizer, whose state it hides.
        if isinstance(inner, torch.optim.Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} wraps another optimizer, whose state cannot be read through it; give "
                f"attach() the inner one, optimizer.{name}, and step the wrapper in the loop"
            )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    """Check that a buffer can be saved; ValueError otherwise."""
    if buffer.dtype not in DTYPES or buffer.layout != torch.strided or buffer.is_meta:
        what = "on the meta device" if buffer.is_meta else f"{buffer.dtype}, {buffer.layout}"
        raise ValueError(
            f"buffer {name!r} is {what}, which cannot be saved; register it with persistent=False if it is a constant"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield the parameters that the optimizer updates, each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def _foreseen(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, path: str
) -> dict[str, Any]:
    """Return the state that an optimizer will create for a parameter, from a step on zeros of its shape."""
    zeros = torch.zeros_like(parameter, requires_grad=True)
    zeros.grad = torch.zeros_like(parameter)
    probe = object.__new__(type(optimizer))
    own_group = {**group, "params": [zeros]}
    own = {"state": defaultdict(dict), "param_groups": [own_group]}
    # Neither the hooks of the user nor those of a scheduler may see this step.
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    # Lists and mappings are copied, because the step may change them in place.
    attributes = {
        name: value.copy() if isinstance(value, list | dict | set) else value for name, value in vars(optimizer).items()
    }
    attributes.pop("step", None)
    vars(probe).update(attributes | own | hooks)
    try:
        probe.step()
    # Optimizers of any kind raise any error.
    except Exception as error:
        raise ValueError(
            f"the state that {type(optimizer).__name__} keeps for {path!r} cannot be foreseen "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); make one step before attach()"
        ) from error
    return dict(probe.state.get(zeros, {}))


def _slot(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, path: str, key: str, value: Any) -> Slot:
    fits = value.dtype in DTYPES if isinstance(value, torch.Tensor) else isinstance(value, bool | int | float)
    if not fits:
        what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"the state of {type(optimizer).__name__} for {path!r} has {key!r}, a {what}, which cannot be saved; use "
            "an optimizer with tensors and numbers, or attach(module, None) and save the optimizer yourself"
        )
    if not isinstance(value, torch.Tensor):
        return Slot(optimizer, parameter, key, type(value)(0) if key == STEP else value)
    number = 0 if key == STEP or not value.numel() else value.detach().reshape(-1)[0].item()
    first = FirstTensor(tuple(value.shape), value.stride(), value.dtype, value.device, number)
    return Slot(optimizer, parameter, key, first)


def _numbers(tree: Any, name: str = "") -> Iterator[tuple[str, bool | int | float]]:
    """Yield the numbers of a tree of mappings and lists, with their places."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _numbers(value, f"{name}/{index}" if name else str(index))
    elif isinstance(tree, bool | int | float | np.generic):
        yield name, tree.item() if isinstance(tree, np.generic) else tree
    elif _is_rate(tree):
        yield name, tree.item()


def _form(tree: Any) -> list[str]:
    return [name for name, _ in _numbers(tree)]


def _is_rate(leaf: Any) -> bool:
    """Tell whether an entry is a number in a tensor, as learning rates of compiled optimizers are."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() == 1


def _replaced(tree: Any, number: Callable[[str], Any], name: str) -> Any:
    """Return a tree of mappings and lists with other numbers."""
    if isinstance(tree, Mapping):
        # A scheduler needs the type of its mappings, such as a Counter.
        found: Any = copy(tree)
        for key, value in tree.items():
            found[key] = _replaced(value, number, f"{name}/{key}" if name else str(key))
        return found
    if isinstance(tree, list | tuple):
        parts = enumerate(tree)
        found = [_replaced(value, number, f"{name}/{index}" if name else str(index)) for index, value in parts]
        return tuple(found) if isinstance(tree, tuple) else found
    if _is_rate(tree):
        return torch.full_like(tree, number(name))
    if isinstance(tree, np.generic):
        tree = tree.item()
    if not isinstance(tree, bool | int | float):
        return tree
    saved = number(name)
    return type(tree)(saved) if float(saved).is_integer() else saved
