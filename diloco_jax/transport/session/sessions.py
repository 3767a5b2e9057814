"""The sessions of a listener: which learners may connect, and values from several hosts.

The sessions of a learner with several hosts end together. Each host sends the bytes of a fragment's value that its
devices hold (core/host_bytes.py). When the bytes of all hosts have arrived, the leader's session delivers the whole
value, as if the leader had sent it. Incomplete values are bounded in number, and in bytes by `payload_bytes_max`; the
oldest one makes room. All of them are dropped when the sessions end.

Each host states once which blocks of the fragments it holds (core/held.py). From then on it gets its blocks of every
version, over its own session. Versions wait until the host has stated its blocks; if newer ones have replaced more than
`payload_bytes_max` of them, the sessions end. If the blocks are not of the model, the listener refuses this incarnation
of the learner from then on, because it would state the same blocks again.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.protocol.membership import other_run
from diloco_jax.protocol.messages import AnchorValue, CutFragment, FragmentValue, GlobalFragment, HostBlocks
from diloco_jax.transport.limits import STATEMENT_BYTES_MAX
from diloco_jax.transport.link import (
    TO_HOST_TYPES,
    LinkClosed,
    Payload,
    TransportConfig,
    TransportError,
    Version,
    check_name,
    payload_parts,
)
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.inbox import HostPart, Session

CLOSING = "the syncer is closing"
# The listener remembers this many learners, so that it recognises older processes of a name.
KNOWN_MAX = 10_000
# Limit of one learner's values that wait for other hosts.
VALUES_MAX = 64
# A learner's clock may be ahead of this one by a day.
AHEAD_MS = 86_400_000
# Cut versions that wait in the queue to one host.
CUTS_MAX = 2
# The hosts of a learner send parts of these values.
HostValue = FragmentValue | AnchorValue

log = logging.getLogger(__name__)


class Refused(TransportError):
    """The syncer refuses this connection; with `final` it refuses every later one of the same process too."""

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


class UnsentVersions:
    """The versions that wait for one host of a learner: for its statement, or for room in the queue to it.

    A version has a whole value, so it waits only for the statement. A cut that waits for room has no value, and no
    copy of a payload yet.
    """

    def __init__(self, waiting_max: int, bytes_max: int) -> None:
        self._waiting_max = waiting_max
        self._bytes_max = bytes_max
        self.versions: deque[tuple[GlobalFragment, Version]] = deque()
        self.cuts: deque[tuple[CutFragment, Callable[[], Payload]]] = deque()
        # The payload of the host's HostBlocks.
        self.blocks: bytes | None = None

    def add(self, message: GlobalFragment, version: Version) -> str:
        """Queue a version; return which limit is exceeded, or ""."""
        self.versions.append((message, version))
        waiting, replaced_bytes = len(self.versions) + len(self.cuts), self._replaced_bytes()
        if self.blocks is None and replaced_bytes > self._bytes_max:
            return (
                f"has stated no blocks, and {replaced_bytes} bytes of replaced values wait for it, the limit is "
                f"{self._bytes_max}: start all hosts with the release of the syncer, or raise "
                "transport.payload_bytes_max if its link is slow"
            )
        if waiting > self._waiting_max:
            return (
                f"does not read what it is sent: {waiting} versions wait for it, the limit is {self._waiting_max}: "
                "check its link, or raise transport.queue_payloads_max"
            )
        return ""

    def _replaced_bytes(self) -> int:
        """Return the bytes of waiting values that are not the newest of their fragment: only they cost memory."""
        newest = {message.fragment_id: version for message, version in self.versions}
        return sum(each.value_bytes for _, each in self.versions) - sum(each.value_bytes for each in newest.values())

    def clear(self) -> None:
        self.versions.clear()
        self.cuts.clear()


def _parts(session: Session, cut: CutFragment, make_payload: Callable[[], Payload]) -> tuple[memoryview, ...]:
    return payload_parts(cut, make_payload(), TO_HOST_TYPES, session.config.payload_bytes_max)


class HostParts:
    """Incomplete values of one learner."""

    def __init__(self, hosts: int, bytes_max: int) -> None:
        self._hosts = hosts
        self._bytes_max = bytes_max
        # Value -> bytes by host, oldest value first.
        self._values: dict[HostValue, dict[int, bytes | memoryview]] = {}
        self.held_bytes = 0

    def add(self, host: int, message: HostValue, part: bytes | memoryview) -> bool:
        """Keep a part, in place of an earlier one of that host; return whether the value is complete now.

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

    def take(self, message: HostValue) -> list[bytes | memoryview]:
        """Remove and return the parts of a value; none if it was dropped."""
        parts = list(self._values.pop(message, {}).values())
        self.held_bytes -= sum(map(len, parts))
        return parts

    def clear(self) -> None:
        self._values.clear()
        self.held_bytes = 0


