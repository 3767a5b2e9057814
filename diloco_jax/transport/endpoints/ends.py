"""The two ends of a connection, whatever it goes through: gRPC for host:port, objects for a bucket."""

from diloco_jax.transport.bucket.link import BucketLink, connect_in_bucket
from diloco_jax.transport.bucket.listener import BucketListener
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.endpoints.grpc_link import GrpcLink
from diloco_jax.transport.link import TransportConfig, bucket_scheme
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.session.listener import Listener
from diloco_jax.transport.store.store import Requests
from diloco_jax.transport.store.term import Term

AnyLink = GrpcLink | BucketLink


def connect(
    config: TransportConfig,
    *,
    run_id: str,
    epoch: int = 0,
    learner_id: str,
    incarnation: int,
    partials: Partials | None = None,
    number: int = 0,
    host: int = 0,
    hosts: int = 1,
    subscribes: bool = False,
    run: str = "",
    requests: Requests | None = None,
) -> AnyLink:
    """Open a session with the syncer at `config.address`; arguments and errors are those of `grpc_link.connect`.

    Args:
        requests: Counts that get the requests to a bucket, too.
    """
    names = {"run_id": run_id, "epoch": epoch, "learner_id": learner_id, "incarnation": incarnation}
    which = {"number": number, "host": host, "hosts": hosts, "subscribes": subscribes, "run": run}
    if bucket_scheme(config.address):
        # An object is written as a whole, so there are no incomplete payloads.
        return connect_in_bucket(config, requests=requests, **names, **which)  # type: ignore[arg-type]
    return grpc_link.connect(config, partials=partials, **names, **which)  # type: ignore[arg-type]


def listen(
    config: TransportConfig,
    *,
    run_id: str,
    epoch: int = 0,
    subscribers_max: int = 0,
    run: str = "",
    term: Term | None = None,
) -> Listener:
    """Open the syncer's side at `config.address`.

    Args:
        subscribers_max: The most subscribers at a time.
        term: The leadership of this process in the bucket, if it has claimed the run already.

    Raises:
        ValueError: The port is in use, the bucket has another syncer, or the address is not allowed.
    """
    if bucket_scheme(config.address):
        return BucketListener(config, run_id, epoch, subscribers_max, run, term)
    return grpc_link.listen(config, run_id=run_id, epoch=epoch, subscribers_max=subscribers_max, run=run)
