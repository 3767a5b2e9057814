"""The one place that decides how a connection is protected.

Today that is plaintext, on loopback or by explicit permission. Certificates and tokens change this file only: the
transport asks for credentials and does not look inside.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

import grpc
import grpc.experimental

from diloco_jax.transport.link import TransportConfig, split_address


class Credentials(NamedTuple):
    """What gRPC needs to open a channel, and to open a port."""

    channel: grpc.ChannelCredentials
    server: grpc.ServerCredentials


def is_loopback(address: str) -> bool:
    """Tell whether "host:port" stays on this machine; a host name other than localhost counts as leaving it."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def credentials(config: TransportConfig) -> Credentials:
    """Return the credentials for `config.address`.

    Raises:
        ValueError: Plaintext would leave this machine and nobody allowed it.
    """
    if not (config.allow_plaintext or is_loopback(config.address)):
        raise ValueError(
            f"transport.address {config.address!r} is not loopback and nothing would be encrypted: set "
            "transport.allow_plaintext if you trust the network, or tunnel to a loopback address"
        )
    return Credentials(grpc.experimental.insecure_channel_credentials(), grpc.insecure_server_credentials())