class HostSessions:
    """The sessions of all hosts of one learner, on the syncer's side. Any thread may call the methods.

    Args:
        later: Calls a function on the one thread that cuts versions.
    """

    def __init__(self, leader: Session, later: Callable[[Callable[[], None]], object]) -> None:
        self.leader = leader
        self._later = later
        self._lock = threading.Lock()
        # Held while one value is joined and delivered, so that at most one whole value waits for room in the inbox.
        self._joining = threading.Lock()
        self._parts = HostParts(leader.hosts, leader.config.payload_bytes_max)
        self._sessions: dict[int, Session] = {}
        limits = leader.config.queue_payloads_max, leader.config.payload_bytes_max
        self._unsent = [UnsentVersions(*limits) for _ in range(leader.hosts)]
        self._over = False
        # The reason to refuse every later session of this incarnation; "" if there is none.
        self.refusal = ""
        self.add(leader)

    def get(self, host: int) -> Session | None:
        with self._lock:
            return self._sessions.get(host)

    def add(self, session: Session) -> None:
        """Bind a session to the others: they end together, and its values are parts of the learner's values."""
        with self._lock:
            self._sessions[session.host] = session
        session.on_host = partial(self._on_host, session.host)
        session.on_room = partial(self._later, self._send_cuts)
        session.on_end = partial(self._end, session.host)
        # A session may have ended before it got its `on_end`.
        for each in (self.leader, session):
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
            for unsent in self._unsent:
                unsent.clear()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.fail(f"host {host}: {reason}" if host else reason)

    def send_version(self, message: GlobalFragment, version: Version) -> None:
        """Send every host its blocks of a version, in order; the blocks are cut on another thread."""
        with self._lock:
            if self._over:
                return
            excess = [(host, unsent.add(message, version)) for host, unsent in enumerate(self._unsent)]
        if found := [f"its host {host} {words}" for host, words in excess if words]:
            self.leader.fail(found[0])
        else:
            self._later(self._send_cuts)

    def _send_cuts(self) -> None:
        """Cut and send the next versions of hosts that have stated their blocks; on the thread that cuts."""
        for host, unsent in enumerate(self._unsent):
            with self._lock:
                session, blocks = self._sessions.get(host), unsent.blocks
            if session is None or blocks is None:
                continue
            try:
                self._cut(unsent, blocks)
                # The end of the session is in the inbox.
                with contextlib.suppress(LinkClosed):
                    self._send_next(session, unsent, blocks)
            except ValueError as error:
                self._refuse(
                    f"its host {host} cannot get a version: {error}. Start all hosts with the config and the release "
                    "of the syncer"
                )
            # An error would be lost with the thread.
            except Exception as error:
                session.fail(f"its host {host} cannot get a version: {error}")

    def _cut(self, unsent: UnsentVersions, blocks: bytes) -> None:
        """Take the digests of all versions that wait for a host, so that their values are freed."""
        while True:
            with self._lock:
                if not unsent.versions:
                    return
                message, version = unsent.versions[0]
            digest, make_payload = version.cut(blocks)
            del version
            with self._lock:
                # The sessions may be over meanwhile.
                if not unsent.versions:
                    return
                unsent.versions.popleft()
                unsent.cuts.append((CutFragment(message, digest), make_payload))

    def _send_next(self, session: Session, unsent: UnsentVersions, blocks: bytes) -> None:
        """Send the next cuts to a host; a payload may be a copy, so few of them wait in the queue to it."""
        while session.cuts_waiting < CUTS_MAX:
            with self._lock:
                if not unsent.cuts:
                    return
                cut, make_payload = unsent.cuts.popleft()
            session.send_cut(cut, blocks, partial(_parts, session, cut, make_payload))

    def _on_host(self, host: int, message: HostPart, payload: bytes | memoryview) -> bool:
        """Take what a host sends for its learner; on the thread of the host's session."""
        if not isinstance(message, HostBlocks):
            return self._on_value(host, message, payload)
        if len(payload) > STATEMENT_BYTES_MAX:
            self._refuse(
                f"its host {host} stated its blocks in {len(payload)} bytes, the limit is {STATEMENT_BYTES_MAX}: shard "
                "tensors along their first axes"
            )
            return False
        with self._lock:
            again, self._unsent[host].blocks = self._unsent[host].blocks is not None, bytes(payload)
        if again:
            self._refuse(f"its host {host} stated its blocks twice: start all hosts with the release of the syncer")
            return False
        self._later(self._send_cuts)
        return True

    def _refuse(self, reason: str) -> None:
        """End the sessions, and let the book refuse later ones of the same incarnation."""
        self.refusal = reason
        self.leader.fail(reason)

    def _on_value(self, host: int, message: HostValue, part: bytes | memoryview) -> bool:
        """Keep a host's part, and deliver the whole value after the last one; on the thread of the host's session."""
        # Each host names only the size of its part.
        message = message._replace(payload_bytes=0)
        try:
            with self._lock:
                if self._over or not self._parts.add(host, message, part):
                    return not self._over
            with self._joining:
                with self._lock:
                    parts = self._parts.take(message)
                # The value was dropped meanwhile, or the sessions are over.
                if not parts:
                    return False
                whole = join_host_bytes(parts, self.leader.config.payload_bytes_max)
                del parts
                return self.leader.put(message._replace(payload_bytes=len(whole)), whole)
        except ValueError as error:
            self.leader.fail(f"the parts that its hosts sent cannot be joined: {error}")
            return False


