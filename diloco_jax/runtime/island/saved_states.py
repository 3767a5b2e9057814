"""The states that one process of an island saves: its own shards, in files that can be read without other processes.

    FOLDER/host-0-of-2/step_00000040.shards      the bytes of the shards, one after the other
    FOLDER/host-0-of-2/step_00000040.loader      the position of this host's loader, if it has one (loader_state.py)
    FOLDER/host-0-of-2/step_00000040.json        written last: names and layouts of the shards, and the checksums

A state is complete when the last file exists; the leader uses it when it is complete on all hosts. One folder is
below the run's folder, and another one may be anywhere that fsspec can write; each of them is enough to recover.
"""

from __future__ import annotations

import json
import logging
import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from diloco_jax.core.codec import as_bytes
from diloco_jax.runtime.island.loader_state import LOADER_BYTES_MAX
from diloco_jax.runtime.island.spare_time import SpareTime
from diloco_jax.training.data.documents import file_system
from diloco_jax.training.whole_state.finite import UnusableState, check_finite
from diloco_jax.training.whole_state.staging import PartialLeaf, Shard, StagedShards, read_shards

CHUNK_BYTES = 1 << 22  # between pauses
RECORD_BYTES_MAX = 1 << 26
# The newest complete state, and the one that is being written.
SAVED_MAX = 2
SHARDS, LOADER, RECORD = ".shards", ".loader", ".json"

log = logging.getLogger(__name__)
Leaves = dict[str, PartialLeaf]


class StateName(NamedTuple):
    """The name of a learner's state on disk."""

    incarnation: int
    local_step: int
    global_step: int
    digests: tuple[int, ...]  # its anchors
    # Id of its run; "" if an older release saved it.
    run: str = ""

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> StateName:
        """Return the name that `to_text` wrote; ValueError if it is none."""
        try:
            return cls.parse(json.loads(text))
        except RecursionError as error:
            raise ValueError(f"{text[:80]} is not the name of a state") from error

    @classmethod
    def parse(cls, fields: Any) -> StateName:
        """Return the name from its JSON fields; ValueError if they are not those of a name."""
        try:
            incarnation, local_step, global_step, digests, *run = fields
            counters = int(incarnation), int(local_step), int(global_step)
            return cls(*counters, tuple(map(int, digests)), *map(str, run[:1]))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{str(fields)[:80]} is not the name of a state") from error


class SavedState(NamedTuple):
    """State of one process: its shards, and the state of its loader, None if it had none."""

    leaves: Leaves
    loader: bytes | None = None


