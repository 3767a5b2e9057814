"""A donor's state on its way into an island: the parts that have arrived."""

from __future__ import annotations

from diloco_jax.core.codec import Bytes

STATE_PART_BYTES = 1 << 20  # small, so that a fragment's value never waits long behind a part


class ReceivedState:
    """The parts of a donor's state, in memory for exactly one state of this island's layout.

    Args:
        num_bytes: size of a whole state.
    """

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
        """Forget everything."""
        self._buffer, self._problem = None, ""

    def take(self) -> bytearray:
        """Return the whole state and forget it.

        Raises:
            ValueError: a part did not fit.
        """
        buffer, problem = self._buffer, self._problem
        self.drop()
        if problem or buffer is None:
            raise ValueError(problem or "no part arrived")
        return buffer
