"""Token stores: folders of token ids with random access to ids and to the ends of documents.

store.json           counts, dtype, digests
tokens-00000.bin     ids, in as many files as needed
documents-00000.bin  the ends of the documents in the file of the same number, uint64
flags-00000.bin      of conversations: for each id 1 if it is trained on, and 2 more at the end of a turn, uint8
tokenizer.json       the tokenizer, unless a token is a byte
"""

import fcntl
import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from diloco_jax.training.data.documents import file_system
from diloco_jax.training.data.tokenizer import BYTES, TOKENIZER_FILE, open_tokenizer

STORE_FILE = "store.json"
# Earlier releases read text alone, and would train on every token of a conversation.
VERSION, CHAT_VERSION = 1, 2
TOKENS_NAME, DOCUMENTS_NAME, FLAGS_NAME = "tokens-{:05d}.bin", "documents-{:05d}.bin", "flags-{:05d}.bin"
DTYPES = ("uint16", "uint32")
# The bits of a flag: the token is trained on; it is the last one of an assistant's turn.
TRAINED, TURN_END = np.uint8(1), np.uint8(2)
# The longest wait for another process that builds the same store.
WAIT_S = 12 * 3600.0
POLL_S = 0.5


class Store:
    """A finished token store on this machine, memory-mapped; `facts` is the content of its store.json.

    Raises:
        ValueError: the folder has no store, or the store is unfinished or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.facts = folder, read_facts(folder)
        self.tokenizer = open_tokenizer(BYTES if self.facts["tokenizer"] == BYTES else folder)
        if self.tokenizer.digest != self.facts["tokenizer"]:
            raise ValueError(
                f"{folder / TOKENIZER_FILE} is not the tokenizer that produced this store's ids; copy the store again"
            )
        dtype = np.dtype(self.facts["dtype"]).newbyteorder("<")
        self._tokens, self._ends, self._starts, self._flags = [], [], [0], list[np.ndarray]()
        for number, part in enumerate(self.facts["files"]):
            self._tokens.append(_mapped(folder / TOKENS_NAME.format(number), dtype, part["tokens"]))
            self._ends.append(_mapped(folder / DOCUMENTS_NAME.format(number), np.dtype("<u8"), part["documents"]))
            if self.has_weights:
                self._flags.append(_mapped(folder / FLAGS_NAME.format(number), np.dtype("u1"), part["tokens"]))
            self._starts.append(self._starts[-1] + part["tokens"])
            if part["tokens"] != (self._ends[-1][-1] if part["documents"] else 0):
                raise self._damaged(number)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def has_weights(self) -> bool:
        """Return whether the store has conversations, whose tokens have weights in the loss."""
        return "loss_on" in self.facts

    def described(self) -> str:
        """Return the number of tokens and their digest, both from store.json."""
        digests = [[part["digest"], part["tokens"], part["documents"]] for part in self.facts["files"]]
        return f"{len(self):,} tokens with digest {xxhash.xxh3_64(json.dumps(digests).encode()).hexdigest()}"

    def files(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, start, stop) for each file with a part of a range; both count tokens of the whole store."""
        for number in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            low, high = max(start, self._starts[number]), min(stop, self._starts[number + 1])
            if low < high:
                yield number, low, high

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of a range as int32."""
        return np.concatenate(self._shares(self._tokens, start, stop)).astype(np.int32)

    def flags(self, start: int, stop: int) -> np.ndarray:
        """Return the flags of a range of conversations as uint8: TRAINED, TURN_END or both."""
        return np.concatenate(self._shares(self._flags, start, stop))

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Return the weights of a range of conversations in the loss, as float32."""
        return (self.flags(start, stop) & TRAINED).astype(np.float32)

    def _shares(self, files: Sequence[np.ndarray], start: int, stop: int) -> list[np.ndarray]:
        return [
            files[number][low - self._starts[number] : high - self._starts[number]]
            for number, low, high in self.files(start, stop)
        ]

    def ends(self, start: int, stop: int) -> np.ndarray:
        """Return the ends of documents after `start` and before or at `stop`, as int64."""
        found = [np.empty(0, np.int64)]
        for number, low, high in self.files(start, stop):
            first, ends = self._starts[number], self._ends[number]
            # The keys have the array's dtype, because with another one searchsorted would copy the whole array.
            begin, end = np.searchsorted(ends, np.array((low - first, high - first), np.uint64), side="right")
            found.append(ends[begin:end].astype(np.int64) + first)
            # Ends must ascend within the range, because packing would write beyond its memory otherwise.
            edges = np.concatenate(([low], found[-1], [high + 1]))
            if (edges[1:] <= edges[:-1]).any():
                raise self._damaged(number)
        return np.concatenate(found)

    def _damaged(self, number: int) -> ValueError:
        path = self.folder / DOCUMENTS_NAME.format(number)
        return ValueError(f"{path} is damaged: its ends of documents do not ascend; make or copy the store again")

    def near(self, target: int) -> int:
        """Return an end of a document near `target` that leaves tokens on both sides; `target` if there is none."""
        for number, low, high in self.files(min(target, len(self) - 1), len(self)):
            after = self.ends(low, high)
            if len(after) and after[0] < len(self):
                return int(after[0])
            before = self.ends(self._starts[number], low)
            edges = [self._starts[number], *before[-1:]]
            return int(edges[-1]) or target
        return target


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    have = path.stat().st_size if path.exists() else None
    if have != count * dtype.itemsize:
        said = "is missing" if have is None else f"has {have} bytes"
        raise ValueError(f"{path} {said}, {STORE_FILE} says {count * dtype.itemsize}; make or copy the store again")
    return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)


