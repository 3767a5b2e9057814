"""The first exchange between a user's training loop and a syncer: the run's config, and its model.

The loop requests the run's config and the layout of its model (`ask_description`). While the run has no model, the
first loop sends layout and initial values (`offer_model`); every later loop gets that layout and compares it with its
own. The listener bounds everything before it allocates memory: the layout by LAYOUT_BYTES_MAX, the values by the layout
and by the config's limit of parameters.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.link import TransportConfig, check_name
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.calls import (
    DRAIN,
    OPERATE,
    SERVICE,
    STATUS,
    ask,
    failure,
    open_channel,
    open_server,
    refusing,
    serialized,
    unanswered,
)
from diloco_jax.transport.session.description import DESCRIBE, Description
from diloco_jax.transport.session.stream import REFUSAL
from diloco_jax.transport.trust.security import Gate, credentials, diagnose

OFFER = "Offer"
LAYOUT_BYTES_MAX = 2 << 20
VALUES_BYTES = 1 << 20  # per message
# A caller that sends less than VALUES_BYTES in this time, and no last message, is cut off.
STALL_S = 60.0
BUSY, TOO_LATE = "another learner brings the model", "another learner has brought the model"

log = logging.getLogger(__name__)


class ModelOffer(NamedTuple):
    """The model that a learner sent: its sender, its layout, the bytes of its initial values, and when they arrived."""

    learner_id: str
    layout: str
    values: bytearray
    # On the monotonic clock.
    arrived_s: float


def ask_description(config: TransportConfig, learner_id: str, *, numbered: bool = False) -> Description:
    """Return the description of the run at `config.address`, with this learner's number if wanted; raises as `ask`."""
    request = pb.DescribeRequest(learner_id=learner_id if numbered else "").SerializeToString()
    reply: pb.DescribeReply = ask(config, DESCRIBE, request, pb.DescribeReply.FromString, check_name(learner_id))
    return Description(reply.config, reply.layout, reply.coming, reply.number, reply.began_unix_s)


def offer_model(config: TransportConfig, learner_id: str, layout: str, values: Iterable[memoryview]) -> str:
    """Send the model of a run that has none; return why the syncer did not take it, "" if it did.

    Args:
        values: Bytes of its tensors, read twice.

    Raises:
        TransportError: The syncer cannot be reached, or refused.
    """
    own, pieces = credentials(config, learner_id), list(values)

    def requests() -> Iterator[bytes]:
        yield pb.OfferRequest(learner_id=learner_id, layout=layout, digest=digest(pieces)).SerializeToString()
        for piece in pieces:
            for start in range(0, piece.nbytes, VALUES_BYTES):
                yield pb.OfferRequest(values=bytes(piece[start : start + VALUES_BYTES])).SerializeToString()

    with open_channel(config, own) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{OFFER}", response_deserializer=pb.OfferReply.FromString)
        try:
            # A large model takes its time, so only the wait for the syncer has a limit.
            grpc.channel_ready_future(channel).result(config.connect_timeout_s)
            reply = call(requests(), metadata=own.metadata)
        except grpc.FutureTimeoutError:
            raise unanswered(config, diagnose(config, learner_id)) from None
        except grpc.RpcError as error:
            raise failure(config, error, learner_id) from None
    return "" if reply.taken else clean(reply.message, REASON_LENGTH_MAX) or "no reason was given"


