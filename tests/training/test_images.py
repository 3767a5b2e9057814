"""Images cut into patches, against the image processor of transformers and a literal cut."""

import sys

import numpy as np
import pytest

from diloco_jax.training.data.images import cut_image, fitted_size

RNG = np.random.default_rng(0)
SIZES = [(333, 517), (1, 1), (48, 48), (7, 1000), (900, 5), (768, 768), (1234, 77), (640, 480), (3, 4001)]


@pytest.mark.extra("parity")
def test_patches_are_those_of_transformers() -> None:
    import transformers

    processor = transformers.Gemma4ImageProcessorPil()
    for number, size in enumerate([*SIZES, *RNG.integers(1, 700, (12, 2)).tolist()]):
        image = RNG.integers(0, 256, (*size, 3), np.uint8)
        soft_tokens = (70, 140, 280)[number % 3]
        theirs = processor([image], max_soft_tokens=soft_tokens, input_data_format="channels_last", return_tensors="np")
        ours = cut_image(image, soft_tokens)
        assert theirs["num_soft_tokens_per_image"] == [ours.soft_tokens], size
        np.testing.assert_array_equal(ours.positions, theirs["image_position_ids"][0], strict=False)
        np.testing.assert_array_equal(ours.pixels, np.rint(255 * theirs["pixel_values"][0]))
        np.testing.assert_allclose(ours.pixels / 255, theirs["pixel_values"][0], atol=1e-6)


def test_an_image_that_fits_is_cut_as_it_is() -> None:
    image = RNG.integers(0, 256, (96, 48, 3), np.uint8)
    pixels, positions, soft_tokens = cut_image(image, 2)
    assert soft_tokens == 2 and pixels.dtype == np.uint8 and positions.dtype == np.int32
    for (x, y), patch in zip(positions, pixels, strict=True):
        np.testing.assert_array_equal(patch.reshape(16, 16, 3), image[16 * y : 16 * y + 16, 16 * x : 16 * x + 16])
    assert positions.tolist() == [[x, y] for y in range(6) for x in range(3)]
    pixels, positions, soft_tokens = cut_image(image, 3)
    assert soft_tokens == 2 and (pixels[18:] == 0).all() and (positions[18:] == -1).all() and len(pixels) == 27


def test_sizes_keep_the_aspect_ratio_and_the_number_of_soft_tokens() -> None:
    for height, width in RNG.integers(1, 3000, (300, 2)).tolist():
        rows, columns = fitted_size(height, width, 280)
        assert 1 <= rows * columns <= 280
        # One more row or column would be too many, unless the image is very narrow.
        assert min(rows, columns) == 1 or (rows + 1) * (columns + 1) > 280
    assert fitted_size(480, 640, 280) == (14, 19) and fitted_size(1, 9000, 280) == (1, 280)


def test_what_is_not_an_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, dtype in (((4, 4), np.uint8), ((4, 4, 4), np.uint8), ((0, 4, 3), np.uint8), ((4, 4, 3), np.float32)):
        with pytest.raises(ValueError, match=r"it must be uint8 \[height, width, 3\]"):
            cut_image(np.zeros(shape, dtype))
    with pytest.raises(ValueError, match="soft_tokens is 0"):
        cut_image(np.zeros((4, 4, 3), np.uint8), 0)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="PIL is missing"):
        cut_image(np.zeros((4, 4, 3), np.uint8))
