"""The learner's side of a bucket: it asks the newest syncer for a session, and waits for the answer."""

import time

from diloco_jax.protocol.messages import HostBlocks, LearnerMessage, MetricsReport
from diloco_jax.transport.bucket.session import BucketSession
from diloco_jax.transport.bucket.stream import StreamPlace
from diloco_jax.transport.link import (
    HOST_TYPES,
    LEARNER_TYPES,
    SUBSCRIBER_TYPES,
    SYNCER_TYPES,
    TO_HOST_TYPES,
    Delivery,
    Payload,
    Rejected,
    TransportConfig,
    TransportError,
    check_name,
    payload_parts,
)
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.inbox import Inbox
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.requests import await_leader
from diloco_jax.transport.store.store import Requests, StoreError


class BucketLink:
    """A learner's or a subscriber's session with a syncer through a bucket, opened by `connect_in_bucket`."""

    def __init__(self, session: BucketSession, sends: tuple[type, ...]) -> None:
        self._session = session
        self._sends = sends
        self.number = session.header.session

    @property
    def open(self) -> bool:
        return self._session.open

    @property
    def receiving(self) -> bool:
        return self._session.receiving

    def wake(self) -> None:
        """Make a waiting `receive` return None at once; any thread may call it."""
        self._session.inbox.wake()

    def send(self, message: LearnerMessage | MetricsReport | HostBlocks, payload: Payload = b"") -> None:
        allowed = HOST_TYPES if self._session.host else self._sends
        self._session.send(message, payload_parts(message, payload, allowed, self._session.config.payload_bytes_max))

    def receive(self, timeout_s: float) -> Delivery | None:
        item = self._session.inbox.get(timeout_s)
        return None if item is None else item[1]

    def close(self, grace_s: float = 5.0) -> None:
        self._session.retire("closed by the learner", grace_s)
        self._session.written.wait(grace_s)


def connect_in_bucket(
    config: TransportConfig,
    *,
    run_id: str,
    epoch: int = 0,
    learner_id: str,
    incarnation: int,
    number: int = 0,
    host: int = 0,
    hosts: int = 1,
    subscribes: bool = False,
    run: str = "",
    requests: Requests | None = None,
) -> BucketLink:
    """Open a session with the newest syncer in a bucket; arguments and errors are those of `grpc_link.connect`.

    Args:
        requests: Counts that get the requests of this session, too.
    """
    until_s = time.monotonic() + config.connect_timeout_s
    bucket = Bucket(config, requests)
    number = number or time.monotonic_ns()
    header = pb.Header(run_id=run_id, epoch=epoch, sender=check_name(learner_id), incarnation=incarnation)
    header.session, header.stripes, header.lane, header.run = number, 1, pb.LANE_CONTROL, run
    header.host, header.hosts = host, hosts if hosts > 1 else 0
    name = names.session_name(header)
    leader = await_leader(bucket, until_s)

    def superseded() -> bool:
        newest = bucket.leader()
        return newest is not None and newest.epoch > leader.epoch

    session = BucketSession(
        Inbox(),
        header,
        config,
        StreamPlace(bucket, leader.epoch, names.session(leader.epoch, name)),
        TO_HOST_TYPES if host else SYNCER_TYPES,
        serves=False,
        superseded=superseded,
    )
    word = names.FOLLOW if subscribes else names.HELLO
    key = f"{names.entrance(leader.epoch)}{word}{name}"
    try:
        bucket.create(key, header.SerializeToString(), until_s)
    except StoreError:
        bucket.discard([key])
        raise
    session.start()
    if session.wait_ready(max(0.1, until_s - time.monotonic())):
        return BucketLink(session, SUBSCRIBER_TYPES if subscribes else LEARNER_TYPES)
    answered, reason = not session.open, session.reason
    session.fail("not connected")
    # The syncer may have ended, and a later one looks elsewhere.
    bucket.discard([key])
    if answered:
        refusal = f"the syncer at {config.address} refused {learner_id!r}: {reason}"
        raise (Rejected if session.final else TransportError)(refusal)
    raise TransportError(
        f"the syncer of epoch {leader.epoch} at {config.address} did not answer within {config.connect_timeout_s:g} s: "
        "see whether it still runs (`diloco status`), or raise transport.connect_timeout_s"
    )
