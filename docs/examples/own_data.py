"""Your own samples (`data.module: own_data:Lines`): pieces of a text, where each piece starts with a line."""

import numpy as np


class Lines:
    """Random access to samples: `source[index]` returns the same sample at each call; `len(source)` counts them."""

    def __init__(self, path: str, seq_len: int) -> None:
        with open(path, "rb") as file:
            self.text = np.frombuffer(file.read(), np.uint8)
        # A source does not receive `train.seq_len`, so the config passes the same number here.
        self.seq_len = seq_len
        starts = np.flatnonzero(self.text == ord("\n")) + 1
        self.starts = starts[starts + seq_len < len(self.text)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text[self.starts[index] :][: self.seq_len + 1]
