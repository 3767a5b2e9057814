"""Global values on their way into an island: reading and checking them, adopting them, and a donor's state."""

from collections.abc import Sequence

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.island_state import IslandState, StagedUpdate

Values = dict[str, np.ndarray]
# A small part, so that a fragment's value never waits long behind one.
STATE_PART_BYTES = 1 << 20


class GlobalValues:
    """The newest value that arrived of each fragment, adopted or not; for one thread at a time."""

    def __init__(self, fragments: Sequence[Fragment], down: codec.Format) -> None:
        self._fragments = fragments
        self._down: codec.Format = down
        self._newest: dict[int, Values] = {}

    def read(self, message: GlobalFragment, payload: codec.Bytes) -> Values:
        """Decode the value in a message.

        Raises:
            ValueError: The payload is not a value of a fragment, or is damaged.
        """
        if not 0 <= message.fragment_id < len(self._fragments):
            raise ValueError(f"is none of the {len(self._fragments)} of this model")
        layout = self._fragments[message.fragment_id].keys_shapes
        if message.base == NO_VERSION:
            values = codec.decode(payload, layout, "float32")
        elif message.fragment_id not in self._newest:
            raise ValueError("is a step from a value that did not arrive")
        else:
            step = codec.decode(payload, layout, self._down)
            values = {key: value + step[key] for key, value in self._newest[message.fragment_id].items()}
        if value_digest(values) != message.digest:
            raise ValueError("arrived damaged")
        return values

    def keep(self, message: GlobalFragment, values: Values) -> None:
        """Keep a value as the base of later deltas of its fragment."""
        self._newest[message.fragment_id] = values


class Adoptions:
    """The staged copies of one life on an island, and the value that it sent last of each fragment.

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

    def adopt(self, fragment_id: int, version: int, merged_round: int, values: Values) -> None:
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
