"""The names of a run's objects below its URL. All but the requests at the entrance are computed, not listed.

    leader/EPOCH                the syncer of an epoch, created by exactly one process
    alive/EPOCH                 its sign of life, overwritten
    e/EPOCH/in/hello.SESSION    asks for a session
    e/EPOCH/in/ask.ID           asks a question, answered at e/EPOCH/answer/ID
    e/EPOCH/s/SESSION/up/N      object N of the stream from a learner to the syncer; down/N the other way
    e/EPOCH/s/SESSION/up-p/N    payload N of that stream
    e/EPOCH/v/N                 a payload for several learners
    copy/EPOCH/tape/POSITION    lines of the syncer's tape from a byte on, for a standby (runtime/syncer/copies.py)
    copy/EPOCH/base             the tape before this epoch is complete there
    snapshot/STEP.EPOCH/N       a piece of a snapshot; its manifest comes last

SESSION is NAME.INCARNATION.NUMBER.HOST.ATTEMPT: the fields of a session's header, and a text that is drawn for every
attempt to connect, so that no attempt finds the objects of an earlier one.
"""

import re
import secrets

from diloco_jax.transport.proto import diloco_pb2 as pb

LEADER, ALIVE = "leader/", "alive/"
UP, DOWN = "up", "down"
HELLO, FOLLOW, ASK = "hello.", "follow.", "ask."
COPY, SNAPSHOT, MANIFEST = "copy/", "snapshot/", "manifest"
COPIES = (COPY, SNAPSHOT)
_DIGITS = 12
# A tape may have many terabytes.
POSITION_DIGITS = 15
EPOCH_MAX = 10**_DIGITS - 1
ATTEMPT_BYTES = 8
_ATTEMPT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_PAYLOAD = re.compile(r"(s|v)/(\d{12})", re.ASCII)
# One session has a name of five fields; the first may have dots, too.
_OURS = re.compile(
    r"(leader|alive)/\d{12}"
    r"|e/\d{1,12}/(in/(hello|follow|ask)\.[\w.-]+|answer/\w+|v/\d{12}|s/[\w.-]+/(up|down)(-p)?/\d{12})"
    r"|copy/\d{12}/(tape/\d{15}|[\w.-]+)"
    r"|snapshot/\d{12}\.\d{12}/[\w.-]+",
    re.ASCII,
)


def number_of(key: str) -> int | None:
    """Return the number at the end of a name; None if it has none."""
    tail = key.rpartition("/")[2]
    return int(tail) if tail.isascii() and tail.isdecimal() and len(tail) <= POSITION_DIGITS else None


def is_ours(key: str) -> bool:
    """Return whether a run gives its objects such a name."""
    return _OURS.fullmatch(key) is not None


def epoch_of(key: str) -> int:
    """Return the epoch whose sessions, leader or sign of life an object belongs to; -1 if to none."""
    first, _, rest = key.partition("/")
    if first in ("leader", "alive"):
        number = number_of(key)
    else:
        number = number_of(rest.partition("/")[0]) if first == "e" else None
    return -1 if number is None else number


def leader(epoch: int) -> str:
    """Return the name of the object that makes a process the syncer of an epoch."""
    return f"{LEADER}{epoch:0{_DIGITS}}"


def alive(epoch: int) -> str:
    """Return the name of the sign of life of the syncer of an epoch."""
    return f"{ALIVE}{epoch:0{_DIGITS}}"


def of_epoch(epoch: int) -> str:
    """Return the prefix of all sessions with the syncer of an epoch."""
    return f"e/{epoch}/"


def entrance(epoch: int) -> str:
    """Return the prefix of requests to the syncer of an epoch, the only one that it lists."""
    return f"{of_epoch(epoch)}in/"


def answer(epoch: int, number: str) -> str:
    """Return the name of the answer to a question."""
    return f"{of_epoch(epoch)}answer/{number}"


def session(epoch: int, name: str) -> str:
    """Return the prefix of a session."""
    return f"{of_epoch(epoch)}s/{name}/"


def session_name(header: pb.Header, attempt: str = "") -> str:
    """Return the name of a session, unique in its epoch.

    Args:
        attempt: A text from an earlier call, "" to draw one.
    """
    attempt = attempt or secrets.token_hex(ATTEMPT_BYTES)
    return f"{header.sender}.{header.incarnation}.{header.session}.{header.host}.{attempt}"


def names_session(name: str, header: pb.Header) -> bool:
    """Tell whether a name is one of a session with this header."""
    attempt = name.rpartition(".")[2]
    return _ATTEMPT.fullmatch(attempt) is not None and name == session_name(header, attempt)


def in_stream(prefix: str, way: str, number: int) -> str:
    """Return the name of an object of a session's stream."""
    return f"{prefix}{way}/{number:0{_DIGITS}}"


def copy(epoch: int) -> str:
    """Return the prefix of the copy of the tape that the syncer of an epoch keeps for a standby."""
    return f"{COPY}{epoch:0{_DIGITS}}/"


def on_tape(epoch: int, position: int) -> str:
    """Return the name of the lines of the tape from a position in bytes on."""
    return f"{copy(epoch)}tape/{position:0{POSITION_DIGITS}}"


def base(epoch: int) -> str:
    """Return the name of the object that says that a copy has the tape from its first byte on."""
    return f"{copy(epoch)}base"


def snapshot(step: int, epoch: int) -> str:
    """Return the prefix of a snapshot."""
    return f"{SNAPSHOT}{step:0{_DIGITS}}.{epoch:0{_DIGITS}}/"


def payload(epoch: int, prefix: str, way: str, reference: str) -> str:
    """Return the name of the payload that an entry of a stream refers to: "s/N" of the session, "v/N" of several.

    Raises:
        ValueError: This is not a reference.
    """
    found = _PAYLOAD.fullmatch(reference)
    if found is None:
        raise ValueError(f"{reference[:40]!r} refers to no payload")
    kind, digits = found.groups()
    return f"{prefix}{way}-p/{digits}" if kind == "s" else f"{of_epoch(epoch)}v/{digits}"


def reference(kind: str, number: int) -> str:
    """Return the reference to a payload: of the session ("s") or of several ("v")."""
    return f"{kind}/{number:0{_DIGITS}}"
