"""The syncer's side of a bucket: it looks for requests at the entrance, and serves sessions and questions.

One thread lists the entrance once per poll. Everything else has a computed name. What an ended session leaves is
deleted once its learner has had time to read it, what an earlier epoch left at the start, and everything at the end.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from google.protobuf.message import DecodeError

from diloco_jax.protocol.messages import GlobalFragment
from diloco_jax.protocol.texts import clean
from diloco_jax.transport import wire
from diloco_jax.transport.bucket.session import BucketSession
from diloco_jax.transport.bucket.stream import Shared, StreamPlace
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
from diloco_jax.transport.session.sessions import Refused
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.requests import QUESTION_BYTES_MAX
from diloco_jax.transport.store.store import LISTED_MAX, StoreError
from diloco_jax.transport.store.term import Term

# What an ended session, or an answer, left is deleted after this time, or after ten polls.
LINGER_S = 20.0
# Requests that are handled at the same time.
HANDLED_MAX = 64
# Versions whose payloads are kept for the next receiver.
SHARED_MAX = 32
# What is asked at the entrance.
WORDS = (names.HELLO, names.FOLLOW, names.ASK)
# Foreign objects that are reported.
REPORTED_MAX = 20

log = logging.getLogger(__name__)


class BucketListener(Listener):
    """The syncer of one epoch in a bucket, opened by `listen`.

    Attributes:
        address: The bucket.

    Args:
        term: The leadership of this process, if it has claimed the run already.

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
        term: Term | None = None,
    ) -> None:
        super().__init__(config, run_id, epoch, subscribers_max, run)
        self.address = config.address
        if term is None:
            bucket = Bucket(config)
            term = Term(bucket, bucket.lead(epoch, run_id, run))
        self._bucket, self._term = term.bucket, term
        term.on_lost = self._inbox.wake
        # The epoch of the bucket may be ahead of the machine's: a process may have led without an input.
        self._epoch = term.leader.epoch
        self._entrance = names.entrance(self._epoch)
        self._seen: set[str] = set()
        self._reported = 0
        self._handling: set[threading.Thread] = set()
        self._lock = threading.Lock()
        # Entrance object -> its session, and when that was seen to be over.
        self._sessions: dict[str, BucketSession] = {}
        self._over_s: dict[str, float] = {}
        self._answers: deque[tuple[float, str]] = deque()
        # Version -> its payloads by the blocks that their receivers hold: b"" for learners of one host, who hold all.
        self._shared: OrderedDict[tuple[int, ...], dict[bytes, Shared]] = OrderedDict()
        self._numbers = 0
        # Held by no thread that waits: versions come from the driver, and cuts from the thread that cuts.
        self._sharing = threading.Lock()
        self._closing = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._watch, name="diloco-bucket", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        return self._term.lost

    @property
    def requests(self) -> dict[str, int]:
        return self._bucket.store.requests.as_dict()

    def abandon(self) -> None:
        self._abandoned = True

    def send_version(self, peer: str, message: GlobalFragment, version: Version) -> bool:
        """Queue a version as `send` does; its payload is written once for all who get equal bytes."""
        session = self._heard.get(peer)
        if not isinstance(session, BucketSession) or self._book.hosts_of(session) is not None:
            return super().send_version(peer, message, version)

        def parts() -> tuple[memoryview, ...]:
            return payload_parts(message, version.payload, SYNCER_TYPES, self.config.payload_bytes_max)

        try:
            session.send(message, (), self._share(message, b"", parts))
        except LinkClosed:
            return False
        return True

    def _share(
        self, message: GlobalFragment, blocks: bytes, make_parts: Callable[[], tuple[memoryview, ...]]
    ) -> Shared:
        """Return the object of a version for one more receiver with these blocks, held for its message.

        A version and the blocks determine the payload, so nothing has to be read or compared to find equal bytes.
        """
        key = message.fragment_id, message.version, message.base, message.epoch
        with self._sharing:
            shared = self._shared.get(key, {}).get(blocks)
            if shared is not None:
                shared.hold()
                return shared
        # This may copy. Only one thread makes the payload of a key: the driver without blocks, the one that cuts else.
        parts = make_parts()
        with self._sharing:
            self._numbers += 1
            shared = Shared(self._bucket, self._epoch, self._numbers, parts)
            shared.hold()
            self._shared.setdefault(key, {})[blocks] = shared
            over = [self._shared.popitem(last=False)[1] for _ in range(len(self._shared) - SHARED_MAX)]
        for each in over:
            for old in each.values():
                self._later(old.release)
        return shared

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, end all sessions, and delete what this epoch has left."""
        if self._closing.is_set():
            return
        until_s = time.monotonic() + grace_s
        sessions = [each for each in self.stop_admitting() if isinstance(each, BucketSession)]
        self._cutting.shutdown(wait=True)
        for session in sessions:
            session.retire("closed by the syncer", grace_s)
        with self._lock:
            known = list(self._sessions.values())
        for session in known:
            session.written.wait(max(0.0, until_s - time.monotonic()))
        for session in sessions:
            # Its learner has read everything then, and writes nothing more.
            session.parted.wait(max(0.0, until_s - time.monotonic()))
        self._closing.set()
        for thread in (self._thread, *self._handling):
            thread.join(max(0.1, until_s - time.monotonic()))
        self._term.close(max(0.1, until_s - time.monotonic()))
        if not self._abandoned:
            with contextlib.suppress(StoreError):
                self._sweep()

    def _sweep(self) -> None:
        """Delete all objects of this epoch and of earlier ones, the claim to lead last."""
        self._delete_epochs(self._epoch)
        # Objects that are not ours are none of our business.
        leaders = [key for key in self._bucket.store.list(names.LEADER) if names.epoch_of(key) >= 0]
        if not any(names.epoch_of(key) > self._epoch for key in leaders):
            self._bucket.store.delete([*leaders, names.alive(self._epoch)])
        self._bucket.tidy()

    def _delete_epochs(self, last: int, leaders_before: int = 0) -> None:
        """Delete the objects of all sessions until an epoch, and the claims to lead before another one."""
        for prefix, end in (("e/", last + 1), (names.LEADER, leaders_before), ("alive/", leaders_before)):
            before: list[str] = []
            while (
                found := [key for key in self._bucket.store.list(prefix) if 0 <= names.epoch_of(key) < end]
            ) != before:
                self._bucket.store.delete(found)
                before = found

    def _watch(self) -> None:
        """List the entrance until the listener closes; the body of its thread."""
        trouble = ""
        with contextlib.suppress(StoreError):
            self._delete_epochs(self._epoch - 1, self._epoch)
        while not (self._closing.is_set() or self._term.lost):
            try:
                self._look()
                self._clean()
                trouble = ""
            except StoreError as error:
                if not trouble:
                    log.warning(f"the bucket does not answer, trying again: {error}")
                trouble = str(error)
            # A thread that ended silently would leave a syncer that nobody can reach.
            except Exception:
                log.exception("an error at the entrance of the bucket; trying again")
            self._closing.wait(self.config.poll_s)

    def _look(self) -> None:
        """Handle what is new at the entrance."""
        self._handling = {each for each in self._handling if each.is_alive()}
        listed = self._bucket.store.list(self._entrance, LISTED_MAX)
        self._seen &= set(listed)
        known = tuple(f"{self._entrance}{word}" for word in WORDS)
        if foreign := [key for key in listed if not key.startswith(known)]:
            self._report(f"{len(foreign)} objects, such as {foreign[0]}, ask for nothing")
            self._bucket.store.delete(foreign)
        for key in (key for key in listed if key.startswith(known)):
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
            if content is None:
                # Its writer has given up, or the store does not show it yet.
                self._seen.discard(key)
            elif word.startswith(names.ASK):
                self._answer(key, word.removeprefix(names.ASK), pb.Question.FromString(content))
            else:
                header = pb.Header.FromString(content)
                subscribes = word.startswith(names.FOLLOW)
                name = word.removeprefix(names.FOLLOW if subscribes else names.HELLO)
                if not names.names_session(name, header):
                    raise ValueError(f"{key} does not name its session")
                self._admit(key, name, header, subscribes=subscribes)
        except (ValueError, DecodeError) as error:
            self._report(str(error))
            self._bucket.discard([key])
        except StoreError as error:
            log.info(f"a request waits: {error}")
            self._seen.discard(key)
        # The request is lost, and its sender tries again.
        except Exception:
            log.exception(f"an error with {key} at the entrance of the bucket")

    def _report(self, problem: str) -> None:
        if self._reported < REPORTED_MAX:
            self._reported += 1
            log.warning(f"an object at the entrance of the bucket is not used, and deleted: {clean(problem, 300)}")

    def _admit(self, key: str, name: str, header: pb.Header, *, subscribes: bool) -> None:
        """Open the session that a header asks for, or tell its learner why there is none."""
        book = self._subscribers if subscribes else self._book
        make = partial(self._make, name, header, subscribes=subscribes)
        try:
            self._check_size(header, subscribes=subscribes)
            session = book.admit(header, make)
            with self._lock:
                # A request that a listing shows again.
                if not isinstance(session, BucketSession) or self._sessions.get(key) is session:
                    return
                if session in self._sessions.values():
                    raise Refused(f"another process of {header.sender!r} has the same session", final=False)
                self._sessions[key] = session
            book.establish(session)
            session.start(pb.Entry(frame=wire.ready_head()))
        except Refused as error:
            log.info(f"refused {header.sender}: {error}")
            refused = make()
            refused.refuse(str(error), final=error.final)
            with self._lock:
                self._sessions[key] = refused

    def _check_size(self, header: pb.Header, *, subscribes: bool) -> None:
        if header.hosts > HOSTS_MAX or header.host >= max(1, header.hosts) or (subscribes and header.hosts):
            raise Refused(f"{header.sender!r} has host {header.host} of {header.hosts}: use at most {HOSTS_MAX}")
        most = self.config.connections_max
        if sum(each.open for each in list(self._sessions.values())) >= most:
            raise Refused(f"{most} sessions are open: stop one, or raise transport.connections_max", final=False)

    def _make(self, name: str, header: pb.Header, *, subscribes: bool) -> BucketSession:
        place = StreamPlace(self._bucket, self._epoch, names.session(self._epoch, name))
        config, readable, peer = self.config, HOST_TYPES if header.host else LEARNER_TYPES, ""
        if subscribes:
            # It requests one value at a time, so values that wait are those of one that does not read what it requests.
            config, readable = replace(config, queue_payloads_max=1), SUBSCRIBER_TYPES
            peer = f"{SUBSCRIBER}{header.sender}"
        return BucketSession(self._inbox, header, config, place, readable, serves=True, name=peer, share=self._share)

    def _answer(self, key: str, number: str, question: pb.Question) -> None:
        where, answer = names.answer(self._epoch, number), self._reply(question).SerializeToString()
        # The question is not handled again, because an operator's request must not be done twice.
        while not self._closing.is_set():
            try:
                self._bucket.write(where, answer)
                break
            except StoreError as error:
                log.info(f"an answer waits: {error}")
                self._closing.wait(self.config.poll_s)
        self._answers.append((time.monotonic(), where))
        self._bucket.discard([key])

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
        self._bucket.tidy()
        now_s, linger_s = time.monotonic(), max(LINGER_S, 10 * self.config.poll_s)
        while self._answers and self._answers[0][0] < now_s - linger_s:
            self._bucket.discard([self._answers.popleft()[1]])
        with self._lock:
            known = list(self._sessions.items())
        for key, session in known:
            if session.open or not session.written.is_set():
                continue
            # Its learner reads and writes nothing more once it has said goodbye.
            since_s = self._over_s.setdefault(key, now_s)
            if session.parted.is_set() or now_s - since_s > linger_s:
                self._bucket.delete_below(session.place.prefix)
                self._bucket.store.delete([key])
                with self._lock:
                    del self._sessions[key]
                del self._over_s[key]


def _reply(reply: pb.StatusReply | pb.DescribeReply | pb.DrainReply) -> pb.Answer:
    return pb.Answer(reply=reply.SerializeToString())
