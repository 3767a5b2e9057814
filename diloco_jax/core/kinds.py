"""Kinds of tensors: vector, matrix or table, by the names of their axes; and classes of tensors, by their paths.

Weight decay, Muon, the merge and the cut into fragments depend on a tensor's kind. A stack of layers or of experts
counts as one tensor for each layer and expert, so a model learns the same with stacked and with separate tensors.

A model may store the axis of a stack anywhere. What travels between islands and is merged is the canonical tensor,
whose stack axes are in front. An island alone knows how its loop stores a tensor (`Canonical`).

A class is MLP, attention, embedding, norm, or a pattern of paths that the user writes.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

# The names of axes that count layers, and of axes that count experts. Canonical tensors have their stack axes in this
# order. `layers` and `expert` are the names of the built-in models, the others are MaxText's.
LAYER_AXES = (
    "circular_repeats", "layers", "dense_layers", "moe_layers", "layers_outside_pipeline", "scanned_blocks",
    "layers_per_stage", "local_layers",
)  # fmt: skip
EXPERT_AXES = ("expert", "exp", "expert_only")
STACK_AXES = LAYER_AXES + EXPERT_AXES
# An axis name with one of these words must be in STACK_AXES.
COUNTING_WORDS = {"layers", "experts", "stages", "repeats"}
TABLE_AXIS = "vocab"
# The class of tensors that are in none of the other classes.
REST = "rest"
# Each line has a class and the words of a path that name it. The first line with one of the path's words decides: so
# 'norm_mlp' is a norm, and 'mlp/out' is not attention.
_WORDS = (
    ("norm", "norm norms layernorm rmsnorm batchnorm groupnorm ln"),
    ("embedding", "embed embedder embedding embeddings unembed head"),
    ("mlp", "mlp ffn feedforward moe expert experts router"),
    ("attention", "attention attn mha delta"),
    ("mlp", "up down gate fc"),
    ("attention", "q k v o out qkv query key value"),
)
KNOWN = tuple(dict.fromkeys(name for name, _ in _WORDS))

Form = Literal["vector", "matrix", "table"]
# The names of a tensor's axes, None for an axis without a name; empty if no axis has a name.
Names = Sequence[str | None]
# Entry i is the stored axis that is axis i of the canonical tensor.
Order = tuple[int, ...]
# An array of NumPy or JAX, or anything else that has their `transpose`.
ArrayT = TypeVar("ArrayT", bound=Any)


class Kind(NamedTuple):
    """The kind of a tensor or of a stack of tensors."""

    # The form of each tensor in the stack. A vector has at most one axis; a table has a row for each token id. A matrix
    # is every other tensor, with any number of axes.
    form: Form
    # The number of leading axes that count separate tensors; 0 for a tensor that is not a stack.
    stack: int = 0

    def unit(self, shape: Sequence[int]) -> int:
        """Return the number of elements of one tensor in the stack; `shape` may be a piece of the stack."""
        return math.prod(shape[self.stack :])


class Canonical(NamedTuple):
    """The canonical form of a stored tensor: its stack axes in front, then the other axes in their stored order."""

    order: Order
    # The shape of the canonical tensor.
    shape: tuple[int, ...]
    kind: Kind

    def view(self, stored: ArrayT) -> ArrayT:
        """Return a stored array with its axes in canonical order."""
        return with_order(stored, self.order)

    def stored(self, canonical: ArrayT) -> ArrayT:
        """Return a canonical array with its axes in stored order."""
        return with_order(canonical, inverse(self.order))


def canonical_of(shape: Sequence[int], names: Names = ()) -> Canonical:
    """Return the canonical form of a tensor, from its stored shape and the names of its stored axes.

    Raises:
      ValueError: the number of names is not that of the axes, two axes have one stack's name, or a name such as
        `encoder_layers` counts tensors but is not in STACK_AXES.
    """
    stacks = _stacks(shape, names)
    front = sorted(stacks, key=lambda axis: STACK_AXES.index(stacks[axis]))
    order = (*front, *(axis for axis in range(len(shape)) if axis not in stacks))
    form: Form = "vector" if len(shape) - len(front) < 2 else "matrix"
    if form == "matrix" and names and names[order[len(front)]] == TABLE_AXIS:
        form = "table"
    return Canonical(order, tuple(shape[axis] for axis in order), Kind(form, len(front)))


def with_order(array: ArrayT, order: Order) -> ArrayT:
    """Return the array with these axes in this order; the array itself if that is its order."""
    return array if order == tuple(range(len(order))) else array.transpose(order)


def inverse(order: Order) -> Order:
    """Return the order that undoes this one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def as_stored(values: Mapping[str, ArrayT], axes: Mapping[str, Names]) -> dict[str, ArrayT]:
    """Return canonical tensors, such as those of a snapshot, with the axes in the order of the given names.

    Args:
      values: canonical tensors by path.
      axes: names of the stored axes by path, as given to `join`; tensors without names are returned unchanged.

    Raises:
      ValueError: as `canonical_of`.
    """
    found = {}
    for path, value in values.items():
        # The order depends on the names and the number of axes, so any shape of that length gives it.
        found[path] = canonical_of(value.shape, axes.get(path, ())).stored(value)
    return found


def kind_of(shape: Sequence[int], names: Names = ()) -> Kind:
    """Return the kind of a tensor from the names of its stored axes; without names, from its shape alone."""
    return canonical_of(shape, names).kind


