"""Samples of your own, `data.module: own_data:Lines`: here of a text, each of which begins at a line."""

import numpy as np


class Lines:
    """Random access to samples: len(source) of them, and source[index] the same at each call."""

    def __init__(self, path: str, seq_len: int) -> None:
        with open(path, "rb") as file:
            self.text = np.frombuffer(file.read(), np.uint8)
        self.seq_len = seq_len  # that of `train`, which a source is not told
        starts = np.flatnonzero(self.text == ord("\n")) + 1
        self.starts = starts[starts + seq_len < len(self.text)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text[self.starts[index] :][: self.seq_len + 1]
