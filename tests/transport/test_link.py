"""Settings are checked once, with the value, the limit and the remedy in the error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from diloco_jax.transport.link import TransportConfig, split_address


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("address", "127.0.0.1", "'127.0.0.1': write host:port"),
        ("address", ":80", "write host:port"),
        ("address", "host:65536", "write host:port"),
        ("address", "host:http", "write host:port"),
        ("connect_timeout_s", 0.0, "transport.connect_timeout_s is 0.0: use a number of seconds above 0"),
        ("keepalive_s", math.inf, "keepalive_s is inf"),
        ("keepalive_timeout_s", math.nan, "keepalive_timeout_s is nan"),
        ("payload_bytes_max", 0, "payload_bytes_max is 0: use at least 1"),
        ("chunk_bytes", (4 << 20) + 1, "receivers take at most 4194304: lower it"),
        ("queue_messages_max", 0, "queue_messages_max is 0"),
        ("queue_payloads_max", -1, "queue_payloads_max is -1"),
        ("connections_max", 4, "connections_max is 4: one learner needs 5, one more than transport.stripes"),
        ("stripes", 0, "stripes is 0: use 1 to 16"),
        ("stripes", 17, "stripes is 17: use 1 to 16"),
        ("resume_s", 0.0, "resume_s is 0.0: use a number of seconds above 0"),
    ],
)
def test_bad_setting(field: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(TransportConfig(), **{field: value})


def test_split_address() -> None:
    assert split_address("[::1]:5") == ("::1", 5)
    assert split_address("syncer.example:50051") == ("syncer.example", 50051)
