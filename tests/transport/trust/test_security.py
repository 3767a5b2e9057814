"""Plaintext does not leave the machine by accident."""

from __future__ import annotations

import pytest

from diloco_jax.transport import grpc_link
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.trust.security import credentials, is_loopback


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:1", True),
        ("[::1]:50051", True),
        ("localhost:80", True),
        ("0.0.0.0:0", False),
        ("[::]:0", False),
        ("10.0.0.1:80", False),
        ("localhost.example.org:80", False),
    ],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_plaintext_needs_loopback_or_permission() -> None:
    public = TransportConfig(address="0.0.0.0:0")
    for use in (
        lambda: credentials(public, "a"),
        lambda: grpc_link.listen(public, run_id="r"),
        lambda: grpc_link.connect(public, run_id="r", learner_id="a", incarnation=0),
    ):
        with pytest.raises(ValueError, match=r"0\.0\.0\.0:0.*allow_plaintext"):
            use()
    assert credentials(TransportConfig(address="0.0.0.0:0", allow_plaintext=True), "a").server is not None
    assert credentials(TransportConfig(), "a").channel is not None
