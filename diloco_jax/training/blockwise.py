"""Frozen weights in 8 or 4 bits: whole numbers in blocks of 64 along the input, with a float32 scale for each block.

    w = s c          s = max |w| / (2^(bits - 1) - 1) over a block;  c = round(w / s)

A weight takes 1.0625 bytes in 8 bits, and 0.5625 bytes in 4 bits, where two rows share one row of bytes.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.variables import Frozen

BLOCK = 64
# Bits of a number by the name of the type.
BITS = {"int8": 8, "int4": 4}
# Added to numbers of 4 bits, so that they are not negative.
OFFSET = 8


class Blockwise(nnx.Module):
    """A frozen matrix, or a stack of them, that is stored in blocks; `[...]` computes its values, as of a variable."""

    def __init__(self, weight: Float[Array, "*l i o"], names: LogicalAxes, bits: int) -> None:
        codes, scales = to_blocks(weight, bits)
        self.codes = Frozen(codes, out_sharding=names)
        self.scales = Frozen(scales, out_sharding=names)
        self.bits = bits

    def __getitem__(self, index: Any) -> Float[Array, "*l i o"]:
        return from_blocks(self.codes[index], self.scales[index], self.bits)


def to_blocks(weight: Float[Any, "*l i o"], bits: int) -> tuple[Integer[Any, "*l p o"], Float[Any, "*l b o"]]:
    """Return codes and scales of an array of NumPy or JAX; its input must be a multiple of `BLOCK`."""
    *stack, n_in, n_out = weight.shape
    blocks = weight.reshape(*stack, n_in // BLOCK, BLOCK, n_out)
    scales = abs(blocks).max(axis=-2) / (2 ** (bits - 1) - 1)
    # A block of zeros has scale 0, and its codes are 0 with any other scale.
    codes = (blocks / (scales + (scales == 0))[..., None, :]).round().reshape(weight.shape).astype("int8")
    if bits == BITS["int4"]:
        codes = (codes + OFFSET).astype("uint8")
        codes = codes[..., ::2, :] | codes[..., 1::2, :] << 4
    return codes, scales


def from_blocks(codes: Integer[Array, "*l p o"], scales: Float[Array, "*l b o"], bits: int) -> Float[Array, "*l i o"]:
    """Compute the float32 values of a matrix from its codes and scales."""
    *stack, rows, n_out = codes.shape
    if bits == BITS["int4"]:
        rows *= 2
        codes = jnp.stack([codes & 15, codes >> 4], axis=-2).reshape(*stack, rows, n_out).astype(jnp.int8) - OFFSET
    blocks = codes.reshape(*stack, rows // BLOCK, BLOCK, n_out) * scales[..., None, :]
    return blocks.reshape(*stack, rows, n_out)
