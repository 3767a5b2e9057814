"""Global values on their way into an island: reading and checking them, adopting them, and a donor's state."""

import importlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import HeldBlocks
from diloco_jax.core.layout import whole
from diloco_jax.core.outer import Flat
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.runtime.model.buffers import Buffers
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.exchange import PlacedValue
from diloco_jax.training.island_state import IslandState, StagedUpdate

if TYPE_CHECKING:
    from diloco_jax.core.arrival import Arrival

# Arrays by Slice.key; on one host of several, a HeldSlice with its blocks.
Values = dict[str, Any]
# A small part, so that a fragment's value never waits long behind one.
STATE_PART_BYTES = 1 << 20
# Arrays of a fragment that are kept for later values, beside those in use.
FREE_MAX = 2
# Threads that decode an arriving value, and the processors of a host for each: the others belong to the training.
THREADS_MAX, PROCESSORS_PER_THREAD = 4, 4
# Islands of one process join at the same time, and a loop may be compiled only once.
_COMPILING = threading.Lock()


@dataclass(eq=False)
class ArrivedValue:
    """A global value of a fragment that arrived and was checked."""

    # The fragment's slices by key, as views of `flat`.
    values: Values
    flat: Flat
    # The same value on the devices, until it is adopted.
    placed: PlacedValue | None = None

    def take(self) -> Values | PlacedValue:
        """Return the value in the form that is quickest to adopt, and forget its copy on the devices."""
        placed, self.placed = self.placed, None
        return self.values if placed is None else placed


