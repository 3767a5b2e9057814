"""The syncer's side of a bucket: it looks for requests at the entrance, and serves sessions and questions.

One thread lists the entrance once per poll. Everything else has a computed name. What an ended session leaves is
deleted after a while in which its learner may still read, what an earlier epoch left at the start, and everything at
the end.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import replace
from functools import partial

from google.protobuf.message import DecodeError

from diloco_jax.protocol.messages import GlobalFragment
from diloco_jax.protocol.texts import clean
from diloco_jax.transport import wire
from diloco_jax.transport.bucket.session import BucketSession
from diloco_jax.transport.bucket.stream import Place, Shared
from diloco_jax.transport.link import (
    HOST_TYPES,
    HOSTS_MAX,
    LEARNER_TYPES,
    SUBSCRIBER,
    SUBSCRIBER_TYPES,
    SYNCER_TYPES,
    LinkClosed,
    TransportConfig,
    Version,
    payload_parts,
)
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls
from diloco_jax.transport.session.description import DESCRIBE
from diloco_jax.transport.session.listener import Listener
from diloco_jax.transport.session.sessions import Refused, SessionBook
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.requests import QUESTION_BYTES_MAX
from diloco_jax.transport.store.store import LISTED_MAX, StoreError

# Between two signs of life, and two looks for a later leader.
BEAT_S = 5.0
# What an ended session, or an answer, left is deleted after this time, or after ten polls.
LINGER_S = 20.0
# Requests that are handled at the same time.
HANDLED_MAX = 64
# Payloads for several learners that are kept for the next one.
SHARED_MAX = 32
# Names of foreign objects that are reported.
REPORTED_MAX = 20

log = logging.getLogger(__name__)


class BucketListener(Listener):
    """The syncer of one epoch in a bucket, opened by `listen`.

    Attributes:
        address: The bucket.

    Args:
        leader: This process, if it leads already.

    Raises:
        ValueError: Another process leads the run, the bucket has another run, or it cannot be used.
        StoreError: The store does not answer.
    """

    def __init__(
        self,
        config: TransportConfig,
        run_id: str,
        epoch: int,
        subscribers_max: int,
        run: str = "",
        leader: Leader | None = None,
    ) -> None:
        super().__init__(config, run_id, epoch, subscribers_max, run)
        self.address = config.address
        self._bucket = Bucket(config)
        # The epoch of the bucket may be ahead of the machine's: a process may have led without an input.
        self._leader = self._bucket.lead(epoch, run_id, run) if leader is None else leader
        self._epoch = self._leader.epoch
        self._entrance = names.entrance(epoch)
        self._seen: set[str] = set()
        self._reported = 0
        self._handling: set[threading.Thread] = set()
        # Entrance object -> its session, and when that was seen to be over.
        self._sessions: dict[str, BucketSession] = {}
        self._over_s: dict[str, float] = {}
        self._answers: deque[tuple[float, str]] = deque()
        self._shared: OrderedDict[tuple[int, ...], Shared] = OrderedDict()
        self._numbers = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-bucket", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> dict[str, int]:
        return self._bucket.store.requests.as_dict()

    def send_version(self, peer: str, message: GlobalFragment, version: Version) -> bool:
        """Queue a version as `send` does; its payload is written once for all learners of one host."""
        session = self._heard.get(peer)
        if not isinstance(session, BucketSession) or self._book.hosts_of(session) is not None:
            return super().send_version(peer, message, version)
        key = message.fragment_id, message.version, message.base, message.epoch
        shared = self._shared.get(key)
        if shared is None:
            parts = payload_parts(message, version.payload, SYNCER_TYPES, self.config.payload_bytes_max)
            self._numbers += 1
            shared = self._shared[key] = Shared(self._bucket, self._epoch, self._numbers, parts)
            while len(self._shared) > SHARED_MAX:
                self._later(self._shared.popitem(last=False)[1].release)
        try:
            session.send(message, (), shared)
        except LinkClosed:
            return False
        return True

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, end all sessions, and delete what this epoch has left."""
        if self._closing.is_set():
            return
        until_s = time.monotonic() + grace_s
        sessions = [each for each in self.stop_admitting() if isinstance(each, BucketSession)]
        self._cutting.shutdown(wait=True)
        for session in sessions:
            session.retire("closed by the syncer")
        for session in sessions:
            session.written.wait(max(0.0, until_s - time.monotonic()))
        if sessions:
            # They read the last object with their next look.
            time.sleep(max(0.0, min(until_s - time.monotonic(), 2 * self.config.poll_s)))
        self._closing.set()
        self._thread.join(grace_s)
        with contextlib.suppress(StoreError):
            self._sweep()

    def _sweep(self) -> None:
        """Delete all objects of this epoch and of earlier ones, the claim to lead last."""
        keys = self._bucket.store.list("")
        newer = [key for key in keys if names.epoch_of(key) > self._epoch]
        leaders = {names.leader(self._epoch), names.alive(self._epoch)}
        # Objects that are not ours are none of our business.
        ours = [key for key in keys if 0 <= names.epoch_of(key) <= self._epoch and key not in leaders]
        self._bucket.store.delete(ours)
        if not newer:
            self._bucket.store.delete([key for key in leaders if key in keys])

    def _watch(self) -> None:
        """List the entrance until the listener closes; the body of its thread."""
        beat_s, trouble = -BEAT_S, ""
        with contextlib.suppress(StoreError):
            self._delete_earlier()
        while not self._closing.is_set():
            try:
                if time.monotonic() >= beat_s + BEAT_S:
                    beat_s = time.monotonic()
                    if not self._lead_on():
                        return
                self._look()
                self._clean()
                trouble = ""
            except StoreError as error:
                if not trouble:
                    log.warning(f"the bucket does not answer, trying again: {error}")
                trouble = str(error)
            # A thread that ended silently would leave a syncer that nobody can reach.
            except Exception:
                log.exception("an error at the entrance of the bucket; going on")
            self._closing.wait(self.config.poll_s)

    def _lead_on(self) -> bool:
        """Give a sign of life; False, and `on_lost` is called, if another process leads the run."""
        newest = self._bucket.leader()
        if newest is not None and newest.epoch > self._epoch:
            log.error(f"another process leads the run as the syncer of epoch {newest.epoch}; this one ends")
            self.on_lost(f"another process leads the run as the syncer of epoch {newest.epoch}")
            return False
        if newest is None or newest.mark != self._leader.mark:
            log.warning(f"the object {names.leader(self._epoch)} was deleted or replaced; writing it again")
            self._bucket.lead_again(self._leader)
        self._bucket.write(names.alive(self._epoch), str(time.monotonic_ns()).encode())
        return True

    def _delete_earlier(self) -> None:
        keys = self._bucket.store.list("")
        self._bucket.store.delete([key for key in keys if 0 <= names.epoch_of(key) < self._epoch])

    def _look(self) -> None:
        """Handle what is new at the entrance."""
        self._handling = {each for each in self._handling if each.is_alive()}
        listed = self._bucket.store.list(self._entrance, LISTED_MAX)
        self._seen &= set(listed)
        for key in listed:
            if key in self._seen or len(self._handling) >= HANDLED_MAX:
                continue
            self._seen.add(key)
            thread = threading.Thread(target=self._handle, args=(key,), name="diloco-entrance", daemon=True)
            self._handling.add(thread)
            thread.start()

    def _handle(self, key: str) -> None:
        """Handle one request at the entrance; the body of its thread."""
        word = key.removeprefix(self._entrance)
        try:
            content = self._bucket.read(key, QUESTION_BYTES_MAX)
            # Its writer has given up.
            if content is None:
                return
            if word.startswith(names.ASK):
                self._answer(key, word.removeprefix(names.ASK), pb.Question.FromString(content))
                return
            header = pb.Header.FromString(content)
            subscribes = word.startswith(names.FOLLOW)
            if word != f"{names.FOLLOW if subscribes else names.HELLO}{names.session_name(header)}":
                raise ValueError("it does not name its session")
            self._admit(key, header, subscribes=subscribes)
        except (ValueError, DecodeError) as error:
            self._discard(key, error)
        except StoreError as error:
            log.info(f"a request waits: {error}")
            self._seen.discard(key)

    def _discard(self, key: str, error: Exception) -> None:
        if self._reported < REPORTED_MAX:
            self._reported += 1
            log.warning(f"an object at the entrance of the bucket is not used, and deleted: {clean(str(error), 300)}")
        with contextlib.suppress(StoreError):
            self._bucket.store.delete([key])

    def _admit(self, key: str, header: pb.Header, *, subscribes: bool) -> None:
        """Open the session that a header asks for, or tell its learner why there is none."""
        book = self._subscribers if subscribes else self._book
        make = partial(self._make, header, subscribes=subscribes)
        try:
            if header.hosts > HOSTS_MAX or header.host >= max(1, header.hosts) or (subscribes and header.hosts):
                raise Refused(f"{header.sender!r} has host {header.host} of {header.hosts}: use at most {HOSTS_MAX}")
            session = book.admit(header, make)
            if not isinstance(session, BucketSession) or session in self._sessions.values():
                return
            self._sessions[key] = session
            _establish(book, session)
        except Refused as error:
            log.info(f"refused {header.sender}: {error}")
            refused = make()
            refused.refuse(str(error), final=error.final)
            refused.finish(str(error))
            refused.written.set()
            self._sessions[key] = refused

    def _make(self, header: pb.Header, *, subscribes: bool) -> BucketSession:
        place = Place(self._bucket, self._epoch, names.session(self._epoch, header))
        config, readable, name = self.config, HOST_TYPES if header.host else LEARNER_TYPES, ""
        if subscribes:
            # It requests one value at a time, so values that wait are those of one that does not read what it requests.
            config, readable = replace(config, queue_payloads_max=1), SUBSCRIBER_TYPES
            name = f"{SUBSCRIBER}{header.sender}"
        return BucketSession(self._inbox, header, config, place, readable, serves=True, name=name)

    def _answer(self, key: str, number: str, question: pb.Question) -> None:
        where = names.answer(self._epoch, number)
        self._bucket.write(where, self._reply(question).SerializeToString())
        self._answers.append((time.monotonic(), where))
        self._bucket.store.delete([key])

    def _reply(self, question: pb.Question) -> pb.Answer:
        if question.method == calls.STATUS:
            return _reply(pb.StatusReply(json=self.status_json))
        if question.method == DESCRIBE:
            name = pb.DescribeRequest.FromString(question.request).learner_id
            number = self.number_of(name) if name else 0
            return _reply(self.description._replace(number=number).reply())
        reads = {calls.DRAIN: calls.read_drain_request, calls.OPERATE: calls.read_operator_request}
        if question.method not in reads:
            return pb.Answer(problem=f"a bucket does not serve {clean(question.method, 40)!r}")
        try:
            ok, message = self._requests.ask(reads[question.method](question.request))
        except ValueError as error:
            ok, message = False, str(error)
        return _reply(pb.DrainReply(ok=ok, message=message))

    def _clean(self) -> None:
        """Delete what ended sessions and old answers have left."""
        now_s, linger_s = time.monotonic(), max(LINGER_S, 10 * self.config.poll_s)
        while self._answers and self._answers[0][0] < now_s - linger_s:
            self._bucket.store.delete([self._answers.popleft()[1]])
        for key, session in list(self._sessions.items()):
            if session.open or not session.written.is_set():
                continue
            if now_s - self._over_s.setdefault(key, now_s) > linger_s:
                self._bucket.delete_below(session.place.prefix)
                self._bucket.store.delete([key])
                del self._sessions[key], self._over_s[key]


def _establish(book: SessionBook, session: BucketSession) -> None:
    book.establish(session)
    session.start(pb.Entry(frame=wire.ready_head()))


def _reply(reply: pb.StatusReply | pb.DescribeReply | pb.DrainReply) -> pb.Answer:
    return pb.Answer(reply=reply.SerializeToString())
