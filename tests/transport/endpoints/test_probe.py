"""Requests before a run: those of `diloco doctor`, and the first ones of a loop of a user."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import numpy as np
import pytest

from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.doctor.probing import greet, measure
from diloco_jax.transport.endpoints import greeting, probe
from diloco_jax.transport.endpoints.greeting import ModelDesk, ask_description, offer_model
from diloco_jax.transport.endpoints.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.session.calls import SERVICE, ask_operator, ask_status, open_channel
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.session.operator_requests import ADMIT, DRAIN, OperatorRequest
from diloco_jax.transport.trust.security import credentials
from tests.limits import HANGS_S
from tests.transport.ends import Ends, comes_true

pytestmark = pytest.mark.net


@pytest.fixture
def listener(ends: Ends) -> GrpcListener:
    return ends.listen()


def config_of(listener: GrpcListener, **changes: Any) -> TransportConfig:
    return replace(TransportConfig(address=listener.address, connect_timeout_s=HANGS_S, stripes=2), **changes)


def test_greeting_says_run_versions_and_time(listener: GrpcListener) -> None:
    greeting = greet(config_of(listener), "island-0")
    assert (greeting.run_id, greeting.sessions) == ("run", 0)
    assert greeting.versions == probe.versions() and greeting.versions["python"]
    assert 0 < greeting.rtt_s < HANGS_S and greeting.skew_error_s == greeting.rtt_s / 2
    # Both sides read the same clock.
    assert abs(greeting.skew_s) <= greeting.skew_error_s


def test_skew_of_a_clock_is_seen_through_a_slow_link(listener: GrpcListener, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(time=lambda: time.time() + 100.0, monotonic=time.monotonic)
    monkeypatch.setattr(probe, "time", ahead)
    with Relay(listener.address) as relay:
        # All of the delay is on one way, the worst case for the estimate.
        relay.change("up", delay_s=0.05)
        greeting = greet(config_of(listener, address=relay.address), "island-0")
    assert greeting.rtt_s >= 0.05
    assert abs(greeting.skew_s - 100.0) <= greeting.skew_error_s + 1e-3


@pytest.mark.parametrize("direction", ["up", "down"])
def test_rate_is_that_of_the_link(listener: GrpcListener, direction: Literal["up", "down"]) -> None:
    with Relay(listener.address) as relay:
        relay.change(bytes_per_s=500_000.0)  # of each connection
        found = measure(config_of(listener, address=relay.address), "island-0", direction, 1.0)
    # The true rate is 1,000,000; the machine may be loaded.
    assert 200_000 < found.bytes_per_s < 4_000_000


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
        assert comes_true(lambda: relay.forwarded_bytes("down") > 50_000)
        with pytest.raises(TransportError, match="refused: somebody else measures at this moment: try again later"):
            measure(config_of(listener), "island-1", "down", 0.1)
        # A ping disturbs nobody.
        assert greet(config_of(listener), "island-1").run_id == "run"
        other.join()

    # The place is free when the syncer has noticed the end.
    def place_is_free() -> bool:
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


SIZES = {"three": 12, "large": 3 << 20}


def layout_bytes(layout: str) -> int:
    if layout not in SIZES:
        raise ValueError(f"{layout!r} is not a model")
    return SIZES[layout]


@pytest.fixture
def desk() -> Iterator[ModelDesk]:
    made = ModelDesk(TransportConfig(), Description("name: x", ""), layout_bytes)
    yield made
    made.close()


def at(desk: ModelDesk) -> TransportConfig:
    return TransportConfig(address=desk.address, connect_timeout_s=10.0)


def values(size: int) -> list[memoryview]:
    return [np.arange(size, dtype=np.uint8).data[: size // 3], np.arange(size, dtype=np.uint8).data[size // 3 :]]


def test_the_first_model_is_taken_whole_and_no_second_one(desk: ModelDesk) -> None:
    assert ask_description(at(desk), "a") == Description("name: x", "") and desk.take(0.0) is None
    assert offer_model(at(desk), "a", "large", values(SIZES["large"])) == ""
    offer = desk.take(5.0)
    assert offer is not None and offer.layout == "large"
    assert np.array_equal(np.frombuffer(offer.values, np.uint8), np.arange(SIZES["large"], dtype=np.uint8))
    assert "has brought the model" in offer_model(at(desk), "b", "three", values(12))


def test_a_syncer_without_a_model_refuses_other_calls_with_the_reason(desk: ModelDesk) -> None:
    with pytest.raises(TransportError, match=r"it has no model yet, or is of another release.*UNIMPLEMENTED"):
        greet(at(desk), "a")
    requests = [partial(ask_operator, request=OperatorRequest(action, "a")) for action in (DRAIN, ADMIT)]
    for ask in (ask_status, *requests):
        with pytest.raises(TransportError, match=r"the syncer has no model yet: it waits for the first island$"):
            ask(at(desk))
    assert offer_model(at(desk), "a", "large", values(SIZES["large"])) == ""
    with pytest.raises(TransportError, match=r"the syncer loads the model that a sent \(3.1 MB, for 0 s\)"):
        ask_status(at(desk))


@pytest.mark.parametrize(
    ("layout", "size", "words"),
    [
        ("cube", 12, "'cube' is not a model"),
        ("three", 11, "11 of 12 bytes came"),
        ("three", 13, "more than the 12 bytes"),
    ],
)
def test_what_does_not_fit_is_not_taken(desk: ModelDesk, layout: str, size: int, words: str) -> None:
    assert words in offer_model(at(desk), "a", layout, values(size))
    assert desk.take(0.0) is None
    # The desk is free again.
    assert offer_model(at(desk), "a", "three", values(12)) == ""


def test_damaged_values_are_not_taken(desk: ModelDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [np.arange(12, dtype=np.uint8).data]
    monkeypatch.setattr(greeting, "VALUES_BYTES", 5)
    original = greeting.pb.OfferRequest

    def damaging(**fields: object) -> object:
        if fields.get("values") == bytes(range(5, 10)):
            fields["values"] = b"\0" * 5
        return original(**fields)

    damaging.FromString = original.FromString  # type: ignore[attr-defined]
    monkeypatch.setattr(greeting.pb, "OfferRequest", damaging)
    assert "damaged" in offer_model(at(desk), "a", "three", pieces)


def test_a_token_is_asked_for_and_the_running_syncer_describes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    token = tmp_path / "token"
    token.write_text("secret")
    secured = TransportConfig(token_file=str(token))
    listener = listen(secured, run_id="run")
    try:
        listener.greeter.description = Description("name: run", "{}")
        asking = replace(secured, address=listener.address, connect_timeout_s=10.0)
        assert ask_description(asking, "a") == Description("name: run", "{}")
        with pytest.raises(TransportError, match="token"):
            ask_description(replace(asking, token_file=""), "a")
    finally:
        listener.close(0.0)


def test_a_model_that_trickles_does_not_keep_others_away(desk: ModelDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "STALL_S", 0.4)
    config, over = at(desk), threading.Event()

    def trickled() -> Iterator[bytes]:
        yield greeting.pb.OfferRequest(learner_id="slow", layout="large").SerializeToString()
        while not over.wait(0.02):
            yield greeting.pb.OfferRequest(values=b"x").SerializeToString()

    with open_channel(config, credentials(config, "slow")) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{greeting.OFFER}").future(trickled(), wait_for_ready=True)
        try:
            # The syncer ends the call, although a message comes every 20 ms.
            assert call.exception(30.0).code() is grpc.StatusCode.CANCELLED
        finally:
            over.set()
    assert offer_model(config, "a", "three", values(12)) == ""


def test_an_offer_ends_if_no_syncer_takes_it_within_the_limit() -> None:
    with socket.socket() as closed:
        # Nobody listens at this port.
        closed.bind(("127.0.0.1", 0))
        config = TransportConfig(address=f"127.0.0.1:{closed.getsockname()[1]}", connect_timeout_s=0.2)
        with pytest.raises(TransportError, match="no "):
            offer_model(config, "a", "three", values(12))
