"""The first exchange on a connection between two slices: each side shows who it is, and checks the other side.

The slice that dialled sends its greeting first. The other slice answers with its own greeting or with a reason, so
only a caller with the run's token sees the token of the one that listens. Certificates come before both (TLS).
"""

import base64
import binascii
import contextlib
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_jax.protocol.releases import STAMP
from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.connection import Connection
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.calls import GREETING_S
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.session.stripe import accept_connection, silence_s
from diloco_jax.transport.slices.frames import FrameReader, Vocabulary, send_frame
from diloco_jax.transport.trust.security import TOKEN_KEY, Denied, Gate, bulk_context, dial_listener, island_host
from diloco_jax.transport.wire import WireError

# Room for a token of the largest size.
GREETING_BYTES_MAX = 16 << 10
# A slice waits this long for another slice's address, at most.
DIAL_S = 5.0


class SliceGreeting(NamedTuple):
    """Identity of a slice, which it shows at the start of a connection."""

    run_id: str
    learner_id: str
    slice: int
    slices: int
    # Number of the process in its slice.
    host: int
    # Protocol, release and rules of the program, because all slices must compute the same bits.
    release: str
    # Digest of everything else that determines these bits: settings, data and devices.
    settings: str
    # Random number of this start of the slice.
    session: int
    # Number of the slice that it dials; its own one in an answer.
    dials: int
    # Number of the connection among those that the process dialled; a later one replaces an earlier one.
    attempt: int
    # In base64; "" if the run has none.
    token: str


class SliceRefusal(NamedTuple):
    """Answer of a slice that does not accept the connection of another one."""

    reason: str


GREETINGS = Vocabulary((SliceGreeting, SliceRefusal))
RELEASE_STAMP = "/".join(map(str, STAMP))


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The checks of this slice, and what it shows itself."""

    config: TransportConfig
    ours: SliceGreeting
    gate: Gate

    def dial(self, number: int, address: str, attempt: int) -> tuple[Connection, SliceGreeting]:
        """Connect to the slice of this number; return the connection and the greeting of that slice.

        Raises:
            OSError: It does not answer, its certificate is not that of this island, or one side refused the other.
            EOFError: It ended the connection.
            ValueError: The files of this slice's own certificate cannot be used, or the other side is not a slice.
        """
        stream = self._open(address, min(self.config.connect_timeout_s, DIAL_S))
        connection = Connection(stream, silence_s(self.config))
        try:
            send_frame(connection, GREETINGS.pack(self.ours._replace(dials=number, attempt=attempt)))
            theirs = _read(connection, time.monotonic() + GREETING_S)
            if isinstance(theirs, SliceRefusal):
                raise Refused(f"slice {number} at {address} refused: {clean(theirs.reason, REASON_LENGTH_MAX)}")
            self._check(theirs)
            if theirs.slice != number:
                raise Refused(f"slice {theirs.slice} answers at {address}, the address of slice {number}: correct it")
        except BaseException:
            connection.close()
            raise
        return connection, theirs

    def listens(self, address: str, timeout_s: float) -> bool:
        """Return False as soon as no process listens at an address, True if one may do so for `timeout_s` seconds.

        A process that stands still, or a machine that cannot be reached, takes the whole time.
        """
        until_s = time.monotonic() + timeout_s
        try:
            with self._open(address, timeout_s) as stream:
                stream.settimeout(max(0.001, until_s - time.monotonic()))
                # The other side waits for a greeting, so this ends only with its port.
                return bool(stream.recv(1))
        except (ConnectionRefusedError, ConnectionResetError, ssl.SSLEOFError):
            return False
        except (OSError, ValueError):
            return True

    def _open(self, address: str, timeout_s: float) -> socket.socket:
        context = bulk_context(replace(self.config, address=address), self.ours.learner_id)
        return dial_listener(address, context, timeout_s, island_host(self.ours.learner_id))

    def admit(self, stream: socket.socket) -> tuple[Connection, SliceGreeting]:
        """Check a caller before anything else that it sends is used; return its connection and its greeting.

        The caller must still be answered, by `answer` or `refuse`.

        Raises:
            OSError: The caller is not a slice with a higher number of this island, or it was too slow.
            EOFError: It left.
            ValueError: It sent something else than a greeting.
        """
        until_s = time.monotonic() + GREETING_S
        try:
            connection, names = accept_connection(stream, self.config, GREETING_S)
            theirs = _read(connection, until_s)
            try:
                self.gate.check_speaks_for(self.ours.learner_id, names)
                if isinstance(theirs, SliceRefusal):
                    raise Refused("it refused before it was asked")
                self._check(theirs)
                if theirs.dials != self.ours.slice or not self.ours.slice < theirs.slice < self.ours.slices:
                    raise Refused(
                        f"slice {theirs.slice} dials slice {theirs.dials} at the address of slice {self.ours.slice}: "
                        "give all slices the same addresses"
                    )
            except (Denied, Refused) as error:
                self.refuse(connection, str(error))
                raise
        except BaseException:
            stream.close()
            raise
        return connection, theirs

    def answer(self, connection: Connection) -> None:
        """Show this slice to an admitted caller."""
        send_frame(connection, GREETINGS.pack(self.ours))

    def refuse(self, connection: Connection, reason: str) -> None:
        """Send a caller the reason, and end the connection."""
        with contextlib.suppress(OSError):
            send_frame(connection, GREETINGS.pack(SliceRefusal(reason[:REASON_LENGTH_MAX])))
            connection.finish()
        connection.close()

    def _check(self, theirs: SliceGreeting) -> None:
        """Check a greeting; Denied or Refused with the first thing that differs, the token first."""
        try:
            token = base64.b64decode(theirs.token, validate=True)
        except binascii.Error:
            token = b""
        self.gate.check({TOKEN_KEY: token})
        named = f"slice {theirs.slice}"
        # An operator must be able to find the process that runs with the wrong setting.
        for what, own, other, remedy in (
            ("run", self.ours.run_id, theirs.run_id, "end the processes of the other run"),
            ("island", self.ours.learner_id, theirs.learner_id, "give each island its own addresses"),
            ("release", self.ours.release, theirs.release, "start all slices of an island with one release"),
            (
                "digest of settings, data and devices",
                self.ours.settings,
                theirs.settings,
                "start all slices of an island with one config, on one kind of device",
            ),
            ("number of slices", self.ours.slices, theirs.slices, "start all slices with one islands.slices"),
            ("host number", self.ours.host, theirs.host, "give each host the addresses of the hosts of its number"),
        ):
            if own != other:
                raise Refused(f"{named} has the {what} {other!r}, this slice {own!r}: {remedy}")


def encoded(token: bytes) -> str:
    """Return a token as a greeting carries it."""
    return base64.b64encode(token).decode()


def _read(connection: Connection, until_s: float) -> Any:
    head, _ = FrameReader(connection).read(GREETING_BYTES_MAX, 0, until_s)
    try:
        return GREETINGS.unpack(head)
    except WireError as error:
        raise WireError(f"it does not greet as a slice of this release does: {error}") from None
