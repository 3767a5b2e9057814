"""Your own images, `data.module: digits:Digits`: drawn digits that vary in place and brightness."""

import numpy as np

# A glyph has five rows of three pixels.
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
        # If `named`, a sample also has the digit's English name as text.
        self.count, self.size, self.named = count, size, named
        # Every pixel has a random grey level below `noise`; a digit adds a level between the two of `ink`.
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
        # With train.seq_len 5 a text has 6 tokens; segment 0 marks padding, which no model has to write.
        tokens, segments = np.zeros((2, 6), np.int32)
        tokens[: len(name)], segments[: len(name) + 1] = name, 1
        return {"image": image.astype(np.uint8), "tokens": tokens, "segments": segments}
