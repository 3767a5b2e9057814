"""A bucket, or a folder that serves as one: objects with names, and the requests that were made so far.

The library is obstore, which has the same calls for S3, Google Cloud Storage, Azure, a folder and memory. Nothing here
depends on a listing being up to date, and only `create` depends on what the store promises: of several processes that
create one name, exactly one succeeds.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from diloco_jax.transport.link import TransportError, bucket_scheme

# One try of a request, with the retries of the library, takes at most this long.
REQUEST_S = 20.0
RETRY_S = 15.0
# A large object is read and written in pieces of this size, each with its own time.
PIECE_BYTES = 8 << 20
# Names in one listing.
LISTED_MAX = 10_000

_memory: dict[str, Any] = {}
_lock = threading.Lock()


class StoreError(TransportError):
    """The store cannot be reached, or refused a request."""


class TooLarge(ValueError):
    """An object is larger than its reader allows."""


@dataclass(slots=True)
class Requests:
    """Requests to a store, and the bytes of the objects, both as the store's owner counts them."""

    puts: int = 0
    gets: int = 0
    # Reads of an object that is not there are requests too.
    misses: int = 0
    lists: int = 0
    deletes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, amounts: Mapping[str, int]) -> None:
        """Count more of these; any thread may call it."""
        with _lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class ObjectStore:
    """The objects below one URL; any thread may call the methods.

    Args:
        url: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER, or memory://NAME within one
            process. Credentials, endpoint and region come from the environment, as for every tool of that provider.
        requests: Counts of the caller, for several stores of one process; new ones by default.

    Raises:
        ValueError: obstore is not installed, or the URL or the environment has a mistake.
    """

    def __init__(self, url: str, requests: Requests | None = None) -> None:
        self.url = url
        self.requests = Requests() if requests is None else requests
        self._store = _open(url)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless its name is taken; return whether it was not.

        A request without an answer may have succeeded. The caller finds that out by reading the object.

        Raises:
            StoreError: The store did not answer, or refused.
        """
        return self._put(key, data, "create")

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of an earlier one; StoreError if that fails."""
        self._put(key, data, "overwrite")

    def _put(self, key: str, data: bytes, mode: Literal["create", "overwrite"]) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        large = len(data) > PIECE_BYTES and mode == "overwrite"
        # Every piece is a request; two more begin and end an object of several.
        self._count(puts=2 + -(-len(data) // PIECE_BYTES) if large else 1, sent_bytes=len(data))
        try:
            obstore.put(self._store, key, data, mode=mode, use_multipart=large, chunk_size=PIECE_BYTES)
        except (AlreadyExistsError, PreconditionError):
            return False
        except Exception as error:
            raise self._error("write", key, error) from None
        return True

    def get(self, key: str, bytes_max: int) -> bytes | None:
        """Return an object; None if there is none of that name.

        Raises:
            TooLarge: It is larger than `bytes_max`.
            StoreError: The store did not answer, or refused.
        """
        import obstore

        try:
            found = obstore.get(self._store, key)
            if (size := found.meta["size"]) > bytes_max:
                self._count(gets=1)
                raise TooLarge(f"the object {key} has {size} bytes, the limit is {bytes_max}")
            data = bytes(found.bytes())
        except FileNotFoundError:
            self._count(misses=1)
            return None
        except TooLarge:
            raise
        except Exception as error:
            raise self._error("read", key, error) from None
        self._count(gets=1, received_bytes=len(data))
        return data

    def read_whole(self, key: str, size: int) -> bytearray | None:
        """Return an object of exactly `size` bytes, read in pieces; None if there is none, or it is shorter.

        Raises:
            StoreError: The store did not answer, or refused.
        """
        import obstore

        whole = bytearray(size)
        for start in range(0, size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size)
            try:
                piece = memoryview(obstore.get_range(self._store, key, start=start, end=stop)).cast("B")
            except FileNotFoundError:
                self._count(misses=1)
                return None
            except Exception as error:
                # A store refuses a range behind the end of an object with an error that looks like any other one.
                if self._size(key) < stop:
                    return None
                raise self._error("read", key, error) from None
            self._count(gets=1, received_bytes=len(piece))
            if len(piece) != stop - start:
                return None
            whole[start:stop] = piece
        return whole

    def exists(self, key: str) -> bool:
        """Tell whether there is an object of that name; StoreError if the store does not answer."""
        return self._size(key) >= 0

    def _size(self, key: str) -> int:
        """Return the size of an object in bytes; -1 if there is none. StoreError if the store does not answer."""
        import obstore

        try:
            size = int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            self._count(misses=1)
            return -1
        except Exception as error:
            raise self._error("look for", key, error) from None
        self._count(gets=1)
        return size

    def modified_s(self, key: str) -> float | None:
        """Return when an object was written, in seconds since 1970 by the store's clock; None if there is none.

        Raises:
            StoreError: The store did not answer, or refused.
        """
        import obstore

        try:
            found = obstore.head(self._store, key)
        except FileNotFoundError:
            self._count(misses=1)
            return None
        except Exception as error:
            raise self._error("look for", key, error) from None
        self._count(gets=1)
        return float(found["last_modified"].timestamp())

    def list(self, prefix: str, limit: int = LISTED_MAX, after: str = "") -> list[str]:
        """Return the names that start with `prefix`, at most `limit` in order; StoreError if that fails.

        Args:
            after: Only names that sort behind this one.
        """
        import obstore

        if self.url.startswith("file:"):
            self._count(lists=1)
            return sorted(name for name in _names_below(self.url, prefix) if name > after)[:limit]
        found: list[str] = []
        try:
            for page in obstore.list(self._store, prefix, offset=after or None, chunk_size=1000):
                self._count(lists=1)
                found += [item["path"] for item in page]
                if len(found) >= limit:
                    break
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._error("list", prefix, error) from None
        if not found:
            self._count(lists=1)
        return sorted(found)[:limit]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is gone already is not an error. StoreError if the store does not answer."""
        if not keys:
            return
        self._count(deletes=len(keys))
        # A folder stops at a file that is gone.
        alone = self.url.startswith("file:")
        for batch in [[key] for key in keys] if alone else [list(keys)]:
            self._delete(batch)

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        try:
            obstore.delete(self._store, keys)
        except FileNotFoundError:
            # Some stores report an object that is gone as an error, which keeps the others.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])
        except Exception as error:
            raise self._error("delete", keys[0], error) from None

    def _count(self, **amounts: int) -> None:
        self.requests.add(amounts)

    def _error(self, action: str, key: str, error: Exception) -> StoreError:
        # The library appends the whole structure of its error in further lines.
        why = str(error).split("\n", 1)[0][:300]
        return StoreError(f"cannot {action} {key} in {self.url}: {why}")


def _client_options(url: str) -> Any:
    """Return the options of HTTP. With any of them the library no longer reads that of plain HTTP, for own servers."""
    variable = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}[bucket_scheme(url)] + "_ALLOW_HTTP"
    plain = os.environ.get(variable, "").lower() in ("1", "true")
    return {"timeout": f"{REQUEST_S:g}s", "connect_timeout": "5s", "allow_http": plain}


def _open(url: str) -> Any:
    try:
        from obstore.store import LocalStore, MemoryStore, from_url
    except ImportError:
        raise ValueError(
            f"the address {url} is a bucket, which needs obstore: pip install 'diloco-jax[bucket]'"
        ) from None
    if bucket_scheme(url) == "memory":
        with _lock:
            return _memory.setdefault(url, MemoryStore())
    try:
        if bucket_scheme(url) == "file":
            # Otherwise folders without files stay behind.
            return LocalStore(url.removeprefix("file://"), automatic_cleanup=True, mkdir=True)
        return from_url(
            url,
            client_options=_client_options(url),
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=RETRY_S)},
        )
    except Exception as error:
        raise ValueError(f"the bucket {url} cannot be opened: {str(error).splitlines()[0]}") from None


def _names_below(url: str, prefix: str) -> Iterator[str]:
    """Yield the names of the files below a prefix that is a folder.

    The library's own listing ends with an error at the first name that cannot be an object's.
    """
    root = url.removeprefix("file://").rstrip("/") or "/"
    for folder, _, files in os.walk(os.path.join(root, prefix)):
        inside = os.path.relpath(folder, root)
        for name in files:
            key = name if inside == "." else f"{inside}/{name}"
            # The library writes into files with this character first.
            if key.isprintable() and "#" not in key:
                yield key