def _stacks(shape: Sequence[int], names: Names) -> dict[int, str]:
    """Return the stored axes that count separate tensors, with their names in STACK_AXES; ValueError as `canonical_of`.

    An axis of experts behind a single other axis is not one: it has the outputs of a router, which is one matrix.
    """
    if names and len(names) != len(shape):
        raise ValueError(
            f"the axes {_listed(names)} are {len(names)}, but the tensor of shape {tuple(shape)} has {len(shape)}; "
            "give a name or None for each axis, in their order"
        )
    stacks = {axis: stack for axis, name in enumerate(names) if (stack := _stack_of(name))}
    if twice := next((stack for stack in STACK_AXES if list(stacks.values()).count(stack) > 1), None):
        raise ValueError(
            f"the axes {_listed(names)} name {twice!r} twice, so the order of its stacks is unknown; rename one of "
            f"them to another of {', '.join(STACK_AXES)}, or to None if it does not count separate tensors"
        )
    behind_layers = [axis for axis in range(len(shape)) if stacks.get(axis) not in LAYER_AXES]
    if behind_layers and behind_layers[0] not in stacks and len(shape) - len(stacks) < 2:
        return {axis: stack for axis, stack in stacks.items() if stack in LAYER_AXES}
    return stacks


def _stack_of(name: Any) -> str | None:
    """Return the name in STACK_AXES of an axis, without numbers at its end (`moe_layers_3_7`); None if it has none."""
    if not isinstance(name, str):
        return None
    found = re.sub("(_[0-9]+)+$", "", name)
    if found in STACK_AXES:
        return found
    # Under an unknown name the stack would be merged as one matrix.
    if not COUNTING_WORDS.isdisjoint(found.split("_")):
        raise ValueError(
            f"the axis {name!r} seems to count separate tensors, but its name is unknown; rename it to one of "
            f"{', '.join(STACK_AXES)}, or to None if it does not count separate tensors"
        )
    return None


def _listed(names: Names) -> str:
    return f"({', '.join(map(str, names))})"


def canonical_forms(
    shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Names], remedy: str
) -> dict[str, Canonical]:
    """Return the canonical form of every tensor of a model, by path.

    Args:
      shapes: stored shapes by path.
      axes: names of the stored axes, by path, of the tensors that have names.
      remedy: what a user may do about a tensor without names, for the message.

    Raises:
      ValueError: names do not describe their tensor, or a tensor without names seems to be a stack.
    """
    axes, forms = {path: names for path, names in axes.items() if names}, {}
    for path, shape in shapes.items():
        try:
            forms[path] = canonical_of(shape, axes.get(path, ()))
        except ValueError as error:
            raise ValueError(f"parameter '{path}': {error}") from None
    _check_unnamed(shapes, axes, remedy)
    return forms


def _check_unnamed(shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Names], remedy: str) -> None:
    """Refuse a tensor without axis names beside stacks of layers of its length, because it would merge as one tensor.

    A scan over layers names the axis of a stack only for parameters that have other axis names.
    """
    # By the first key of their paths: the axis that counts layers, their number, and the path of a stack.
    stacks: dict[str, dict[tuple[int, int], str]] = {}
    for path, names in axes.items():
        for axis, name in enumerate(names):
            if _stack_of(name) in LAYER_AXES:
                stacks.setdefault(path.split("/")[0], {}).setdefault((axis, shapes[path][axis]), path)
    for path, shape in shapes.items():
        if path in axes or "/" not in path:
            continue
        for (axis, layers), other in stacks.get(path.split("/")[0], {}).items():
            if axis < len(shape) and shape[axis] == layers:
                raise ValueError(
                    f"parameter '{path}' of shape {shape} names no axes, but '{other}' beside it is a stack of "
                    f"{layers} layers, and only axis names mark a stack; {remedy}"
                )


def class_of(path: str, names: Iterable[str]) -> str:
    """Return the first class in `names` that has the tensor at `path`; 'rest' if none of them has it."""
    words = set(re.split("[^a-z]+", path.lower()))
    own = next((name for name, known in _WORDS if not words.isdisjoint(known.split())), REST)
    return next((name for name in names if name == own or ("*" in name and matches(path, name))), REST)


def check_classes(names: Sequence[str], where: str) -> None:
    """Check that each name is a class of tensors or a pattern; ValueError if one is neither."""
    for name in names:
        if name not in (*KNOWN, REST) and "*" not in name:
            raise ValueError(
                f"{where} names '{name}', which is not a class of tensors; use {', '.join(KNOWN)}, {REST}, or a "
                f"pattern of whole paths with a '*', such as '*{name}*'"
            )


def members(paths: Sequence[str], classes: Sequence[Sequence[str]], where: str) -> list[list[str]]:
    """Return the paths of the tensors in each group of classes.

    Args:
      where: name of the setting, for messages.

    Raises:
      ValueError: a class has no tensor, or a tensor is in none of the classes.
    """
    names = [name for group in classes for name in group]
    check_classes(names, where)
    found = {path: class_of(path, names) for path in paths}
    for name in names:
        if name != REST and name not in found.values():
            raise ValueError(
                f"{where} names '{name}', but no tensor is left for it; the model has {', '.join(paths[:8])}"
                + (" and more" if len(paths) > 8 else "")
            )
    for path, name in found.items():
        if name not in names:
            raise ValueError(f"{where} has no period for '{path}', which is in none of its classes; add {REST}")
    return [[path for path in paths if found[path] in group] for group in classes]


def matches(path: str, pattern: str) -> bool:
    """Return whether a pattern fits a whole path: '*' stands for any characters, '/' included; case counts."""
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), path) is not None
