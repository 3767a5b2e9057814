"""Your own samples, `data.module: own_data:Lines`: pieces of a text that each start at a line."""

import numpy as np


class Lines:
    """Random access to samples; source[index] is the same at each call. `seq_len` must equal train.seq_len."""

    def __init__(self, path: str, seq_len: int) -> None:
        with open(path, "rb") as file:
            self.text = np.frombuffer(file.read(), np.uint8)
        self.seq_len = seq_len
        starts = np.flatnonzero(self.text == ord("\n")) + 1
        self.starts = starts[starts + seq_len < len(self.text)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text[self.starts[index] :][: self.seq_len + 1]
