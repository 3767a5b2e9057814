"""The syncer's answers to `diloco doctor`: true, bounded, one at a time, for nobody without credentials."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.doctor.probing import greet, measure
from diloco_jax.transport import probe
from diloco_jax.transport.grpc_link import GrpcListener
from diloco_jax.transport.link import TransportConfig, TransportError
from tests.transport.ends import WAIT_S, Ends, comes_true

pytestmark = pytest.mark.net


@pytest.fixture
def listener(ends: Ends) -> GrpcListener:
    return ends.listen(shards=[":7001", ":7002"])


def config_of(listener: GrpcListener, **changes: Any) -> TransportConfig:
    return replace(TransportConfig(address=listener.address, connect_timeout_s=WAIT_S, stripes=2), **changes)


def test_greeting_says_run_versions_shards_and_time(listener: GrpcListener) -> None:
    greeting = greet(config_of(listener), "island-0")
    assert (greeting.run_id, greeting.sessions, greeting.shards) == ("run", 0, ("127.0.0.1:7001", "127.0.0.1:7002"))
    assert greeting.versions == probe.versions() and greeting.versions["python"]
    assert 0 < greeting.rtt_s < WAIT_S and greeting.skew_error_s == greeting.rtt_s / 2
    assert abs(greeting.skew_s) <= greeting.skew_error_s  # the clocks are one clock


def test_skew_of_a_clock_is_seen_through_a_slow_link(listener: GrpcListener, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(time=lambda: time.time() + 100.0, monotonic=time.monotonic)
    monkeypatch.setattr(probe, "time", ahead)
    with Relay(listener.address) as relay:
        relay.change("up", delay_s=0.05)  # all on one way: the worst case for the estimate
        greeting = greet(config_of(listener, address=relay.address), "island-0")
    assert greeting.rtt_s >= 0.05
    assert abs(greeting.skew_s - 100.0) <= greeting.skew_error_s + 1e-3


@pytest.mark.parametrize("direction", ["up", "down"])
def test_rate_is_that_of_the_link(listener: GrpcListener, direction: Literal["up", "down"]) -> None:
    with Relay(listener.address) as relay:
        relay.change(bytes_per_s=500_000.0)  # of each connection
        found = measure(config_of(listener, address=relay.address), "island-0", direction, 1.0)
    assert 200_000 < found.bytes_per_s < 4_000_000  # 1,000,000, and a loaded machine


def test_bytes_are_bounded_and_fewer_beside_learners(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "IDLE_BYTES_MAX", 8 << 20)
    monkeypatch.setattr(probe, "RUN_BYTES_MAX", 1 << 20)
    idle = [measure(config_of(listener), "island-0", way, 9.0).moved_bytes for way in ("up", "down")]
    assert all(4 << 20 < moved <= 9 << 20 for moved in idle), idle
    ends.connect("island-1")
    busy = [measure(config_of(listener), "island-0", way, 9.0).moved_bytes for way in ("up", "down")]
    assert all(1 << 18 < moved <= 2 << 20 for moved in busy), busy
    assert greet(config_of(listener), "island-0").sessions == 1


def test_one_measurement_at_a_time(listener: GrpcListener) -> None:
    with Relay(listener.address) as relay:
        relay.change(bytes_per_s=100_000.0)
        slow = config_of(listener, address=relay.address)
        other = threading.Thread(target=measure, args=(slow, "island-0", "down", 1.5))
        other.start()
        assert comes_true(lambda: relay.counts.down_bytes > 50_000)
        with pytest.raises(TransportError, match="refused: somebody else measures at this moment: try again later"):
            measure(config_of(listener), "island-1", "down", 0.1)
        assert greet(config_of(listener), "island-1").run_id == "run"  # a ping disturbs nobody
        other.join()

    def place_is_free() -> bool:  # when the syncer has noticed
        with contextlib.suppress(TransportError):
            return measure(config_of(listener), "island-1", "down", 0.2).moved_bytes > 0
        return False

    assert comes_true(place_is_free)


def test_nobody_without_the_token_is_answered(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    listener = ends.listen(token_file=str(tmp_path / "token"))
    for ask in (lambda c: greet(c, "island-0"), lambda c: measure(c, "island-0", "up", 0.1)):
        with pytest.raises(TransportError, match="refused: the token was not sent"):
            ask(config_of(listener))
