"""Images as patches for the vision tower: the same sizes, patches and positions as Gemma 4's image processor.

An image keeps its aspect ratio. Its sides become multiples of a soft token's side, 3 patches of 16 pixels, and it gets
as many soft tokens as fit into the given number.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from diloco_jax.training.data.documents import needs

# Height and width of a patch in pixels, and of a soft token in patches.
PATCH, POOL = 16, 3


class Patches(NamedTuple):
    """An image cut into patches, row by row from the upper left, with padding at the end."""

    # The pixels of each patch, row by row, channels last; 0 in padding.
    pixels: UInt8[np.ndarray, "n p"]
    # Column and row of each patch; -1 in padding.
    positions: Int32[np.ndarray, "n 2"]
    # The number of soft tokens of the image.
    soft_tokens: int


def fitted_size(height: int, width: int, soft_tokens: int) -> tuple[int, int]:
    """Return the height and width in soft tokens of an image that is resized to at most `soft_tokens` of them.

    Both sides are multiplied by sqrt(soft_tokens S^2 / (height width)), where S is the side of a soft token in pixels,
    and are rounded down to multiples of S. If nothing is left of the shorter side, it becomes 1 soft token, and the
    longer side as many as the aspect ratio, rounded down, and at most `soft_tokens`.
    """
    side = PATCH * POOL
    factor = math.sqrt(soft_tokens * side**2 / (height * width))
    rows, columns = int(factor * height / side), int(factor * width / side)
    if not rows:
        return 1, min(width // height, soft_tokens)
    if not columns:
        return min(height // width, soft_tokens), 1
    return rows, columns


def cut_image(image: Shaped[np.ndarray, "..."], soft_tokens: int = 280) -> Patches:
    """Resize an RGB image and cut it into patches, padded to the patches of `soft_tokens` soft tokens.

    Args:
      image: uint8 [height, width, 3].
      soft_tokens: the most soft tokens of an image; Gemma 4 supports 70, 140, 280, 560 and 1120.

    Raises:
      ValueError: the array is not an RGB image, soft_tokens is less than 1, or Pillow is missing.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ValueError(
            f"an image is {image.dtype} {list(image.shape)}; it must be uint8 [height, width, 3] (with Pillow: "
            "numpy.asarray(image.convert('RGB')))"
        )
    if soft_tokens < 1:
        raise ValueError(f"soft_tokens is {soft_tokens}; it must be at least 1")
    height, width = image.shape[:2]
    rows, columns = (POOL * cells for cells in fitted_size(height, width, soft_tokens))
    pillow = needs("PIL.Image")
    size = (PATCH * columns, PATCH * rows)
    resized = np.asarray(pillow.fromarray(image).resize(size, pillow.Resampling.BICUBIC))
    cut = resized.reshape(rows, PATCH, columns, PATCH, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    padding = ((0, soft_tokens * POOL**2 - len(cut)), (0, 0))
    positions = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2).astype(np.int32)
    return Patches(np.pad(cut, padding), np.pad(positions, padding, constant_values=-1), rows * columns // POOL**2)
