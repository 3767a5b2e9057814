"""Tensors in MXFP4, the format of gpt-oss's experts: a block of 32 numbers of 4 bits has one scale of 8 bits.

A number is m 2^(e - 127). Its 4 bits select m from 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and e is the scale
of its block. A byte has two numbers, the first one in its lower bits. In the files, the matrix of an expert is
[out, in], with blocks along its second axis; transformers holds it as [in, out].
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

MXFP4 = "MXFP4"
# The ends of the names of a tensor's two arrays.
BLOCKS, SCALES = "_blocks", "_scales"
# Bytes of a block.
BLOCK_BYTES = 16
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_POSITIVE, -_POSITIVE])
# The two numbers of each byte, as one element of 64 bits, because looking up rows of two is ten times as slow.
_PAIRS = np.stack([_CODES[np.arange(256) % 16], _CODES[np.arange(256) // 16]], axis=1).view(np.uint64)[:, 0]
# A scale of 255 is not a number in this format. Here it is infinite, so that the tensor is refused.
_FACTORS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.inf))


def shape_of(blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the shape [E, in, out] of experts from the shapes of their two arrays; None if these do not fit."""
    if len(blocks) != 4 or tuple(blocks) != (*scales, BLOCK_BYTES):
        return None
    return blocks[0], 2 * BLOCK_BYTES * blocks[2], blocks[1]


def unpack(blocks: UInt8[np.ndarray, "o g 16"], scales: UInt8[np.ndarray, "o g"]) -> Float[np.ndarray, "i o"]:
    """Return the matrix [in, out] of an expert in float32, as a transposed view.

    Args:
        blocks: the bytes of the G blocks of each row; a byte has two numbers, and in = 32 G.
        scales: the scale of each block.
    """
    values = _PAIRS[blocks].view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values *= _FACTORS[scales][..., None]
    return values.reshape(len(values), -1).T
