"""Kinds of tensors: vector, matrix or table, by the names of their axes; and classes of tensors, by their paths.

Weight decay, Muon, the merge and the cut into fragments depend on a tensor's kind. A stack of layers or of experts
counts as one tensor for each layer and expert, so a model learns the same with stacked and with separate tensors.

A class is MLP, attention, embedding, norm, or a pattern of paths that the user writes.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

STACK_AXES = ("layers", "expert")
TABLE_AXIS = "vocab"
# The class of tensors that are in none of the other classes.
REST = "rest"
# Each line has a class and the words of a path that name it. The first line with one of the path's words decides: so
# 'norm_mlp' is a norm, and 'mlp/out' is not attention.
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
    """The kind of a tensor or of a stack of tensors."""

    # The form of each tensor in the stack. A vector has at most one axis; a table has a row for each token id. A matrix
    # is every other tensor, with any number of axes.
    form: Form
    # The number of leading axes that count separate tensors; 0 for a tensor that is not a stack.
    stack: int = 0

    def unit(self, shape: Sequence[int]) -> int:
        """Return the number of elements of one tensor in the stack; `shape` may be a piece of the stack."""
        return math.prod(shape[self.stack :])


def kind_of(shape: Sequence[int], names: Sequence[str | None] = ()) -> Kind:
    """Return the kind of a tensor from the logical names of its axes; without names, from its shape alone."""
    stack = 0
    while stack < len(names) and names[stack] in STACK_AXES:
        stack += 1
    if len(shape) - stack < 2:
        return Kind("vector", stack)
    return Kind("table" if names and names[stack] == TABLE_AXIS else "matrix", stack)


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
