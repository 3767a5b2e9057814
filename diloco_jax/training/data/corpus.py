"""Corpora: they are split into a training part and a held-out part, and cut into windows of token ids.

    corpus -> [train | held out] -> windows

The held-out part is the end of the corpus, and no training window overlaps it. Token stores and the user's own sources
(own.py) may have other samples than windows. A corpus may be a mixture of sources (mixture.py).
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from zlib import crc32

import numpy as np
import xxhash
from jaxtyping import Integer

from diloco_jax.training.chat.packing import PackedConversations, WithWeights, pack_conversations
from diloco_jax.training.data.config import PLAIN, STDLIB, DataConfig, SourceConfig
from diloco_jax.training.data.documents import MESSAGES, TEXT, TextSource
from diloco_jax.training.data.image_store import (
    ImageStore,
    ImageTexts,
    WithoutImages,
    image_samples,
    open_image_store,
)
from diloco_jax.training.data.image_tokens import open_image_tokenizer
from diloco_jax.training.data.mixture import Samples, mixed
from diloco_jax.training.data.own import open_own
from diloco_jax.training.data.pictures import PictureSource
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, Sample
from diloco_jax.training.data.store import Store, is_store, local_store
from diloco_jax.training.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from diloco_jax.training.data.tokenizing import TRAIN, cached_store

# A corpus up to this size is digested as a whole; of a larger one only samples are digested.
WHOLE_BYTES = 1 << 24
SAMPLES, SAMPLE_BYTES = 64, 4096
STDLIB_SKIP = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `seq_len` + 1 ids from the range start..stop-1.

    Neighbours share one id, which is the last target of the first window and the first input of the second. With
    `separate`, windows of a store have segments: each id's document, counted from 1 within the window.
    """

    ids: Integer[np.ndarray, " n"] | Store
    seq_len: int
    start: int = 0
    # None: the end of the ids.
    stop: int | None = None
    separate: bool = False

    def __len__(self) -> int:
        stop = len(self.ids) if self.stop is None else self.stop
        return max(stop - self.start - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = self.start + index * self.seq_len
        stop = start + self.seq_len + 1
        if not isinstance(self.ids, Store):
            return {TOKENS: self.ids[start:stop].astype(np.int32)}
        sample = {TOKENS: self.ids.read(start, stop)}
        if self.separate:
            sample[SEGMENTS] = _segments(self.ids, start, stop, stop - start)
        return sample


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Samples of consecutive whole documents, as many as fit; the rest of a sample is padding with segment 0.

    Only a document longer than a sample is cut. Its pieces share one id, so that each id but the first is predicted.
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
            # The next sample continues this document, so both share one id.
            stop += 1
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
    """Pack the documents of a range of tokens in order; a sample ends before the first document that does not fit."""
    # Numba takes long to import, and only packed documents need it.
    from diloco_jax.training.data.next_fit import next_fit

    rows, row, begin = [np.array([start], np.int64)], start, start
    # The loop over files bounds the memory: one file, and 8 bytes for each sample.
    for _, low, high in store.files(start, stop):
        ends = store.ends(low, high)
        if not len(ends) or ends[-1] != high:
            ends = np.append(ends, high)
        out = np.empty(len(ends) + (high - row) // seq_len + 2, np.int64)
        row, begin, count = next_fit(ends, row, begin, seq_len, out)
        rows.append(out[:count].copy())
    return PackedDocuments(store, np.concatenate(rows).astype(np.uint64), stop, seq_len)


@dataclass(frozen=True, slots=True)
class Source:
    """A corpus cut into samples for training and for evaluation, which share no id."""

    train: Samples
    held_out: Samples
    vocab_size: int
    corpus: str = ""
    """Length and digest of the corpus (`described`); islands compare them to check that they read the same data."""
    parts: Mapping[str, Source] = field(default_factory=dict)
    """The sources of a mixture, by name."""
    weights: tuple[float, ...] = ()
    """The shares of these sources in the order, with any sum."""
    evaluation: Mapping[str, Samples] = field(default_factory=dict)
    """Evaluation sets by name: the held-out part of each source of a mixture, and the sets of data.evaluation."""
    tokenizer: Tokenizer | None = None
    """Tokenizer that produced the ids; None if unknown."""
    store: Store | ImageStore | None = None


def _stdlib_files() -> list[Path]:
    files = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # Installed packages are skipped, because they have far more files than the library.
        inside[:] = [name for name in inside if name not in STDLIB_SKIP]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def find_files(config: SourceConfig) -> tuple[Path, list[Path]]:
    """Return the root of a corpus of bytes and its files; ValueError if there is none that matches."""
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
        if root.is_dir() and not any(root.iterdir()):
            raise ValueError(f"data.path '{config.path}' is empty; put files into it, or name another folder")
        patterns = " or ".join(config.patterns)
        raise ValueError(f"data.path '{config.path}' has no file that matches {patterns}; correct data.patterns")
    return root, files


def _read_bytes(config: SourceConfig) -> Integer[np.ndarray, " n"]:
    """Read all files, with a zero byte after each, in a fixed order that mixes folders."""
    root, files = find_files(config)
    # The order follows a hash of the name. In alphabetical order the held-out tail would be whole packages that differ
    # from the training data.
    names = {p: p.relative_to(root).as_posix() for p in files}
    files.sort(key=lambda p: (crc32(os.fsencode(names[p])), names[p]))
    return np.frombuffer(b"".join(part for p in files for part in (p.read_bytes(), b"\0")), np.uint8)


def count_tokens(config: SourceConfig) -> int:
    """Return the number of ids in a token file, from its size."""
    path = Path(config.path)
    if not path.is_file():
        raise ValueError(f"data.path '{config.path}' is not a file; give one file of {config.token_dtype} token ids")
    dtype = np.dtype(config.token_dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(
            f"data.path '{config.path}' has {size} bytes, not a positive multiple of {dtype.itemsize}; "
            f"is data.token_dtype {config.token_dtype} right?"
        )
    return size // dtype.itemsize


def described(ids: Integer[np.ndarray, " n"]) -> str:
    """Return the length and a digest of a corpus.

    For a large corpus the digest covers evenly spaced samples, the first and last bytes included. So it takes bounded
    time, but it cannot distinguish corpora of equal length that differ only between the samples.
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
    """Open the corpus and cut it into samples of `seq_len` + 1 token ids.

    Raises:
      ValueError: the path is missing; no file matches; the corpus is too short for one sample of each part; the sources
        have different tokenizers; or the user's own source does not work.
    """
    if seq_len < 1:
        raise ValueError(f"the sequence length is {seq_len}; it must be at least 1")
    parts = {name: _load_part(config, part, seq_len) for name, part in config.sources.items()}
    if config.module:
        parts = {"": _load_own(config, seq_len)}
    others = {name: _load_part(config, part, seq_len, whole=True) for name, part in config.evaluation.items()}
    for fit in (*((_with_images,) if config.with_images else ()), *((_with_weights,) if config.with_chat else ())):
        parts, others = ({name: fit(one, config) for name, one in of.items()} for of in (parts, others))
    digests = {one.tokenizer.digest: name for name, one in {**parts, **others}.items() if one.tokenizer}
    if len(digests) > 1:
        one, other = list(digests.values())[:2]
        raise ValueError(f"data sources '{one}' and '{other}' have different tokenizers; tokenize both with one")
    source = next(iter(parts.values()))
    if config.mixture:
        source = united(parts, tuple(part.weight for part in config.sources.values()))
    return replace(source, evaluation={**source.evaluation, **{name: one.held_out for name, one in others.items()}})


def united(parts: Mapping[str, Source], weights: tuple[float, ...]) -> Source:
    """Return the mixture of sources, in proportion to their weights; each is an evaluation set, too."""
    corpora = repr({name: part.corpus for name, part in parts.items()})
    return Source(
        train=mixed([part.train for part in parts.values()]),
        held_out=mixed([part.held_out for part in parts.values()], weights),
        vocab_size=max(part.vocab_size for part in parts.values()),
        corpus=f"{len(parts)} sources with digest {xxhash.xxh3_64(corpora.encode()).hexdigest()}",
        parts=parts,
        weights=weights,
        evaluation={name: part.held_out for name, part in parts.items()},
        tokenizer=_largest([part.tokenizer for part in parts.values()]),
    )


def tokenizer_of(config: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of a run's data; None if unknown.

    The data is read only if its tokenizer is stored or trained there.
    """
    trained, found = config.tokenizer.startswith(TRAIN), list[Tokenizer | None]()
    for part in config.sources.values():
        if part.format == "bytes":
            found.append(open_tokenizer(BYTES))
        elif part.format == "images":
            made = None if trained else open_image_tokenizer(config.tokenizer, config.images)
            found.append((made or _open_images(config, part).tokenizer).tokenizer)
        elif (
            part.format == "store"
            or (part.format == "chat" and is_store(part.path))
            or (trained and part.format != "tokens")
        ):
            found.append(open_store(config, part).tokenizer)
    return _largest(found) or (open_tokenizer(config.tokenizer) if config.tokenizer else None)


def image_ids(config: DataConfig) -> dict[str, int]:
    """Return the ids of the special tokens of images by their setting in the model; none if the data has no images."""
    part = next((part for part in config.sources.values() if part.format == "images"), None)
    if part is None:
        return {}
    made = _open_images(config, part).tokenizer
    return {"image_token": made.image, "image_begin": made.begin, "image_end": made.end}


def _largest(tokenizers: Sequence[Tokenizer | None]) -> Tokenizer | None:
    """Return the tokenizer with the most ids: sources share one, but bytes have more ids beside images."""
    return max((one for one in tokenizers if one), key=lambda one: one.vocab_size, default=None)


def _with_images(source: Source, config: DataConfig) -> Source:
    """Return a source whose samples have arrays for images."""
    if isinstance(source.held_out, ImageTexts):
        return source
    wrapped = (WithoutImages(samples, config.images.soft_tokens) for samples in (source.train, source.held_out))
    train, held_out = wrapped
    return replace(source, train=train, held_out=held_out)


def _with_weights(source: Source, config: DataConfig) -> Source:
    """Return a source whose samples have weights in the loss."""
    if isinstance(source.held_out, PackedConversations):
        return source
    return replace(source, train=WithWeights(source.train), held_out=WithWeights(source.held_out))


def _load_own(config: DataConfig, seq_len: int) -> Source:
    samples = open_own(config.module, config.args, seq_len, config.ids)
    cut = len(samples) - round(len(samples) * config.held_out_fraction)
    if not 0 < cut < len(samples):
        raise ValueError(
            f"data.module '{config.module}' has {len(samples)} samples, {cut} of them for training; give more, or "
            f"another data.held_out_fraction ({config.held_out_fraction})"
        )
    return Source(replace(samples, stop=cut), replace(samples, start=cut), config.ids, samples.described())


def _load_part(config: DataConfig, part: SourceConfig, seq_len: int, *, whole: bool = False) -> Source:
    """Open one source; with `whole`, all of it is held out."""
    if part.format == "images":
        return _load_images(config, part, seq_len, whole=whole)
    if part.format not in PLAIN:
        store = open_store(config, part)
        cut = 0 if whole else store.near(len(store) - round(len(store) * config.held_out_fraction))
        train, held_out = (
            _samples(store, start, stop, config, seq_len) for start, stop in ((0, cut), (cut, len(store)))
        )
        made = Source(train, held_out, store.vocab_size, store.described(), tokenizer=store.tokenizer, store=store)
        return checked(made, config, part, len(store), seq_len, whole=whole)
    if part.format == "bytes":
        ids = _read_bytes(part)
    else:
        count_tokens(part)
        ids = np.memmap(part.path, dtype=np.dtype(part.token_dtype).newbyteorder("<"), mode="r")
    source = cut_source(config, part, ids, seq_len, described(ids), whole=whole)
    known = BYTES if part.format == "bytes" else config.tokenizer
    return replace(source, tokenizer=open_tokenizer(known)) if known else source


def _load_images(config: DataConfig, part: SourceConfig, seq_len: int, *, whole: bool) -> Source:
    store = _open_images(config, part)
    cut = 0 if whole else len(store) - round(len(store) * config.held_out_fraction)
    if not (cut or whole) or cut == len(store):
        raise ValueError(
            f"data.path '{part.path}' has {len(store)} images, {cut} of them for training; give more, or another "
            f"data.held_out_fraction ({config.held_out_fraction})"
        )
    train, held_out = (image_samples(store, seq_len, *ends) for ends in ((0, cut), (cut, len(store))))
    tokenizer = store.tokenizer.tokenizer
    return Source(train, held_out, tokenizer.vocab_size, store.described(), tokenizer=tokenizer, store=store)


def _open_images(config: DataConfig, part: SourceConfig) -> ImageStore:
    source = PictureSource(part.path, part.patterns, part.field, config.images.column)
    return open_image_store(source, config.tokenizer, config.images)


def open_store(config: DataConfig, part: SourceConfig) -> Store:
    """Open the store of a source; text becomes a store when this machine reads it for the first time."""
    if part.format == "store":
        return _of_kind(Store(local_store(part.path)), chat=False)
    if part.format != "chat":
        source = TextSource(part.path, part.format, part.patterns, part.field)
    elif is_store(part.path):
        store = _of_kind(Store(local_store(part.path)), chat=True)
        if config.loss_on not in (None, made := store.facts["loss_on"]):
            raise ValueError(
                f"the store '{store.folder}' was made with loss on {made}, but data.loss_on is {config.loss_on}; "
                f"remove data.loss_on, or make a store with --loss-on {config.loss_on}"
            )
        return store
    elif not config.tokenizer:
        raise ValueError(
            f"'{part.path}' has conversations and is not a store, so it needs data.tokenizer: name the folder of a "
            "tokenizer with a chat template"
        )
    else:
        field = MESSAGES if part.field == TEXT else part.field
        source = TextSource(part.path, "", part.patterns, field, config.loss_on or "completion")
    return Store(cached_store(source, config.tokenizer))


def _of_kind(store: Store, *, chat: bool) -> Store:
    """Return a store after a check that it has conversations, or that it has none."""
    if store.has_weights != chat:
        have, form = ("text", "store") if chat else ("conversations", "chat")
        raise ValueError(f"the store '{store.folder}' has {have}; set data.format to {form}")
    return store


def _samples(store: Store, start: int, stop: int, config: DataConfig, seq_len: int) -> Samples:
    if store.has_weights:
        return pack_conversations(store, start, stop, seq_len)
    if config.documents == "whole":
        return pack(store, start, stop, seq_len)
    return Windows(store, seq_len, start, stop, separate=config.documents == "separate")


def cut_source(
    config: DataConfig,
    part: SourceConfig,
    ids: Integer[np.ndarray, " n"],
    seq_len: int,
    corpus: str,
    *,
    whole: bool = False,
) -> Source:
    """Cut an array of ids into windows for training and for evaluation."""
    cut = 0 if whole else len(ids) - round(len(ids) * config.held_out_fraction)
    bound = 256 if part.format == "bytes" else config.vocab_size
    source = Source(Windows(ids[:cut], seq_len), Windows(ids[cut:], seq_len), bound, corpus)
    return checked(source, config, part, len(ids), seq_len, whole=whole)


def checked(source: Source, config: DataConfig, part: SourceConfig, count: int, seq_len: int, *, whole: bool) -> Source:
    """Return a source after a check that it has training samples and held-out samples."""
    packed = isinstance(source.held_out, PackedConversations)
    if packed and not (len(source.held_out) and (whole or len(source.train))):
        raise ValueError(
            f"'{part.path}' has {len(source.train)} training and {len(source.held_out)} held-out samples of whole "
            f"conversations within {seq_len} tokens; raise train.seq_len, give more or shorter conversations, or "
            f"another data.held_out_fraction ({config.held_out_fraction})"
        )
    if not (whole or len(source.train)) or not len(source.held_out):
        raise ValueError(
            f"data.path '{part.path}' has {count} token{'s' * (count != 1)}: {len(source.train)} training and "
            f"{len(source.held_out)} held-out windows of {seq_len}; give more text, a shorter sequence, or another "
            f"data.held_out_fraction ({config.held_out_fraction})"
        )
    return source