class StateFolder:
    """One process's folder below an island's, a path or a URL; ValueError if this process cannot write to such URLs."""

    def __init__(self, url: str, host: int, hosts: int) -> None:
        self._fs, path = file_system(url)
        self.url = url
        self._island = path
        self._folder = posixpath.join(path, f"host-{host}-of-{hosts}")

    def _path(self, global_step: int, kind: str) -> str:
        return posixpath.join(self._folder, f"step_{global_step:08d}{kind}")

    def _entries(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [posixpath.basename(path.rstrip("/")) for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def names(self) -> dict[StateName, dict[str, Any]]:
        """Return the records of the complete states; the log names those that cannot be read."""
        found = {}
        steps = [entry for entry in self._entries(self._folder) if entry.endswith(RECORD)]
        for entry in steps:
            try:
                with self._fs.open(posixpath.join(self._folder, entry)) as file:
                    record = json.loads(file.read(RECORD_BYTES_MAX))
                found[StateName.parse(record["name"])] = record
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning(f"the saved state {entry} in {self.url} cannot be read ({error!r}); trying another")
        if not steps and (others := [e for e in self._entries(self._island) if e.startswith("host-")]):
            log.info(f"{self.url} has states of {', '.join(sorted(others)[:4])} only, from another number of hosts")
        return found

    def read(self, record: dict[str, Any]) -> SavedState:
        """Return a state; ValueError if its files are damaged, or cannot be read."""
        try:
            shards = [
                Shard(str(name), str(dtype), tuple(shape), tuple((int(a), int(b)) for a, b in spans))
                for name, dtype, shape, spans in record["shards"]
            ]
            path, size = self._path(int(record["name"][2]), SHARDS), sum(shard.num_bytes for shard in shards)
            if (found := self._fs.size(path)) != size:
                raise ValueError(f"it has {found} bytes instead of {size}")
            buffer, hasher, at = np.empty(size, np.uint8), xxhash.xxh3_64(), 0
            with self._fs.open(path, "rb") as file:
                while chunk := file.read(min(CHUNK_BYTES, size - at)):
                    hasher.update(chunk)
                    buffer[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                    at += len(chunk)
            if hasher.intdigest() != record["checksum"]:
                raise ValueError("its checksum differs")
            return SavedState(read_shards(shards, buffer.data), self._read_loader(record))
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(repr(error)) from error

    def _read_loader(self, record: dict[str, Any]) -> bytes | None:
        if "loader" not in record:
            return None
        size, checksum = record["loader"]
        with self._fs.open(self._path(int(record["name"][2]), LOADER), "rb") as file:
            content: bytes = file.read(LOADER_BYTES_MAX + 1)
        if len(content) != size or xxhash.xxh3_64_intdigest(content) != checksum:
            raise ValueError("the loader's state is damaged")
        return content

    def write(
        self, staged: StagedShards, name: StateName, rest: Callable[[], None], loader: bytes | None = None
    ) -> None:
        """Write a state whole or not at all, in place of one of the same global step."""
        self._fs.makedirs(self._folder, exist_ok=True)
        self._remove(name.global_step)
        hasher = xxhash.xxh3_64()
        with self._fs.open(self._path(name.global_step, SHARDS), "wb") as file:
            for copy in staged.copies:
                content = as_bytes(np.asarray(copy))
                for start in range(0, len(content), CHUNK_BYTES):
                    chunk = content[start : start + CHUNK_BYTES]
                    hasher.update(chunk)
                    file.write(chunk)
                    rest()
        record: dict[str, Any] = {"name": name, "shards": staged.shards, "checksum": hasher.intdigest()}
        if loader is not None:
            with self._fs.open(self._path(name.global_step, LOADER), "wb") as file:
                file.write(loader)
            record["loader"] = [len(loader), xxhash.xxh3_64_intdigest(loader)]
        with self._fs.open(self._path(name.global_step, RECORD), "wb") as file:
            file.write(json.dumps(record).encode())

    def prune(self, keep: Sequence[int]) -> None:
        """Delete the states of all other global steps, and incomplete files of writers that were killed."""
        stems = {entry.partition(".")[0] for entry in self._entries(self._folder)}
        for stem in stems - {f"step_{step:08d}" for step in keep}:
            if stem.removeprefix("step_").isdigit():
                self._remove(int(stem.removeprefix("step_")))

    def _remove(self, global_step: int) -> None:
        for kind in (RECORD, LOADER, SHARDS):
            path = self._path(global_step, kind)
            if self._fs.exists(path):
                self._fs.rm(path)


class OwnStates(Protocol):
    """The states that one process can continue from, and where it writes new ones."""

    def names(self) -> list[StateName]:
        """Return the names of the states."""

    def read(self, name: StateName) -> SavedState:
        """Return a state; ValueError with the reason if it cannot be used."""

    def save(self, staged: StagedShards, name: StateName, keep: int, loader: bytes | None = None) -> Future[str]:
        """Start to write a state beside that of global step `keep`; the future holds the error, "" if there is none."""

    def close(self) -> None:
        """Refuse further states, and wait until the present one is written."""


class SavedStates:
    """The states of one process in the island's folders, read in the order of `urls`.

    A background thread writes them, one at a time. ValueError if this process cannot write to one of the folders.
    """

    def __init__(self, urls: Sequence[str], host: int = 0, hosts: int = 1) -> None:
        self._places = [StateFolder(url, host, hosts) for url in urls]
        self._worker = ThreadPoolExecutor(1, "save")
        # Once it is set the writer makes no more pauses.
        self._closing = threading.Event()

    def names(self) -> list[StateName]:
        """Return the names of the saved states, newest first."""
        names = {name for place in self._places for name in self._records(place)}
        return sorted(names, key=lambda name: name.global_step, reverse=True)

    def _records(self, place: StateFolder) -> dict[StateName, dict[str, Any]]:
        try:
            return place.names()
        # File systems that are away or refuse access raise many kinds of errors.
        except Exception as error:
            log.warning(f"saved states in {place.url} cannot be listed ({error!r}); continuing without them")
            return {}

    def read(self, name: StateName) -> SavedState:
        """Return a state; ValueError with each folder's reason if it is missing or damaged."""
        problems = []
        for place in self._places:
            record = self._records(place).get(name)
            try:
                if record is not None:
                    return place.read(record)
            # File systems raise many kinds of errors.
            except Exception as error:
                problems.append(f"in {place.url}: {error}")
        raise ValueError("; ".join(problems) or "it is not there any more")

    def save(self, staged: StagedShards, name: StateName, keep: int, loader: bytes | None = None) -> Future[str]:
        """Start to write a state beside the newest complete one; the future holds the error, "" if it was saved."""
        return self._worker.submit(self._save, staged, name, keep, loader)

    def _save(self, staged: StagedShards, name: StateName, keep: int, loader: bytes | None) -> str:
        spare, written, reasons = SpareTime(), 0, list[str]()
        worked_s = time.thread_time()

        def rest() -> None:
            nonlocal worked_s
            self._closing.wait(spare.rest_s(time.thread_time() - worked_s))
            worked_s = time.thread_time()

        try:
            for shard, copy in zip(staged.shards, staged.copies, strict=True):
                check_finite(shard.name, np.asarray(copy), rest)
        except UnusableState as error:
            # The saves before it are kept, because a process that loads this one would be excluded from every merge.
            log.warning(f"the state of global step {name.global_step} was not saved: {error}; training continues")
            return str(error)
        for place in self._places:
            try:
                place.prune([keep])
                place.write(staged, name, rest, loader)
                written += 1
            # File systems that are full or away raise many kinds of errors.
            except Exception as error:
                reasons.append(f"{place.url}: {' '.join(str(error).split())[:300]}")
                what = f"the state of global step {name.global_step} was not saved in {reasons[-1]}"
                log.warning(f"{what}; training continues")
        return "" if written else "; ".join(reasons)

    def close(self) -> None:
        """Refuse further states, and wait until the present one is written."""
        self._closing.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