class SessionBook:
    """The book of a listener's sessions: who may open one, and which one is a learner's newest; any thread.

    Args:
        known_max: The most learners that are known.
        full: The refusal of one more learner, while all that are known have an open session.
    """

    def __init__(
        self,
        config: TransportConfig,
        run_id: str,
        epoch: int,
        later: Callable[[Callable[[], None]], object] = lambda do: do(),
        *,
        run: str = "",
        known_max: int = KNOWN_MAX,
        full: str = "",
    ) -> None:
        self.config = config
        self._known_max = known_max
        self._full = full or f"{known_max} learners are connected, this syncer takes no more"
        self.run_id = run_id
        self.epoch = epoch
        # Id of the run; "" if it has none. `run_id` is its name.
        self.run = run
        # Calls a function on the one thread that cuts versions for hosts.
        self._later = later
        self._lock = threading.Lock()
        self._leader_came = threading.Condition(self._lock)
        # Sessions with missing connections, by name.
        self._opening: dict[tuple[object, ...], Session] = {}
        # The leaders' sessions by learner.
        self._newest: dict[str, Session] = {}
        # The host sessions of learners in `_newest` that have several hosts.
        self._hosts: dict[str, HostSessions] = {}
        self._closed = False

    def admit(self, header: pb.Header, make: Callable[[], Session]) -> Session:
        """Return the session that a header names; create it if the name is new.

        The caller has checked the peer's credentials. This method ends no other session, because `establish` does.

        Raises:
            Refused: The header names another run or a later epoch, its name is not allowed, or a newer session of the
                learner is known.
        """
        self._check_names(header)
        with self._lock:
            if self._closed:
                raise Refused(CLOSING, final=False)
            known = self._established(header, header.host)
            if known is not None:
                return known
            self._check_not_stale(header)
            session = self._opening.get(_name(header))
            if session is None or not session.open:
                self._opening = {name: each for name, each in self._opening.items() if each.open}
                session = self._opening[_name(header)] = make()
            return session

    def establish(self, session: Session) -> None:
        """Establish a session that has all of its connections.

        A leader's session replaces the earlier one of its learner. The session of another host waits for the leader's,
        and then belongs to it.

        Raises:
            Refused: A newer session was quicker, the leader's did not open in time, or the syncer is closing.
        """
        header = session.header
        with self._lock:
            if header.host and self._is_opening(session):
                self._wait_for_leader(session)
            # Another connection of the session has established it already.
            if not self._is_opening(session):
                return
            del self._opening[_name(header)]
            try:
                if self._closed:
                    raise Refused(CLOSING, final=False)
                if not session.open:
                    raise Refused(session.reason, final=False)
                self._check_not_stale(header)
                if header.host:
                    self._add_host(session)
                    return
                if header.sender not in self._newest and len(self._newest) >= self._known_max:
                    self._forget_one()
            except Refused as error:
                session.fail(str(error))
                raise
            self._replace(session)

    def hosts_of(self, leader: Session) -> HostSessions | None:
        """Return the sessions of all hosts of the learner with this leader; None if it is the only one, or replaced."""
        with self._lock:
            found = self._hosts.get(leader.header.sender)
            return found if found is not None and found.leader is leader else None

    def _is_opening(self, session: Session) -> bool:
        return self._opening.get(_name(session.header)) is session

    def _established(self, header: pb.Header, host: int) -> Session | None:
        """Return the session of a learner's host if it is open, and so are all its connections."""
        known = self._newest.get(header.sender)
        if known is None or _stamp(known.header) != _stamp(header) or not known.open:
            return None
        if not host:
            return known
        return self._hosts[header.sender].get(host) if header.sender in self._hosts else None

    def _replace(self, session: Session) -> None:
        learner_id = session.header.sender
        # Removed first, so that the newest session comes last.
        known = self._newest.pop(learner_id, None)
        # The lock is held, because the old session's end must be in the inbox before the new session's first message.
        if known is not None:
            known.fail(f"replaced by a newer connection of {learner_id!r}, incarnation {session.header.incarnation}")
        self._newest[learner_id] = session
        self._hosts.pop(learner_id, None)
        session.announced = True
        if session.hosts > 1:
            self._hosts[learner_id] = HostSessions(session, self._later)
        self._leader_came.notify_all()

    def _wait_for_leader(self, session: Session) -> None:
        """Wait, without the lock, until the learner has a session at least as new.

        The wait lasts at most half of the dialling side's timeout.
        """

        def came() -> bool:
            known = self._newest.get(session.header.sender)
            newer = known is not None and _stamp(known.header) >= _stamp(session.header)
            return self._closed or not session.open or newer

        self._leader_came.wait_for(came, timeout=self.config.connect_timeout_s / 2)

    def _add_host(self, session: Session) -> None:
        who = f"host {session.host} of {session.header.sender!r}"
        leader = self._established(session.header, 0)
        if leader is None:
            raise Refused(f"{who} came, but no session of its leader within half of connect_timeout_s", final=False)
        if session.hosts != leader.hosts:
            raise Refused(
                f"{who} says {session.hosts} hosts, its leader {leader.hosts}: start all with the same number"
            )
        self._hosts[session.header.sender].add(session)

    def _check_names(self, header: pb.Header) -> None:
        if header.run_id != self.run_id:
            raise Refused(
                f"{header.sender!r} belongs to run {header.run_id!r}, this syncer to run {self.run_id!r}: start both "
                "from the same config"
            )
        if header.run and self.run and header.run != self.run:
            raise Refused(other_run(repr(header.sender), header.run, self.run))
        if header.epoch > self.epoch:
            raise Refused(
                f"{header.sender!r} has heard of epoch {header.epoch} of the syncer, this one is of epoch "
                f"{self.epoch}: stop this old syncer, and connect to the newer one; or stop "
                "the learner, if it is of an older run",
                # The process may try again, because a newer syncer may start here.
                final=False,
            )
        try:
            check_name(header.sender)
        except ValueError as error:
            raise Refused(str(error)) from None
        if header.incarnation < 0:
            raise Refused(f"incarnation {header.incarnation} of {header.sender!r} is not allowed: use 0 or more")
        # By default it is the time of the start: a larger one would keep out every later start of that learner.
        if header.incarnation > (latest := int(time.time() * 1000) + AHEAD_MS):
            raise Refused(
                f"incarnation {header.incarnation} of {header.sender!r} is not allowed: use 0 to {latest}, the time in "
                "milliseconds of tomorrow, or correct that machine's clock"
            )

    def _check_not_stale(self, header: pb.Header) -> None:
        known = self._newest.get(header.sender)
        if known is None:
            return
        ours, theirs = _stamp(known.header), _stamp(header)
        hosts = self._hosts.get(header.sender)
        if hosts is not None and hosts.refusal and known.header.incarnation == header.incarnation:
            raise Refused(f"{header.sender!r} incarnation {header.incarnation} is refused: {hosts.refusal}")
        # The host will learn of the leader's next session.
        if header.host and known.header.incarnation == header.incarnation:
            if ours > theirs or (ours == theirs and not known.open):
                raise Refused(f"the session of the leader of {header.sender!r} is over", final=False)
        elif ours >= theirs:
            raise Refused(
                f"{header.sender!r} incarnation {header.incarnation} is stale, a later connection with incarnation "
                f"{known.header.incarnation} is known: stop this process, or start it with a larger incarnation"
            )

    def _forget_one(self) -> None:
        """Forget the learner that connected the longest time ago, among those without an open session."""
        gone = next((name for name, session in self._newest.items() if not session.open), None)
        if gone is None:
            raise Refused(self._full, final=False)
        del self._newest[gone]
        self._hosts.pop(gone, None)

    @property
    def connected(self) -> int:
        """Return the number of learners with an open session."""
        return sum(session.open for session in list(self._newest.values()))

    def stop_admitting(self) -> list[Session]:
        """Refuse every new session from now on, and return the open ones."""
        with self._lock:
            self._closed = True
            self._leader_came.notify_all()
            return [session for session in (*self._newest.values(), *self._opening.values()) if session.open]


def _stamp(header: pb.Header) -> tuple[int, int]:
    """Return a key that grows from session to session of a learner."""
    return header.incarnation, header.session


def _name(header: pb.Header) -> tuple[object, ...]:
    return header.sender, *_stamp(header), header.host
