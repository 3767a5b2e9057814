"""The parts of a listener that do not depend on how bytes travel: who may connect, and requests to the driver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from diloco_jax.transport.link import TransportConfig, TransportError, check_name
from diloco_jax.transport.session.host_parts import HostSessions
from diloco_jax.transport.session.inbox import Session

CLOSING = "the syncer is closing"
KNOWN_MAX = 10_000  # learners that are remembered, so that an older process of one is recognised
DRAINS_MAX = 16
DRAIN_ANSWER_S = 3.0  # below the patience of those who ask


class Refused(TransportError):
    """The syncer does not take this connection, and why.

    Args:
        final: whether another attempt of the same process would be refused as well.
    """

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


S = TypeVar("S", bound=Session)


class SessionBook(Generic[S]):
    """The sessions of a listener: who may open one, and which one is a learner's newest. Any thread."""

    def __init__(self, config: TransportConfig, run_id: str, epoch: int) -> None:
        self.config = config
        self.run_id = run_id
        self.epoch = epoch
        self._lock = threading.Lock()
        self._leader_came = threading.Condition(self._lock)
        self._opening: dict[tuple[str, tuple[int, int], int], S] = {}  # not all of their connections are there yet
        self._newest: dict[str, tuple[tuple[int, int], S]] = {}  # of leaders
        self._hosts: dict[str, HostSessions[S]] = {}  # of learners in `_newest` that have several hosts
        self._closed = False

    def admit(
        self,
        run_id: str,
        epoch: int,
        learner_id: str,
        incarnation: int,
        number: int,
        make: Callable[[], S],
        host: int = 0,
    ) -> S:
        """Return the session with this name, made now if the name is new.

        Call this only for a peer whose credentials are good. It ends nobody's session: `establish` does.

        Raises:
            Refused: It is of another run or a later epoch, its name is not allowed, or a newer session of the learner
                is known.
        """
        self._check_names(run_id, epoch, learner_id, incarnation)
        stamp = (incarnation, number)
        with self._lock:
            if self._closed:
                raise Refused(CLOSING, final=False)
            known = self._established(learner_id, stamp, host)
            if known is not None:
                return known
            self._check_not_stale(learner_id, stamp, host)
            session = self._opening.get((learner_id, stamp, host))
            if session is None or not session.open:
                self._opening = {key: each for key, each in self._opening.items() if each.open}
                session = self._opening[learner_id, stamp, host] = make()
            return session

    def establish(self, session: S) -> None:
        """Take up a session whose connections are all there.

        That of a leader becomes the only one of its learner: the one before it ends. That of another host waits for its
        leader's, and then belongs to it.

        Raises:
            Refused: A newer one was quicker, the leader's did not come, or the syncer is closing.
        """
        with self._lock:
            key = self._key_of(session)
            if key is None:  # it is established already, by its other connection
                return
            learner_id, stamp, host = key
            if host:
                self._wait_for_leader(session, learner_id, stamp)
                if self._key_of(session) is None:
                    return
            del self._opening[key]
            try:
                if self._closed:
                    raise Refused(CLOSING, final=False)
                if not session.open:
                    raise Refused(session.reason, final=False)
                self._check_not_stale(learner_id, stamp, host)
                if host:
                    self._add_host(session, learner_id, stamp)
                    return
                if learner_id not in self._newest and len(self._newest) >= KNOWN_MAX:
                    self._forget_one()
            except Refused as error:
                session.fail(str(error))
                raise
            self._replace(session, learner_id, stamp)

    def _key_of(self, session: S) -> tuple[str, tuple[int, int], int] | None:
        return next((key for key, each in self._opening.items() if each is session), None)

    def _established(self, learner_id: str, stamp: tuple[int, int], host: int) -> S | None:
        """Return the session with this name if it is open, and so are all its connections."""
        known = self._newest.get(learner_id)
        if known is None or known[0] != stamp or not known[1].open:
            return None
        if not host:
            return known[1]
        return self._hosts[learner_id].get(host) if learner_id in self._hosts else None

    def _replace(self, session: S, learner_id: str, stamp: tuple[int, int]) -> None:
        known = self._newest.pop(learner_id, None)  # so that the newest comes last
        if known is not None:  # under the lock: its end must be in the inbox before the new session speaks
            known[1].fail(f"replaced by a newer connection of {learner_id!r}, incarnation {stamp[0]}")
        self._newest[learner_id] = (stamp, session)
        self._hosts.pop(learner_id, None)
        session.announced = True
        if session.hosts > 1:
            self._hosts[learner_id] = HostSessions(session)
        self._leader_came.notify_all()

    def _wait_for_leader(self, session: S, learner_id: str, stamp: tuple[int, int]) -> None:
        """Wait, without the lock, until the learner has a session at least as new.

        It lasts half as long as the dialling side waits.
        """

        def came() -> bool:
            known = self._newest.get(learner_id)
            return self._closed or not session.open or (known is not None and known[0] >= stamp)

        self._leader_came.wait_for(came, timeout=self.config.connect_timeout_s / 2)

    def _add_host(self, session: S, learner_id: str, stamp: tuple[int, int]) -> None:
        who = f"host {session.host} of {learner_id!r}"
        if self._established(learner_id, stamp, 0) is None:
            raise Refused(f"{who} came, but no session of its leader within half of connect_timeout_s", final=False)
        leader = self._newest[learner_id][1]
        if session.hosts != leader.hosts:
            raise Refused(
                f"{who} says {session.hosts} hosts, its leader {leader.hosts}: start all with the same number"
            )
        self._hosts[learner_id].add(session)

    def _check_names(self, run_id: str, epoch: int, learner_id: str, incarnation: int) -> None:
        if run_id != self.run_id:
            raise Refused(
                f"{learner_id!r} belongs to run {run_id!r}, this syncer to run {self.run_id!r}: start both from the "
                "same config"
            )
        if epoch > self.epoch:
            raise Refused(
                f"{learner_id!r} has heard of epoch {epoch} of the syncer, this one is of epoch {self.epoch}: stop "
                "this old syncer, and connect to the newer one",
                final=False,  # the newer one may take its place
            )
        try:
            check_name(learner_id)
        except ValueError as error:
            raise Refused(str(error)) from None
        if incarnation < 0:
            raise Refused(f"incarnation {incarnation} of {learner_id!r} is not allowed: use 0 or more")

    def _check_not_stale(self, learner_id: str, stamp: tuple[int, int], host: int) -> None:
        known = self._newest.get(learner_id)
        if known is None:
            return
        if host and known[0][0] == stamp[0]:  # it will hear of the leader's next session
            if known[0] > stamp or (known[0] == stamp and not known[1].open):
                raise Refused(f"the session of the leader of {learner_id!r} is over", final=False)
        elif known[0] >= stamp:
            raise Refused(
                f"{learner_id!r} incarnation {stamp[0]} is stale, a later connection with incarnation {known[0][0]} is "
                "known: stop this process, or start it with a larger incarnation"
            )

    def _forget_one(self) -> None:
        """Forget the learner whose session ended and that connected the longest time ago."""
        gone = next((name for name, (_, session) in self._newest.items() if not session.open), None)
        if gone is None:
            raise Refused(f"{KNOWN_MAX} learners are connected, this syncer takes no more", final=False)
        del self._newest[gone]
        self._hosts.pop(gone, None)

    @property
    def connected(self) -> int:
        """Return the number of learners that have a session."""
        return sum(session.open for _, session in list(self._newest.values()))

    def stop_admitting(self) -> list[S]:
        """Refuse everyone from now on, and return the sessions that are open."""
        with self._lock:
            self._closed = True
            self._leader_came.notify_all()
            sessions = [*(session for _, session in self._newest.values()), *self._opening.values()]
            return [session for session in sessions if session.open]


