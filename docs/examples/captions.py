"""Draw images with captions into a Parquet file, for `data.format: images`: python captions.py FOLDER --count 2000.

Each image shows a digit in one of six colours and one of four corners, in a size and at a place that vary.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow
from digits import PIXELS, WORDS
from PIL import Image
from pyarrow import parquet

SIDE, ROWS = 96, 500
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "purple": (1, 0, 1),
    "white": (1, 1, 1),
}
CORNERS = ("upper left", "upper right", "lower left", "lower right")


def draw(number: int, noise: int) -> tuple[bytes, str]:
    """Return an image as PNG, and its caption; grey levels below `noise` lie under the digit."""
    random = np.random.default_rng(number)
    digit, colour, corner = (int(random.integers(count)) for count in (10, len(COLOURS), 4))
    name, shade = list(COLOURS.items())[colour]
    scale, half = int(random.integers(7, 10)), SIDE // 2
    glyph = np.kron(PIXELS[digit], np.ones((scale, scale), int))
    row, column = (
        side + int(random.integers(half - length + 1))
        for side, length in zip((half * (corner // 2), half * (corner % 2)), glyph.shape, strict=True)
    )
    image = random.integers(0, noise, (SIDE, SIDE, 3))
    place = image[row : row + glyph.shape[0], column : column + glyph.shape[1]]
    place += random.integers(128, 224) * glyph[..., None] * np.array(shade)
    file = io.BytesIO()
    Image.fromarray(image.astype(np.uint8)).save(file, "PNG", compress_level=1)
    return file.getvalue(), f"a {name} {WORDS[digit]} at the {CORNERS[corner]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder for drawn.parquet; data.path of a config")
    parser.add_argument("--count", type=int, default=2000, help="number of images")
    parser.add_argument("--noise", type=int, default=32, help="grey levels of the noise below the digit, at most 32")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", image), ("text", pyarrow.string())])
    with parquet.ParquetWriter(options.folder / "drawn.parquet", schema) as writer:
        for start in range(0, options.count, ROWS):
            drawn = [draw(number, options.noise) for number in range(start, min(start + ROWS, options.count))]
            rows = [{"image": {"bytes": data, "path": None}, "text": text} for data, text in drawn]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


if __name__ == "__main__":
    main()
