"""The passes over a whole model's values, in this process or in merge shards."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.passes import Flat, Run, Squares, State
from diloco_jax.core.shards import fill, split
from diloco_jax.protocol.exclusion import RateHistory
from diloco_jax.protocol.messages import NO_VERSION
from diloco_jax.runtime.model.merge_shards import HeldCapture, RemoteShare
from diloco_jax.runtime.model.model_share import Bytes, HeldStates, ModelShare, Setup


class Mark(NamedTuple):
    """Notes on a fragment's newest version: everything that is known without its values."""

    version: int
    digest: int
    history: RateHistory
    # The newest step starts at this version; NO_VERSION if only the whole value can be sent.
    base: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Capture:
    """A model at one moment, which never changes; any thread may read it."""

    marks: tuple[Mark, ...]  # per fragment
    _setup: Setup
    _run: Run
    _parts: Sequence[HeldStates | HeldCapture]

    def state(self, fragment_id: int, *, value_only: bool = False) -> State:
        """Return a fragment's state, or with `value_only` only its value; the caller must not change it."""
        holders = self._setup.shares.holders(fragment_id)
        found = self._run(lambda shard: self._parts[shard].read(fragment_id, value_only), holders)
        return self._setup.join(fragment_id, dict(zip(holders, found, strict=True)))

    def value(self, fragment_id: int) -> Flat:
        return self.state(fragment_id, value_only=True).value

    def release(self, fragment_id: int | None = None) -> None:
        """Free a fragment, or all fragments, after the last read."""
        for part in self._parts:
            part.release(fragment_id)


class Arithmetic:
    """The computations on a whole model; a learner's value is its payload, or the parts that its shards hold."""

    def __init__(self, setup: Setup, shares: Sequence[ModelShare] | Sequence[RemoteShare]) -> None:
        self.setup = setup
        self._shares = shares
        self._run: Run = map
        # Each thread waits for one shard: in a merge, an evaluation and a snapshot.
        if len(shares) > 1:
            self._run = ThreadPoolExecutor(3 * len(shares), "shares").map

    def _on_holders(self, fragment_id: int, do: Callable[[int], Any]) -> dict[int, Any]:
        """Call `do` for each shard that holds a part of the fragment, and return the results by shard."""
        holders = self.setup.shares.holders(fragment_id)
        return dict(zip(holders, self._run(do, holders), strict=True))

    def unusable(self, fragment_id: int, value: Any) -> str:
        """Return why this cannot be a value of the fragment; "" if it can."""
        shares, up = self.setup.shares, self.setup.up
        if isinstance(value, Mapping):
            expected = {n: shares.parts[n][fragment_id].payload_bytes(up) for n in shares.holders(fragment_id)}
            found = {shard: part.size for shard, part in value.items()}
            return "" if found == expected else f"its parts have {found} bytes, where {expected} are expected"
        size = shares.wholes[fragment_id].payload_bytes(up)
        return "" if len(value) == size else f"its value has {len(value)} bytes, where {size} are expected"

    def inspect(self, fragment_id: int, values: Sequence[Any], bases: Sequence[int]) -> Squares:
        """Return the squared norms of the learners' values, and keep the values for `update`, as ModelShare.inspect."""

        def inspect_part(shard: int) -> Squares:
            parts = [self._part(fragment_id, shard, value) for value in values]
            return self._shares[shard].inspect(fragment_id, parts, bases)

        return np.concatenate(list(self._on_holders(fragment_id, inspect_part).values()), axis=1)

    def _part(self, fragment_id: int, shard: int, value: Any) -> Any:
        if isinstance(value, Mapping):
            return value[shard]
        parts = split(value, self.setup.shares.ranges(fragment_id, shard, self.setup.up))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def update(self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray) -> tuple[bool, int]:
        """Make the fragment's next version, as ModelShare.update; return whether it is finite, and its digest."""
        made = self._on_holders(fragment_id, lambda n: self._shares[n].update(fragment_id, version, chosen, weights))
        digest = self.setup.shares.digest(fragment_id, {shard: leaves for shard, (_, leaves) in made.items()})
        return all(finite for finite, _ in made.values()), digest

    def forget(self, fragment_id: int) -> None:
        for shard in self.setup.shares.holders(fragment_id):
            self._shares[shard].forget(fragment_id)

    def publish(self, fragment_id: int) -> None:
        for shard in self.setup.shares.holders(fragment_id):
            self._shares[shard].publish(fragment_id)

    def capture(self, marks: Sequence[Mark], bounded: bool = False) -> Capture:
        return Capture(tuple(marks), self.setup, self._run, [share.capture(bounded) for share in self._shares])

    def load(self, fragment_id: int, version: int, state: State) -> None:
        for shard in self.setup.shares.holders(fragment_id):
            self._shares[shard].load(fragment_id, version, self.setup.cut(fragment_id, shard, state))

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        for shard in self.setup.shares.holders(fragment_id):
            part = self.setup.shares.cut(fragment_id, shard, flat)
            self._shares[shard].restore(fragment_id, version, part)

    def payload(self, fragment_id: int, base: int = NO_VERSION) -> Bytes:
        """Return the newest version's payload, as ModelShare.payload; empty if the shards send it themselves."""
        shares, format = self.setup.shares, self.setup.down if base != NO_VERSION else "float32"
        parts = {shard: self._shares[shard].payload(fragment_id, base) for shard in shares.holders(fragment_id)}
        if shares.count == 1 or not any(parts.values()):
            return next(iter(parts.values()))
        joined = bytearray(shares.wholes[fragment_id].payload_bytes(format))
        for shard, part in parts.items():
            fill(memoryview(joined), shares.ranges(fragment_id, shard, format), part)
        return bytes(joined)


def local_arithmetic(setup: Setup, threads: int = 1) -> Arithmetic:
    """Return an Arithmetic in this process, with `threads` threads in each merge."""
    return Arithmetic(setup, [ModelShare(setup, shard, threads) for shard in range(setup.shares.count)])