class Drains:
    """Requests that a learner leave, from any thread to that of the driver.

    Args:
        wake: lets the driver look.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[_Drain] = deque()
        self._closed = False

    def ask(self, learner_id: str) -> tuple[bool, str]:
        """Let the driver drain a learner; return whether it did, and its words. Not on the driver's own thread."""
        request = _Drain(learner_id)
        with self._lock:
            if self._closed:
                return False, CLOSING
            if len(self._waiting) >= DRAINS_MAX:
                return False, f"{DRAINS_MAX} drain requests are waiting; ask again later"
            self._waiting.append(request)
        self._wake()
        if request.done.wait(DRAIN_ANSWER_S):
            return request.ok, request.message
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                return False, f"the syncer was busy for {DRAIN_ANSWER_S:g} s and did nothing; ask again"
        return False, f"the syncer has begun but did not end within {DRAIN_ANSWER_S:g} s; see `diloco status`"

    def answer(self, on_drain: Callable[[str], str] | None) -> None:
        """Carry out the requests that wait; on the driver's own thread."""
        while self._waiting:
            with self._lock:
                if not self._waiting:  # its caller gave up
                    return
                request = self._waiting.popleft()
            try:
                if on_drain is None:
                    raise ValueError("this syncer cannot drain learners")
                request.message = on_drain(request.learner_id)
                request.ok = True
            except ValueError as error:
                request.message = str(error)
            finally:  # whatever else went wrong is the driver's to handle, but the caller must not wait for it
                request.done.set()

    def close(self) -> None:
        """Take no more requests."""
        with self._lock:
            self._closed = True


class _Drain:
    """A request that waits for the driver."""

    def __init__(self, learner_id: str) -> None:
        self.learner_id = learner_id
        self.done = threading.Event()
        self.ok = False
        self.message = "the syncer failed; see its log"
