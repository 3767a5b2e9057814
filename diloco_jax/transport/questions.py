"""Questions of anybody with good credentials to a syncer: its status, and that it drain a learner."""

from collections.abc import Callable
from typing import Any

import grpc

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.transport.calls import DRAIN, SERVICE, STATUS, open_channel, unanswered
from diloco_jax.transport.link import TransportConfig, TransportError, check_name
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.stream import DENIALS
from diloco_jax.transport.trust.security import credentials, diagnose


def ask_status(config: TransportConfig) -> str:
    """Return the status that the syncer at `config.address` last gave out, as JSON.

    Raises:
        TransportError: Nobody answered in time, or our credentials do not do.
        ValueError: Our own certificate, key or token cannot be used, or the address is not loopback and plaintext was
            not allowed.
    """
    reply: pb.StatusReply = ask(config, STATUS, b"", pb.StatusReply.FromString)
    return reply.json


def ask_drain(config: TransportConfig, learner_id: str) -> tuple[bool, str]:
    """Ask the syncer at `config.address` to let a learner leave; whether it does, and its words.

    Raises:
        TransportError: Nobody answered in time, or our credentials do not do.
        ValueError: As for `ask_status`, or the name cannot be that of a learner.
    """
    request = pb.DrainRequest(learner_id=check_name(learner_id)).SerializeToString()
    reply: pb.DrainReply = ask(config, DRAIN, request, pb.DrainReply.FromString)
    return reply.ok, reply.message


def ask(config: TransportConfig, method: str, request: bytes, read: Callable[[bytes], Any], name: str = SYNCER) -> Any:
    """Return the answer of the syncer at `config.address` to one question.

    Args:
        request: the question's bytes.
        read: makes the answer of its bytes.
        name: who asks; it stands for "{name}" in the files of the config.

    Raises:
        TransportError: Nobody answered in time, or our credentials do not do.
        ValueError: Our own certificate, key or token cannot be used.
    """
    own = credentials(config, name, owner=False)
    with open_channel(config, own) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", response_deserializer=read)
        try:
            return call(request, timeout=config.connect_timeout_s, wait_for_ready=True, metadata=own.metadata)
        except grpc.RpcError as error:
            raise failure(config, error, name) from None


def failure(config: TransportConfig, error: Exception, name: str) -> TransportError:
    """Return the error that says to people why a question got no answer."""
    if not isinstance(error, grpc.Call):
        return TransportError(f"the syncer at {config.address} ended the call without an answer")
    if error.code() in DENIALS:
        return TransportError(f"the syncer at {config.address} refused: {error.details()}")
    if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
        answer = f"{error.code().name}: {error.details()}"
        return TransportError(f"the syncer at {config.address} did not answer but with {answer}")
    return unanswered(config, diagnose(config, name))