class DescriptionDesk:
    """Service for the method DESCRIBE of one listener; `coming` tells whether a learner sends the run's model."""

    def __init__(self, gate: Gate, coming: Callable[[], bool] = lambda: False) -> None:
        # The driver of the listener sets the answer.
        self.description = Description("", "")
        # The driver's function from a learner's name to its number; any thread of the listener calls it.
        self.number_of: Callable[[str], int] = lambda _: 0
        self._gate = gate
        self._coming = coming

    def serve(self, request: bytes, context: Any) -> pb.DescribeReply:
        """Answer one call."""
        number = 0
        try:
            with refusing(context):
                self._gate.check(dict(context.invocation_metadata()))
                if learner_id := pb.DescribeRequest.FromString(request).learner_id:
                    self._gate.check_speaks_for(check_name(learner_id), context.auth_context())
                    number = self.number_of(learner_id)
        except (DecodeError, ValueError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self.description._replace(coming=self._coming(), number=number).reply()


class ModelDesk:
    """Listener of a run without a model; it takes the first model that a learner offers.

    Args:
        measure: Returns the size of a layout's values in bytes; ValueError for a layout that this run cannot take.

    Attributes:
        address: Address for learners, with the real port.

    Raises:
        ValueError: This machine cannot listen there.
    """

    def __init__(self, config: TransportConfig, description: Description, measure: Callable[[str], int]) -> None:
        own = credentials(config, SYNCER)
        self._gate = Gate(encrypted=config.encrypted, token=own.token)
        self._measure = measure
        self._busy = threading.Lock()
        self._taken = threading.Event()
        self._offer: ModelOffer | None = None
        # The learner that sends the model, or sent it, the size in bytes, and when it began or was complete.
        self._sender, self._size, self._since_s = "", 0, 0.0
        desk = DescriptionDesk(self._gate, lambda: self._busy.locked() or self._taken.is_set())
        desk.description = description
        handlers = {
            DESCRIBE: grpc.unary_unary_rpc_method_handler(desk.serve, response_serializer=serialized),
            OFFER: grpc.stream_unary_rpc_method_handler(self._serve, response_serializer=serialized),
            STATUS: grpc.unary_unary_rpc_method_handler(self._refuse_for_now),
            DRAIN: grpc.unary_unary_rpc_method_handler(self._refuse_for_now),
            OPERATE: grpc.unary_unary_rpc_method_handler(self._refuse_for_now),
        }
        self._server, self.address = open_server(config, SERVICE, handlers, own.server)

    def take(self, timeout_s: float) -> ModelOffer | None:
        """Return the model once it is complete, and forget it; None after `timeout_s` seconds."""
        self._taken.wait(timeout_s)
        offer, self._offer = self._offer, None
        return offer

    @property
    def describe_wait(self) -> str:
        """Return why the run has not started, as a text that follows the name of the syncer."""
        what = f"{self._size / 1e6:,.1f} MB, for {time.monotonic() - self._since_s:.0f} s"
        if self._taken.is_set():
            return f"loads the model that {self._sender} sent ({what})"
        if self._sender:
            return f"has no model yet: it receives that of {self._sender} ({what})"
        return "has no model yet: it waits for the first island"

    def _refuse_for_now(self, request: bytes, context: Any) -> bytes:
        """Answer a request that needs a run with the reason why there is none yet."""
        del request
        with refusing(context):
            self._gate.check(dict(context.invocation_metadata()))
        context.abort(REFUSAL, f"the syncer {self.describe_wait}")
        return b""

    def close(self) -> None:
        """Send the last answer, and free the port."""
        self._server.stop(1.0).wait(2.0)

    def _serve(self, requests: Iterator[bytes], context: Any) -> pb.OfferReply:
        try:
            with refusing(context):
                self._gate.check(dict(context.invocation_metadata()))
                heard_s = [time.monotonic()]
                context.add_callback(watch_silence(context.cancel, heard_s))
                first = pb.OfferRequest.FromString(next(requests, b""))
                self._gate.check_speaks_for(check_name(first.learner_id), context.auth_context())
        except (DecodeError, ValueError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._busy.acquire(blocking=False):
            return pb.OfferReply(message=BUSY)
        try:
            if self._taken.is_set():
                return pb.OfferReply(message=TOO_LATE)
            size = self._measure(first.layout)
            self._sender, self._size, self._since_s = first.learner_id, size, time.monotonic()
            log.info(f"{first.learner_id} sends the run's model, {size / 1e6:,.1f} MB")
            values, filled, counted = bytearray(size), 0, 0
            heard_s[0] = time.monotonic()
            for raw in requests:
                piece = pb.OfferRequest.FromString(raw).values
                if filled + len(piece) > size:
                    return pb.OfferReply(message=f"more than the {size} bytes came that the layout says")
                values[filled : filled + len(piece)] = piece
                filled += len(piece)
                # Small messages alone do not show progress: one byte at a time would keep all other models waiting.
                if filled >= counted + VALUES_BYTES:
                    counted, heard_s[0] = filled, time.monotonic()
            if filled < size or digest(values) != first.digest:
                return pb.OfferReply(message=f"{filled} of {size} bytes came, or they are damaged")
            began_s, self._since_s = self._since_s, time.monotonic()
            log.info(f"the model of {first.learner_id} has arrived in {self._since_s - began_s:.1f} s")
            self._offer = ModelOffer(first.learner_id, first.layout, values, self._since_s)
            self._taken.set()
            return pb.OfferReply(taken=True)
        except (DecodeError, ValueError) as error:
            return pb.OfferReply(message=str(error))
        finally:
            if not self._taken.is_set():
                self._sender = ""
            self._busy.release()


def watch_silence(cancel: Callable[[], object], heard_s: list[float]) -> Callable[[], None]:
    """Cut off a caller whose last progress, at monotonic time `heard_s[0]`, is STALL_S old.

    Returns:
        A function that ends the watch.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(STALL_S / 4):
            if time.monotonic() > heard_s[0] + STALL_S:
                cancel()
                return

    threading.Thread(target=look, name="diloco-offer", daemon=True).start()
    return over.set
