"""Text as windows of token ids.

    corpus -> [train | held out] -> windows

Samples of the user's own (own.py) take the place of windows. The held-out part is the tail of the corpus; no training
window touches it.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from zlib import crc32

import numpy as np
import xxhash
from jaxtyping import Integer

from diloco_jax.training.data.config import STDLIB, DataConfig
from diloco_jax.training.data.own import OwnSamples, open_own
from diloco_jax.training.data.sample import TOKENS, Sample

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

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        return {TOKENS: self.ids[start : start + self.seq_len + 1].astype(np.int32)}


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


def find_files(config: DataConfig) -> tuple[Path, list[Path]]:
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
    root, files = find_files(config)
    # By hash of the name: an alphabetical tail would hold out whole packages, unlike anything trained on.
    names = {p: p.relative_to(root).as_posix() for p in files}
    files.sort(key=lambda p: (crc32(names[p].encode()), names[p]))
    return np.frombuffer(b"".join(part for p in files for part in (p.read_bytes(), b"\0")), np.uint8)


def count_tokens(config: DataConfig) -> int:
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
        count_tokens(config)
        ids = np.memmap(config.path, dtype=np.dtype(config.token_dtype).newbyteorder("<"), mode="r")
    return cut_source(config, ids, seq_len, described(ids))


def cut_source(config: DataConfig, ids: Integer[np.ndarray, " n"], seq_len: int, corpus: str) -> Source:
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
