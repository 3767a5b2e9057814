"""Kinds of tensors, by the names of their axes: a vector, a matrix or a table, or a stack of such.

Weight decay, Muon, the merge and the cut into fragments all go by this, so a model learns the same whether the layers'
parameters are tensors of their own or one stack of them, each layer (and each expert) being a tensor of its own.

Their classes, by their paths: MLP, attention, embedding, norm, or patterns of the user's own.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

STACK_AXES = ("layers", "expert")
TABLE_AXIS = "vocab"
REST = "rest"  # tensors that are of no other class
# Parts of a path that tell the class. The first line that has one of a path's words counts: 'norm_mlp' is a norm, and
# 'mlp/out' no attention.
_WORDS = (
    ("norm", "norm norms layernorm rmsnorm batchnorm groupnorm ln"),
    ("embedding", "embed embedder embedding embeddings unembed head"),
    ("mlp", "mlp ffn feedforward moe expert experts router"),
    ("attention", "attention attn mha"),
    ("mlp", "up down gate fc"),
    ("attention", "q k v o out qkv query key value"),
)
KNOWN = tuple(dict.fromkeys(name for name, _ in _WORDS))

Form = Literal["vector", "matrix", "table"]


class Kind(NamedTuple):
    """The kind of a tensor."""

    # of each tensor of the stack. A vector has at most one axis. A table has a row for each token id. A matrix is all
    # else: a kernel, whatever the number of its axes.
    form: Form
    stack: int = 0  # how many axes, the first ones, count tensors of their own

    def unit(self, shape: Sequence[int]) -> int:
        """Return the number of elements of each tensor of the stack, of which some may have been cut off."""
        return math.prod(shape[self.stack :])


def kind_of(shape: Sequence[int], names: Sequence[str | None] = ()) -> Kind:
    """Return what a tensor is, by the logical names of its axes, or by its shape alone where there are none."""
    stack = 0
    while stack < len(names) and names[stack] in STACK_AXES:
        stack += 1
    if len(shape) - stack < 2:
        return Kind("vector", stack)
    return Kind("table" if names and names[stack] == TABLE_AXIS else "matrix", stack)


def class_of(path: str, names: Iterable[str]) -> str:
    """Return the first of these classes that a tensor is of; `rest` if it is of none."""
    words = set(re.split("[^a-z]+", path.lower()))
    own = next((name for name, known in _WORDS if not words.isdisjoint(known.split())), REST)
    return next((name for name in names if name == own or ("*" in name and matches(path, name))), REST)


def check_classes(names: Sequence[str], where: str) -> None:
    """Check that these name classes of tensors; ValueError if one is no class and no pattern."""
    for name in names:
        if name not in (*KNOWN, REST) and "*" not in name:
            raise ValueError(
                f"{where} names '{name}', which is no class of tensors; use {', '.join(KNOWN)}, {REST}, or a pattern "
                f"of whole paths with a '*', such as '*{name}*'"
            )


def members(paths: Sequence[str], classes: Sequence[Sequence[str]], where: str) -> list[list[str]]:
    """Return which of the tensors each group of classes has.

    Raises:
      ValueError: a class has no tensor, or a tensor no class.
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
            raise ValueError(f"{where} has no period for '{path}', which is of no class that it names; add {REST}")
    return [[path for path in paths if found[path] in group] for group in classes]


def matches(path: str, pattern: str) -> bool:
    """Say if a pattern fits a whole path: '*' stands for any characters, '/' too, and case counts."""
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), path) is not None
