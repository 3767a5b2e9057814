"""Kinds of tensors: a vector, a matrix or a table, or a stack of such; the names of the axes say which.

Weight decay, Muon, the merge and the cut into fragments all go by this, so a model learns the same whether the layers'
parameters are tensors of their own or one stack of them, each layer (and each expert) being a tensor of its own.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

STACK_AXES = ("layers", "expert")
TABLE_AXIS = "vocab"

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
