"""Global values on their way in: how they are read, and what an island takes over."""

from collections.abc import Sequence

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.exchanged import ExchangedState

Values = dict[str, np.ndarray]
STATE_PART_BYTES = 1 << 20  # small, so that a fragment's value never waits long behind a part


class GlobalValues:
    """The newest value of each fragment that arrived, adopted or not. One thread at a time."""

    def __init__(self, fragments: Sequence[Fragment], down: codec.Format) -> None:
        self._fragments = fragments
        self._down: codec.Format = down
        self._newest: dict[int, Values] = {}

    def read(self, message: GlobalFragment, payload: codec.Bytes) -> Values:
        """Return the value that a message brings; ValueError if that is no value of a fragment, or was damaged."""
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
        """Let later steps of the fragment apply to this value."""
        self._newest[message.fragment_id] = values


class Adoptions:
    """The staged copies of one life on an island, and what it sent last until it is known what became of that.

    A value that its round left out is as if it had never been sent. The residual before it holds, since what rounding
    kept back of a wildly large value is itself as large as many usual ones; and the global value replaces the local one
    whole, whatever the mode, since that still holds what was too large.
    """

    def __init__(self, island: ExchangedState, fragments: Sequence[Fragment], how: AdoptConfig) -> None:
        self._island = island
        self._fragments = fragments
        self._how = how
        self._held: set[int] = set()
        # fragment -> (round, what was sent)
        self._sent: dict[int, tuple[int, StagedFragment]] = {}
        # (fragment, local step) -> its update; the owner stages
        self.staged: dict[tuple[int, int], StagedFragment] = {}

    def unstage_all(self, fragment_id: int) -> None:
        """Forget all copies of a fragment."""
        self.staged = {key: staged for key, staged in self.staged.items() if key[0] != fragment_id}

    def take_for_round(self, fragment_id: int, global_step: int, local_step: int) -> StagedFragment:
        """Mark a staged copy as used by this round, and return it."""
        staged = self.staged[fragment_id, local_step]
        self._sent[fragment_id] = (global_step, staged)
        return staged

    def adopt(self, fragment_id: int, version: int, merged_round: int, values: Values) -> None:
        """Replace a fragment by a global value, between two steps; the newest round with its own is `merged_round`."""
        first, mode = fragment_id not in self._held, self._how.mode
        self._held.add(fragment_id)
        asked, sent = self._sent.get(fragment_id, (version + 1, None))
        if asked <= version:
            del self._sent[fragment_id]  # its round is over; one that is not may still merge it
        merged = sent if asked == merged_round else None
        left_out = asked <= version and merged is None
        if first or left_out or (mode == "rebase" and merged is None):
            mode = "overwrite"
        fragment = self._fragments[fragment_id]
        self._island.adopt(fragment, values, mode=mode, alpha=self._how.alpha, sent=merged)


class ReceivedState:
    """The parts of a donor's state, in memory for exactly one state of this island's layout, of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._parts = -(-num_bytes // STATE_PART_BYTES)
        self._buffer: bytearray | None = None
        self._problem = ""
        self.donor_incarnation = 0

    def keep(self, part: int, parts: int, payload: Bytes, donor_incarnation: int) -> None:
        """Keep part `part` of `parts`. One that does not fit makes the whole state unusable."""
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
        self._buffer, self._problem = None, ""

    def take(self) -> bytearray:
        """Return the whole state and forget it; ValueError if a part did not fit."""
        buffer, problem = self._buffer, self._problem
        self.drop()
        if problem or buffer is None:
            raise ValueError(problem or "no part arrived")
        return buffer