class GlobalValues:
    """The newest value that arrived of each fragment, adopted or not, and on a following host those before it.

    One thread reads at a time; any thread may forget. The memory of a value is used again when nothing refers to the
    value or to one of its slices.

    Args:
        held: By fragment, the blocks that this host holds; None if it holds everything.
    """

    def __init__(self, fragments: Sequence[Fragment], down: Format, held: Sequence[HeldBlocks] | None = None) -> None:
        layouts = [whole(fragment) for fragment in fragments] if held is None else [each.layout for each in held]
        buffers = Buffers(max(layout.size for layout in layouts), FREE_MAX)
        threads = max(1, min(THREADS_MAX, (os.cpu_count() or 1) // PROCESSORS_PER_THREAD))
        run = ThreadPoolExecutor(threads, "arrival").map if threads > 1 else map
        # Numba reads the settings of its cache when it is imported, and an island sets them after this file is loaded.
        with _COMPILING:
            arrival: type[Arrival] = importlib.import_module("diloco_jax.core.arrival").Arrival
            self._arrivals = [arrival(layout, down, run, buffers.take) for layout in layouts]
        self._held = held
        # fragment -> version -> value, in order of arrival
        self._bases: dict[int, dict[int, Flat]] = {}
        self._lock = threading.Lock()

    def read(self, message: GlobalFragment, payload: Bytes, digest: int | None = None) -> ArrivedValue:
        """Decode the value in a message.

        Args:
            digest: That of the blocks that this host holds; None: the message's.

        Raises:
            ValueError: The payload is not a value of a fragment, or is damaged.
        """
        fragment_id = message.fragment_id
        self.check(fragment_id)
        arrival = self._arrivals[fragment_id]
        if message.base == NO_VERSION:
            flat, found = arrival.whole(payload)
        else:
            with self._lock:
                base = self._bases.get(fragment_id, {}).get(message.base)
            if base is None:
                raise ValueError("is a step from a value that did not arrive")
            flat, found = arrival.step(payload, base)
        if found != (message.digest if digest is None else digest):
            raise ValueError("arrived damaged")
        slices = arrival.layout.views(flat) if self._held is None else self._held[fragment_id].slices(flat)
        return ArrivedValue(slices, flat)

    def check(self, fragment_id: int) -> None:
        """Raise ValueError if there is no such fragment."""
        if not 0 <= fragment_id < len(self._arrivals):
            raise ValueError(f"is none of the {len(self._arrivals)} of this model")

    def keep(self, message: GlobalFragment, arrived: ArrivedValue) -> None:
        """Keep a value as the only base of later deltas of its fragment."""
        self.add(message, arrived)
        self.forget_older(message)

    def add(self, message: GlobalFragment, arrived: ArrivedValue) -> None:
        """Keep a value as a base of later deltas, beside those before it: another host may not have it."""
        with self._lock:
            bases = self._bases.setdefault(message.fragment_id, {})
            # It is the newest, also where a syncer that went back repeats the number.
            bases.pop(message.version, None)
            bases[message.version] = arrived.flat

    def forget_older(self, message: GlobalFragment) -> None:
        """Forget the values of the fragment that arrived before this one."""
        with self._lock:
            bases = self._bases.get(message.fragment_id, {})
            known = [*bases]
            for version in known[: known.index(message.version)] if message.version in bases else ():
                del bases[version]


class Adoptions:
    """The staged copies of one incarnation on an island, and the value that it sent last of each fragment.

    A sent value counts until its round has merged it or left it out. If the round left it out, the island behaves as if
    it had never sent it. It keeps the earlier residual, because the rounding error of a far too large value is as large
    as many usual values. And the global value replaces the local one in every mode, because the local one still
    contains the part that was too large.
    """

    def __init__(self, island: IslandState, fragments: Sequence[Fragment], how: AdoptConfig) -> None:
        self._island = island
        self._fragments = fragments
        self._how = how
        self._held: set[int] = set()
        # fragment -> (round, what was sent)
        self._sent: dict[int, tuple[int, StagedUpdate]] = {}
        # (fragment, local step) -> its update; the owner stages
        self.staged: dict[tuple[int, int], StagedUpdate] = {}

    def unstage_all(self, fragment_id: int) -> None:
        """Forget all copies of a fragment."""
        self.staged = {key: staged for key, staged in self.staged.items() if key[0] != fragment_id}

    def take_for_round(self, fragment_id: int, global_step: int, local_step: int) -> StagedUpdate:
        """Mark a staged copy as used by this round, and return it."""
        staged = self.staged[fragment_id, local_step]
        self._sent[fragment_id] = (global_step, staged)
        return staged

    def adopt(self, fragment_id: int, version: int, merged_round: int, values: Values | PlacedValue) -> None:
        """Adopt a global value between two steps; `merged_round` is the newest round that merged our value."""
        first, mode = fragment_id not in self._held, self._how.mode
        self._held.add(fragment_id)
        asked, sent = self._sent.get(fragment_id, (version + 1, None))
        if asked <= version:
            # Its round is over; a round that is still open may merge what was sent.
            del self._sent[fragment_id]
        merged = sent if asked == merged_round else None
        excluded = asked <= version and merged is None
        if first or excluded or (mode == "rebase" and merged is None):
            mode = "overwrite"
        fragment = self._fragments[fragment_id]
        self._island.adopt(fragment, values, mode=mode, alpha=self._how.alpha, sent=merged)


class ReceivedState:
    """The parts of a donor's state, in a buffer of `num_bytes`: one state of this island's layout."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._parts = -(-num_bytes // STATE_PART_BYTES)
        self._buffer: bytearray | None = None
        self._problem = ""
        self.donor_incarnation = 0

    def keep(self, part: int, parts: int, payload: Bytes, donor_incarnation: int) -> None:
        """Keep part `part` of `parts`; a part that does not fit makes the whole state unusable."""
        self.donor_incarnation = donor_incarnation
        start = part * STATE_PART_BYTES
        size = min(STATE_PART_BYTES, self._num_bytes - start)
        if parts != self._parts or len(payload) != size:
            self._problem = (
                f"part {part} of {parts} has {len(payload)} bytes, but a state here has {self._num_bytes} bytes in "
                f"{self._parts} parts: the donor has another model or optimizer"
            )
            return
        if self._buffer is None:
            self._buffer = bytearray(self._num_bytes)
        self._buffer[start : start + size] = payload

    def drop(self) -> None:
        """Forget all parts."""
        self._buffer, self._problem = None, ""

    def take(self) -> bytearray:
        """Return the whole state, and forget it; ValueError if a part did not fit."""
        buffer, problem = self._buffer, self._problem
        self.drop()
        if problem or buffer is None:
            raise ValueError(problem or "no part arrived")
        return buffer
