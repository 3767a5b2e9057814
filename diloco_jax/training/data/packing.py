"""Samples of a token store: windows across documents, windows that know their documents, whole documents packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numba import njit

from diloco_jax.training.data.sample import SEGMENTS, TOKENS, Sample
from diloco_jax.training.data.store import Store


@dataclass(frozen=True, slots=True)
class StoreWindows:
    """Windows of `seq_len` + 1 ids of tokens start..stop-1; neighbours share one id, the last target of the former.

    With `separate` a sample has segments: the number of its document within the window, from 1 on.
    """

    store: Store
    start: int
    stop: int
    seq_len: int
    separate: bool

    def __len__(self) -> int:
        return max(self.stop - self.start - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = self.start + index * self.seq_len
        sample = {TOKENS: self.store.read(start, start + self.seq_len + 1)}
        if self.separate:
            sample[SEGMENTS] = _segments(self.store, start, start + self.seq_len + 1, self.seq_len + 1)
        return sample


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Samples of consecutive whole documents, as many as fit; the rest is padding, of segment 0.

    Only a document longer than a sample is cut; its pieces share one id, so that each id but the first is predicted.
    """

    store: Store
    starts: np.ndarray
    stop: int
    seq_len: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, size = int(self.starts[index]), self.seq_len + 1
        stop = int(self.starts[index + 1]) if index + 1 < len(self) else self.stop
        if index + 1 < len(self) and stop not in self.store.ends(stop - 1, stop):
            stop += 1  # the next one goes on with this document
        tokens = np.zeros(size, np.int32)
        tokens[: stop - start] = self.store.read(start, stop)
        return {TOKENS: tokens, SEGMENTS: _segments(self.store, start, stop, size)}


def _segments(store: Store, start: int, stop: int, size: int) -> np.ndarray:
    begins = np.zeros(size, np.int32)
    begins[0] = 1
    begins[store.ends(start, stop - 1) - start] = 1
    segments = np.cumsum(begins, dtype=np.int32)
    segments[stop - start :] = 0
    return segments


def pack(store: Store, start: int, stop: int, seq_len: int) -> PackedDocuments:
    """Deal out the documents of a range of tokens in order; a sample ends before the first that does not fit."""
    rows, row, begin = [np.array([start], np.int64)], start, start
    for _, low, high in store.files(start, stop):  # memory for one file, and 8 bytes a sample
        ends = store.ends(low, high)
        if not len(ends) or ends[-1] != high:
            ends = np.append(ends, high)
        out = np.empty(len(ends) + (high - row) // seq_len + 2, np.int64)
        row, begin, count = _next_fit(ends, row, begin, seq_len, out)
        rows.append(out[:count].copy())
    return PackedDocuments(store, np.concatenate(rows).astype(np.uint64), stop, seq_len)


@njit(nogil=True)
@no_type_check
def _next_fit(ends, row, begin, seq_len, out):
    count = 0
    for end in ends:
        if end - row > seq_len + 1 and begin > row:
            row = begin
            out[count] = row
            count += 1
        while end - row > seq_len + 1:
            row += seq_len
            out[count] = row
            count += 1
        begin = end
    return row, begin, count