def read_facts(folder: Path, *, unfinished: bool = False) -> dict[str, Any]:
    """Read store.json; ValueError if it is missing, damaged, of another version, or not finished."""
    path = folder / STORE_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version, finished, _ = facts["version"], facts["finished"], (facts["made_from"], facts["files"])
        if finished and version in (VERSION, CHAT_VERSION):
            counts = [file[key] for file in facts["files"] for key in ("tokens", "documents")]
            if not all(isinstance(count, int) and count >= 0 for count in (facts["vocab_size"], *counts)):
                raise ValueError("a count is not a number")
            if facts["dtype"] not in DTYPES:
                raise ValueError(f"dtype is {facts['dtype']}, not {' or '.join(DTYPES)}")
            _ = facts["tokenizer"], [file["digest"] for file in facts["files"]]
    except OSError as error:
        raise ValueError(
            f"'{folder}' is not a token store: it has no {STORE_FILE} ({error.strerror}); see diloco tokenize"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); make or copy the store again") from error
    if version not in (VERSION, CHAT_VERSION):
        raise ValueError(
            f"{path} has version {version}, this package reads {VERSION} and {CHAT_VERSION}; make the store again"
        )
    if not finished and not unfinished:
        raise ValueError(f"the store '{folder}' is not finished; run the same diloco tokenize again, it continues")
    return dict(facts)


def cache_folder() -> Path:
    """Return the folder of this machine's cache: $DILOCO_CACHE, or ~/.cache/diloco_jax."""
    return Path(os.environ.get("DILOCO_CACHE") or Path.home() / ".cache" / "diloco_jax")


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file until the block ends; ValueError if it is not free within `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise ValueError(
                        f"another process has held {path} for {wait_s:.0f} s; wait for it, or end it"
                    ) from None
                time.sleep(POLL_S)
        yield


def is_store(path: str) -> bool:
    """Return whether a path or URL is the folder of a store."""
    fs, root = file_system(path)
    return bool(fs.exists(f"{root}/{STORE_FILE}"))


def local_store(path: str) -> Path:
    """Return a store's folder on this machine; a remote store is copied at the first call."""
    fs, root = file_system(path)
    if "file" in fs.protocol:
        return Path(root)
    try:
        facts = fs.cat_file(f"{root}/{STORE_FILE}")
    except FileNotFoundError as error:
        raise ValueError(f"'{path}' is not a token store: it has no {STORE_FILE}; see diloco tokenize") from error
    folder = cache_folder() / "copies" / xxhash.xxh3_128(path.encode() + facts).hexdigest()
    with locked(folder.with_suffix(".lock"), WAIT_S):
        if not (folder / STORE_FILE).exists():
            names = [name for name in fs.ls(root, detail=False) if not name.endswith(STORE_FILE)]
            folder.mkdir(exist_ok=True)
            for name in names:
                fs.get_file(name, str(folder / name.rpartition("/")[2]))
            # This file is written last, so that an interrupted copy is made again.
            (folder / STORE_FILE).write_bytes(facts)
    return folder
