"""Text as windows of token ids, in one global order that every learner can compute.

    corpus -> [train | held out] -> windows -> global order (shuffled anew each epoch) -> batches

Samples of the user's own (own_data.py) take the place of windows.

The global order (`SampleOrder`) has positions 0, 1, 2, ... without end; a learner reads those that the syncer leased to
it. The held-out part is the tail of the corpus; no training window touches it.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from zlib import crc32

import grain
import numpy as np
import xxhash
from jaxtyping import Int32, Integer

from diloco_jax.training.data_config import STDLIB, DataConfig
from diloco_jax.training.own_data import OwnSamples, open_own

WHOLE_BYTES = 1 << 24  # a corpus up to this size is digested whole, a larger one by samples
SAMPLES, SAMPLE_BYTES = 64, 4096
STDLIB_SKIP = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, slots=True)
class Windows:
    """Random access to windows of `seq_len` + 1 ids; neighbours share one id, the last target of the former."""

    ids: Integer[np.ndarray, " n"]
    seq_len: int

    def __len__(self) -> int:
        return max(len(self.ids) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Int32[np.ndarray, " t"]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        return self.ids[start : start + self.seq_len + 1].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Source:
    """A corpus cut into windows for training and for evaluation, which share no id."""

    train: Windows | OwnSamples
    held_out: Windows | OwnSamples
    vocab_size: int
    corpus: str = ""
    """Length and digest of all ids, by which islands tell that they read the same; see `described`."""


def _stdlib_files() -> list[Path]:
    files = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = [name for name in inside if name not in STDLIB_SKIP]  # installed packages have far more files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def _find_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """Return the files of a corpus of bytes, and what their names begin at."""
    root = Path(sysconfig.get_paths()["stdlib"]) if config.path == STDLIB else Path(config.path)
    if not root.exists():
        raise ValueError(f"data.path '{config.path}' does not exist; give a file, a folder, or '{STDLIB}'")
    if config.path == STDLIB:
        files = _stdlib_files()
    elif root.is_file():
        files = [root]
    else:
        files = [p for p in root.rglob("*") if p.is_file() and any(fnmatch(p.name, g) for g in config.patterns)]
    if not files:
        raise ValueError(f"data.path '{config.path}' has no file that matches {config.patterns}; correct data.patterns")
    return root, files


def _read_bytes(config: DataConfig) -> Integer[np.ndarray, " n"]:
    """Read all files, a zero byte after each, in an order that mixes folders but is always the same."""
    root, files = _find_files(config)
    # By hash of the name: an alphabetical tail would hold out whole packages, unlike anything trained on.
    names = {p: p.relative_to(root).as_posix() for p in files}
    files.sort(key=lambda p: (crc32(names[p].encode()), names[p]))
    return np.frombuffer(b"".join(part for p in files for part in (p.read_bytes(), b"\0")), np.uint8)


def _count_tokens(config: DataConfig) -> int:
    """Return the number of ids in a token file, from its size."""
    path = Path(config.path)
    if not path.is_file():
        raise ValueError(f"data.path '{config.path}' is no file; give one file of {config.token_dtype} token ids")
    dtype = np.dtype(config.token_dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(
            f"data.path '{config.path}' has {size} bytes, not a positive multiple of {dtype.itemsize}; "
            f"is data.token_dtype {config.token_dtype} right?"
        )
    return size // dtype.itemsize


def check_source(config: DataConfig, seq_len: int, eval_batch_size: int) -> None:
    """Find out from names and sizes alone whether `load_source` and `eval_batches` will do: no file is read.

    Of a source of the user's own some samples are read.

    Raises:
      ValueError: as those two.
    """
    if config.module:
        next(eval_batches(load_source(config, seq_len), eval_batch_size, 1))
        return
    if config.format == "bytes":
        _, files = _find_files(config)
        count = sum(path.stat().st_size + 1 for path in files)
    else:
        count = _count_tokens(config)
    ids = np.broadcast_to(np.uint8(0), count)  # as many, in one byte
    next(eval_batches(_cut(config, ids, seq_len, corpus=""), eval_batch_size, 1))


def described(ids: Integer[np.ndarray, " n"]) -> str:
    """Return the length of a corpus and a digest of it; of a large one, of its ends and of samples at equal distances.

    What it reads is bounded, so that it takes no longer for terabytes. Two corpora of one length that differ between
    the samples only are not told apart.
    """
    raw = ids.view(np.uint8)
    hasher = xxhash.xxh3_64()
    if raw.size <= WHOLE_BYTES:
        hasher.update(raw.data)
    else:
        for number in range(SAMPLES):
            start = number * (raw.size - SAMPLE_BYTES) // (SAMPLES - 1)
            hasher.update(raw[start : start + SAMPLE_BYTES].data)
    return f"{len(ids):,} tokens with digest {hasher.hexdigest()}"


def load_source(config: DataConfig, seq_len: int) -> Source:
    """Open the corpus and cut it into windows of `seq_len` + 1 token ids.

    Raises:
      ValueError: the path is missing, no file matches, or the corpus is too short for one window of each part; or the
        user's own source is none.
    """
    if seq_len < 1:
        raise ValueError(f"the sequence length is {seq_len}; it must be at least 1")
    if config.module:
        samples = open_own(config.module, config.args, seq_len, config.ids)
        cut = len(samples) - round(len(samples) * config.held_out_fraction)
        if not 0 < cut < len(samples):
            raise ValueError(
                f"data.module '{config.module}' has {len(samples)} samples, {cut} of them for training; give more, or "
                f"another data.held_out_fraction ({config.held_out_fraction})"
            )
        return Source(replace(samples, stop=cut), replace(samples, start=cut), config.ids, samples.described())
    if config.format == "bytes":
        ids = _read_bytes(config)
    else:
        _count_tokens(config)
        ids = np.memmap(config.path, dtype=np.dtype(config.token_dtype).newbyteorder("<"), mode="r")
    return _cut(config, ids, seq_len, described(ids))


def _cut(config: DataConfig, ids: Integer[np.ndarray, " n"], seq_len: int, corpus: str) -> Source:
    cut = len(ids) - round(len(ids) * config.held_out_fraction)
    source = Source(
        train=Windows(ids[:cut], seq_len), held_out=Windows(ids[cut:], seq_len), vocab_size=config.ids, corpus=corpus
    )
    if not len(source.train) or not len(source.held_out):
        raise ValueError(
            f"data.path '{config.path}' has {len(ids)} tokens: {len(source.train)} training and "
            f"{len(source.held_out)} held-out windows of {seq_len}; give more text, a shorter sequence, or another "
            f"data.held_out_fraction ({config.held_out_fraction})"
        )
    return source


def _stack(windows: Sequence[Int32[np.ndarray, " t"]], vocab_size: int) -> Int32[np.ndarray, "b t"]:
    batch = np.stack(windows)
    if batch.max() >= vocab_size:  # an embedding look-up would clamp it silently
        raise ValueError(f"the data has token id {batch.max()}, data.vocab_size is {vocab_size}; correct one of them")
    return batch


class SampleOrder:
    """The global order of the training windows: the same for everybody who gives the same corpus and seed.

    Args:
      source: the corpus.
      seed: of the order; every epoch has an order of its own.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self._source = source
        # Random access without a permutation in memory; `repeat` reshuffles every epoch.
        self._order = grain.MapDataset.range(len(source.train)).shuffle(seed=seed).repeat()

    def window_id(self, position: int) -> int:
        """Return the number of the window of `source.train` that has this position."""
        return int(self._order[position])

    def batch(self, ranges: Sequence[tuple[int, int]]) -> Int32[np.ndarray, "b t"]:
        """Return the windows of positions [start, stop) of every range, in their order: int32 [n, seq_len + 1].

        Raises:
          ValueError: there is no position, or the data has a token id that it should not have.
        """
        positions = [position for start, stop in ranges for position in range(start, stop)]
        if not positions or min(positions) < 0:
            raise ValueError(f"ranges {tuple(ranges)} hold no positions from 0 on; give [start, stop) pairs")
        return _stack([self._source.train[self.window_id(p)] for p in positions], self._source.vocab_size)

    def batches(self, size: int) -> Iterator[Int32[np.ndarray, "b t"]]:
        """Yield everything in batches of so many windows, without end: the reading of one who trains alone."""
        for start in itertools.count(0, size):
            yield self.batch(((start, start + size),))


def eval_batches(source: Source, batch_size: int, max_batches: int) -> Iterator[Int32[np.ndarray, "b t"]]:
    """Return up to `max_batches` batches of held-out windows, spread evenly over the held-out part, always the same.

    Raises:
      ValueError: the held-out part has fewer windows than one batch.
    """
    available = len(source.held_out) // batch_size
    if available < 1 or max_batches < 1:
        raise ValueError(
            f"{len(source.held_out)} held-out windows make no batch of {batch_size} (at most {max_batches} batches "
            "wanted); raise data.held_out_fraction, lower train.eval_batch_size, or give more text"
        )
    count = min(available, max_batches) * batch_size
    chosen = [i * len(source.held_out) // count for i in range(count)]
    for start in range(0, count, batch_size):
        windows = [source.held_out[i] for i in chosen[start : start + batch_size]]
        yield _stack(windows, source.vocab_size)
