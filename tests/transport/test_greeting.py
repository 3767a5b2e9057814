"""The first words between a loop of a user's own and a syncer, over the real transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from diloco_jax.transport import greeting
from diloco_jax.transport.greeting import Description, ModelDesk, ask_description, offer_model
from diloco_jax.transport.grpc_link import listen
from diloco_jax.transport.link import TransportConfig, TransportError

pytestmark = pytest.mark.net
SIZES = {"three": 12, "large": 3 << 20}


def measure(layout: str) -> int:
    if layout not in SIZES:
        raise ValueError(f"{layout!r} is no model")
    return SIZES[layout]


@pytest.fixture
def desk() -> Iterator[ModelDesk]:
    made = ModelDesk(TransportConfig(), Description("name: x", ""), measure)
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


@pytest.mark.parametrize(
    ("layout", "size", "words"),
    [("cube", 12, "'cube' is no model"), ("three", 11, "11 of 12 bytes came"), ("three", 13, "more than the 12 bytes")],
)
def test_what_does_not_fit_is_not_taken(desk: ModelDesk, layout: str, size: int, words: str) -> None:
    assert words in offer_model(at(desk), "a", layout, values(size))
    assert desk.take(0.0) is None
    assert offer_model(at(desk), "a", "three", values(12)) == ""  # the desk is free again


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
