"""Sessions of a learner with several hosts: they end together, and the parts that they bring become one value.

Each host sends the bytes of a fragment's value that it has (core/parts.py). When the parts of all hosts are there, the
leader's session delivers the whole, as if the leader had sent it. Parts of values that never become whole are bounded:
in number, and in bytes by `payload_bytes_max`; the oldest value makes room. All of them go when the sessions end.
"""

import logging
import threading
from functools import partial

from diloco_jax.core.parts import join_parts
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.transport.session.stream import StreamSession

VALUES_MAX = 64  # of one learner that wait for parts

log = logging.getLogger(__name__)


class HostParts:
    """Values of one learner of which some parts are here."""

    def __init__(self, hosts: int, bytes_max: int) -> None:
        self._hosts = hosts
        self._bytes_max = bytes_max
        self._values: dict[FragmentValue, dict[int, bytes | memoryview]] = {}  # oldest first; parts by host
        self.held_bytes = 0

    def add(self, host: int, message: FragmentValue, part: bytes | memoryview) -> bool:
        """Keep a part, in place of one that came before it; True if the value has all of them now.

        Raises:
            ValueError: The parts of this value are too large.
        """
        parts = self._values.setdefault(message, {})
        self.held_bytes += len(part) - len(parts.get(host, b""))
        parts[host] = part
        size = sum(map(len, parts.values()))
        if size > self._bytes_max:
            raise ValueError(
                f"the parts of fragment {message.fragment_id} have {size} bytes, the limit is {self._bytes_max}: raise "
                "transport.payload_bytes_max on all sides, or use more fragments"
            )
        while len(self._values) > VALUES_MAX or self.held_bytes > self._bytes_max:
            oldest = next(each for each in self._values if each != message)
            missing = self._hosts - len(self._values[oldest])
            log.warning(f"dropped a value of {oldest.learner_id!r} without {missing} of its parts: {oldest}")
            self.take(oldest)
        return len(parts) == self._hosts

    def take(self, message: FragmentValue) -> list[bytes | memoryview]:
        """Give out the parts of a value; none if it is gone."""
        parts = list(self._values.pop(message, {}).values())
        self.held_bytes -= sum(map(len, parts))
        return parts

    def clear(self) -> None:
        self._values.clear()
        self.held_bytes = 0


class HostSessions:
    """The sessions of all hosts of one learner, on the syncer's side. Any thread may call the methods."""

    def __init__(self, leader: StreamSession) -> None:
        self.leader = leader
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # held for one value at a time, so that others wait in parts and not whole
        self._parts = HostParts(leader.hosts, leader.config.payload_bytes_max)
        self._sessions: dict[int, StreamSession] = {}
        self._over = False
        self.add(leader)

    def get(self, host: int) -> StreamSession | None:
        with self._lock:
            return self._sessions.get(host)

    def add(self, session: StreamSession) -> None:
        """Let a session end with the others, and take the values that it brings as parts."""
        with self._lock:
            self._sessions[session.host] = session
        session.on_value = partial(self._on_value, session.host)
        session.on_end = partial(self._end, session.host)
        for each in (self.leader, session):  # it may have ended before it had its `on_end`
            if not each.open:
                self._end(each.host, each.reason)
        if self._over:
            session.fail(self.leader.reason)

    def _end(self, host: int, reason: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            self._parts.clear()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.fail(f"host {host}: {reason}" if host else reason)

    def _on_value(self, host: int, message: FragmentValue, part: bytes | memoryview) -> bool:
        """Keep a host's part, or deliver the whole if it is the last one; on the thread of the host's session."""
        message = message._replace(payload_bytes=0)  # each host names the size of its own part
        try:
            with self._lock:
                if self._over or not self._parts.add(host, message, part):
                    return not self._over
            with self._joining:
                with self._lock:
                    parts = self._parts.take(message)
                if not parts:  # dropped meanwhile, or the sessions are over
                    return False
                whole = join_parts(parts, self.leader.config.payload_bytes_max)
                del parts
                return self.leader.put(message._replace(payload_bytes=len(whole)), whole)
        except ValueError as error:
            self.leader.fail(f"the parts that its hosts sent cannot be joined: {error}")
            return False
