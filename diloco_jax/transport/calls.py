"""What the gRPC calls of both sides share: their names, options, metadata and errors.

Metadata come before anything else and are small, so they are read with their own limits, before a session exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from diloco_jax.transport import wire
from diloco_jax.transport.link import TransportConfig, TransportError, check_name
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.security import Credentials, is_loopback
from diloco_jax.transport.sessions import Refused
from diloco_jax.transport.stream import LANES

SERVICE, CONNECT, STATUS, DRAIN = "diloco.v1.Syncer", "Connect", "Status", "Drain"
HEADER_KEY = "diloco-header-bin"
HEADER_BYTES_MAX = 1024
METADATA_BYTES_MAX = 16 << 10  # header and token, in the encoding of HTTP/2


def channel_options(config: TransportConfig) -> list[tuple[str, int]]:
    """Channel options of both sides. gRPC ignores a name that it does not know, so a typing error here is silent."""
    return [
        ("grpc.max_receive_message_length", wire.FRAME_BYTES_MAX),
        ("grpc.max_send_message_length", wire.FRAME_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.lookahead_bytes", 16 << 20),  # else one connection needs a gigabyte to fill a 60 ms link
    ]


def open_channel(config: TransportConfig, own: Credentials) -> grpc.Channel:
    """Return a channel to the syncer with a connection of its own."""
    options: list[tuple[str, int | str]] = [
        *channel_options(config),
        *own.options,
        ("grpc.use_local_subchannel_pool", 1),  # else both channels share one TCP connection
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", int(not is_loopback(config.address))),
    ]
    return grpc.secure_channel(config.address, own.channel, options)


def unanswered(config: TransportConfig, trouble: str) -> TransportError:
    """Return the error that says why nobody answered; `trouble` is what `diagnose` found out."""
    if trouble:
        return TransportError(f"no connection with the syncer at {config.address}: {trouble}")
    return TransportError(
        f"no syncer answered at {config.address} within {config.connect_timeout_s:g} s: start it, correct "
        "transport.address, or raise transport.connect_timeout_s"
    )


# ---- metadata -----------------------------------------------------------------------------------------------------


def header_metadata(header: pb.Header) -> tuple[str, bytes]:
    """Return the header as an item of a call's metadata.

    Raises:
        ValueError: The names in it are too long.
    """
    raw = header.SerializeToString()
    if len(raw) > HEADER_BYTES_MAX:
        raise ValueError(f"the names of run and learner take {len(raw)} bytes, the limit is {HEADER_BYTES_MAX}")
    return HEADER_KEY, raw


def call_metadata(context: Any) -> dict[str, str | bytes]:
    """Return the metadata of a call that came in."""
    return dict(context.invocation_metadata())


def read_header(metadata: Mapping[str, str | bytes]) -> tuple[pb.Header, str]:
    """Return the header that a call's metadata announce, and the name of its lane.

    Raises:
        Refused: There is none, it is too large, or it cannot be read.
    """
    raw = metadata.get(HEADER_KEY, b"")
    try:
        header = pb.Header.FromString(raw if isinstance(raw, bytes) and len(raw) <= HEADER_BYTES_MAX else b"")
    except DecodeError:
        header = pb.Header()
    names = {number: name for name, number in LANES.items()}
    if header.lane not in names:
        raise Refused(f"the call's {HEADER_KEY} metadata names no lane")
    return header, names[header.lane]


def read_drain_request(raw: bytes) -> str:
    """Return the name of the learner that is to leave.

    Raises:
        ValueError: The request cannot be read, or the name cannot be that of a learner.
    """
    try:
        return check_name(pb.DrainRequest.FromString(raw).learner_id)
    except DecodeError as error:
        raise ValueError(f"malformed request: {error}") from None
