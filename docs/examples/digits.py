"""Your own images (`data.module: digits:Digits`): drawn digits at random places, with random brightness."""

import numpy as np

# Each glyph has five rows of three pixels.
FONT = (
    *(
        "###/#.#/#.#/#.#/###",
        ".#./##./.#./.#./###",
        "###/..#/###/#../###",
        "###/..#/.##/..#/###",
        "#.#/#.#/###/..#/..#",
    ),
    *(
        "###/#../###/..#/###",
        "###/#../###/#.#/###",
        "###/..#/.#./.#./.#.",
        "###/#.#/###/#.#/###",
        "###/#.#/###/..#/###",
    ),
)
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PIXELS = np.array([[[pixel == "#" for pixel in row] for row in glyph.split("/")] for glyph in FONT])


class Digits:
    """Random access to samples: source[index] is a dict of arrays, the same at each call."""

    def __init__(
        self, count: int, size: int = 16, named: bool = False, noise: int = 64, ink: tuple[int, int] = (96, 192)
    ) -> None:
        # If `named` is set, a sample contains the digit's English name as tokens instead of a label.
        self.count, self.size, self.named = count, size, named
        # Grey levels: the background is below `noise`, and a digit adds a level from the range `ink`.
        self.noise, self.ink = noise, ink

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        label = int(random.integers(10))
        image = random.integers(0, self.noise, (self.size, self.size, 1))
        row, column = random.integers(self.size - 10), random.integers(self.size - 6)
        image[row : row + 10, column : column + 6, 0] += random.integers(*self.ink) * np.kron(
            PIXELS[label], np.ones((2, 2), int)
        )
        if not self.named:
            return {"image": image.astype(np.uint8), "label": np.int32(label)}
        name = np.frombuffer(WORDS[label].encode(), np.uint8)
        # The six tokens fit `train.seq_len: 5`. Tokens of segment 0 are padding, so the model need not predict them.
        tokens, segments = np.zeros((2, 6), np.int32)
        tokens[: len(name)], segments[: len(name) + 1] = name, 1
        return {"image": image.astype(np.uint8), "tokens": tokens, "segments": segments}
