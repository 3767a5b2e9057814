"""The hash chain over the lines of a tape: one short head stands for all lines before it.

    head of no lines = ""        head after a line = H(head before it, line)

A line that is missing, doubled or changed gives every later head another value. A head costs a microsecond per line,
and continues from the last known head, so no line is read twice. The line of a snapshot holds the head before it, and
so does the snapshot (`tape_head`). The names of closed segments and the summary hold the head at their end.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

HEAD_BYTES = 16
_SNAPSHOT = b'["snapshot"'


class TapeChain:
    """The head of the hash chain over the lines so far."""

    def __init__(self, head: str = "") -> None:
        self._head = bytes.fromhex(head)

    def add(self, line: bytes) -> None:
        """Add one line, without its line break."""
        self._head = blake2b(self._head + line, digest_size=HEAD_BYTES).digest()

    @property
    def head(self) -> str:
        return self._head.hex()


class TapeMark(NamedTuple):
    """The tape's head at a position, or in the snapshot's line that ends there, as another file records it."""

    position: int
    head: str
    what: str  # file name
    in_line: bool = False


def head_in(line: bytes) -> str:
    """Return the head in a snapshot's line; "" for other lines, and for a line of an older release."""
    if not line.startswith(_SNAPSHOT):
        return ""
    try:
        _, _, _, head = json.loads(line)
    except ValueError:
        return ""
    return str(head)


def checked(lines: Iterable[bytes], tape: str, marks: Iterable[TapeMark]) -> Iterator[bytes]:
    """Yield all lines of a tape; ValueError if they do not match the heads in snapshots, segments and marks."""
    waiting = sorted(marks, reverse=True)
    chain, position, known = TapeChain(), 0, 0
    for number, line in enumerate(lines, start=1):
        stated = head_in(line)
        if stated and stated != chain.head:
            raise ValueError(
                f"{tape}: between its lines {known} and {number} one is missing, doubled or changed since it was "
                "written; restore the tape from a copy"
            )
        chain.add(line)
        position += len(line) + 1
        known = number if stated else known
        while waiting and waiting[-1].position <= position:
            mark = waiting.pop()
            if mark.position != position or mark.head != (stated if mark.in_line else chain.head):
                raise ValueError(
                    f"{tape} is not the tape of {mark.what} at its byte {mark.position} (line {number}; its lines up "
                    f"to {known} agree with its snapshots): restore the tape, or move away what is not of this run"
                )
        yield line
    if waiting:
        mark = waiting[0]
        raise ValueError(
            f"{tape} ends at byte {position}, but {mark.what} was made at byte {mark.position}: restore the rest"
        )
