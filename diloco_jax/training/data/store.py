"""Token stores: folders of token ids that were made once, with random access to ids and to the ends of documents.

store.json, tokens-00000.bin ..., documents-00000.bin ... (ends of documents in that file, uint64), tokenizer.json
"""

import fcntl
import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from diloco_jax.training.data.documents import file_system
from diloco_jax.training.data.tokenizer import BYTES, TOKENIZER_FILE, open_tokenizer

STORE_FILE, VERSION = "store.json", 1
TOKENS_NAME, DOCUMENTS_NAME = "tokens-{:05d}.bin", "documents-{:05d}.bin"
DTYPES = ("uint16", "uint32")
WAIT_S = 12 * 3600.0  # for another process that makes what we need
POLL_S = 0.5


class Store:
    """A finished token store on this machine, memory-mapped; `facts` is its store.json.

    Raises:
        ValueError: there is none, or it is unfinished or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.facts = folder, read_facts(folder)
        self.tokenizer = open_tokenizer(BYTES if self.facts["tokenizer"] == BYTES else folder)
        if self.tokenizer.digest != self.facts["tokenizer"]:
            raise ValueError(f"{folder / TOKENIZER_FILE} did not make the store beside it; copy the store again")
        dtype = np.dtype(self.facts["dtype"]).newbyteorder("<")
        self._tokens, self._ends, self._starts = [], [], [0]
        for number, part in enumerate(self.facts["files"]):
            self._tokens.append(_mapped(folder / TOKENS_NAME.format(number), dtype, part["tokens"]))
            self._ends.append(_mapped(folder / DOCUMENTS_NAME.format(number), np.dtype("<u8"), part["documents"]))
            self._starts.append(self._starts[-1] + part["tokens"])
            if part["tokens"] != (self._ends[-1][-1] if part["documents"] else 0):
                raise self._damaged(number)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    def described(self) -> str:
        """Return the number of the tokens and a digest of them, both from store.json."""
        digests = [[part["digest"], part["tokens"], part["documents"]] for part in self.facts["files"]]
        return f"{len(self):,} tokens with digest {xxhash.xxh3_64(json.dumps(digests).encode()).hexdigest()}"

    def files(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, start, stop) of each file's share of a range of tokens; start and stop of all tokens."""
        for number in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            low, high = max(start, self._starts[number]), min(stop, self._starts[number + 1])
            if low < high:
                yield number, low, high

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of a range as int32."""
        shares = [
            self._tokens[number][low - self._starts[number] : high - self._starts[number]]
            for number, low, high in self.files(start, stop)
        ]
        return np.concatenate(shares).astype(np.int32)

    def ends(self, start: int, stop: int) -> np.ndarray:
        """Return the ends of documents after `start` and before or at `stop`, as int64."""
        found = [np.empty(0, np.int64)]
        for number, low, high in self.files(start, stop):
            first, ends = self._starts[number], self._ends[number]
            # of the array's own type: anything else would copy all of it
            begin, end = np.searchsorted(ends, np.array((low - first, high - first), np.uint64), side="right")
            found.append(ends[begin:end].astype(np.int64) + first)
            edges = np.concatenate(([low], found[-1], [high + 1]))  # else packing would write beyond its memory
            if (edges[1:] <= edges[:-1]).any():
                raise self._damaged(number)
        return np.concatenate(found)

    def _damaged(self, number: int) -> ValueError:
        path = self.folder / DOCUMENTS_NAME.format(number)
        return ValueError(f"{path} is damaged: its ends of documents do not ascend; make or copy the store again")

    def near(self, target: int) -> int:
        """Return an end of a document next to a token, such that both sides have some; else that token."""
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
    """Read store.json; a ValueError says why it is none that this package reads, or that the store is not finished."""
    path = folder / STORE_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version, finished, _ = facts["version"], facts["finished"], (facts["made_from"], facts["files"])
        if finished and version == VERSION:
            counts = [file[key] for file in facts["files"] for key in ("tokens", "documents")]
            if not all(isinstance(count, int) and count >= 0 for count in (facts["vocab_size"], *counts)):
                raise ValueError("a count is no number")
            if facts["dtype"] not in DTYPES:
                raise ValueError(f"dtype is {facts['dtype']}, not {' or '.join(DTYPES)}")
            _ = facts["tokenizer"], [file["digest"] for file in facts["files"]]
    except OSError as error:
        raise ValueError(
            f"'{folder}' is no token store: no {STORE_FILE} ({error.strerror}); see diloco tokenize"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); make or copy the store again") from error
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this package reads {VERSION}; make the store again")
    if not finished and not unfinished:
        raise ValueError(f"the store '{folder}' is not finished; give the same diloco tokenize again, it goes on")
    return dict(facts)


def cache_folder() -> Path:
    """Return the folder for what is made once on a machine: $DILOCO_CACHE, or one in the home."""
    return Path(os.environ.get("DILOCO_CACHE") or Path.home() / ".cache" / "diloco_jax")


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock that other processes respect, as long as this one lives; ValueError after `wait_s`."""
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


def local_store(path: str) -> Path:
    """Return the folder of a store on this machine; of a remote one a copy, made once."""
    fs, root = file_system(path)
    if "file" in fs.protocol:
        return Path(root)
    try:
        facts = fs.cat_file(f"{root}/{STORE_FILE}")
    except FileNotFoundError as error:
        raise ValueError(f"'{path}' is no token store: no {STORE_FILE}; see diloco tokenize") from error
    folder = cache_folder() / "copies" / xxhash.xxh3_128(path.encode() + facts).hexdigest()
    with locked(folder.with_suffix(".lock"), WAIT_S):
        if not (folder / STORE_FILE).exists():
            names = [name for name in fs.ls(root, detail=False) if not name.endswith(STORE_FILE)]
            folder.mkdir(exist_ok=True)
            for name in names:
                fs.get_file(name, str(folder / name.rpartition("/")[2]))
            (folder / STORE_FILE).write_bytes(facts)  # last: a copy that was cut off begins again
    return folder
