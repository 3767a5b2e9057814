"""The moments at which the syncer exchanges the listener that waits for a model for that of the run."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from diloco_jax.core.kinds import kind_of
from diloco_jax.runtime.model.offered import layout_of
from diloco_jax.runtime.own_loop import introduce as subject
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.transport.greeting import Description
from diloco_jax.transport.link import TransportConfig, TransportError

KINDS = {"w": kind_of((3,))}
GONE = TransportError("the syncer did not answer but with UNIMPLEMENTED")


def test_a_loop_whose_model_comes_too_late_takes_that_of_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    none, model = Description(dump(RunConfig()), ""), Description(dump(RunConfig()), layout_of({"w": (3,)}, KINDS))
    answers = iter([none, GONE, none, model])

    def ask(*_: object) -> Description:
        answer = next(answers)
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def offer(*_: object) -> str:
        raise GONE

    monkeypatch.setattr(subject, "ask_description", ask)
    monkeypatch.setattr(subject, "offer_model", offer)
    monkeypatch.setattr(subject, "POLL_S", 0.0)
    transport = TransportConfig(address="127.0.0.1:1")
    assert subject.introduce(transport, "b", {"w": jnp.ones(3)}, KINDS).transport.address == "127.0.0.1:1"

    answers = iter([none, *[GONE] * 3])
    with pytest.raises(TransportError, match=r"no model yet: .*UNIMPLEMENTED"):
        subject.introduce(
            TransportConfig(address="127.0.0.1:1", connect_timeout_s=1e-9), "b", {"w": jnp.ones(3)}, KINDS
        )


def test_a_loop_brings_its_model_when_the_island_that_was_faster_dies_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, layout = dump(RunConfig()), layout_of({"w": (3,)}, KINDS)
    none, coming, model = Description(config, ""), Description(config, "", coming=True), Description(config, layout)
    described, replies = iter([none, none, coming, coming, none, model]), iter([subject.BUSY, ""])
    monkeypatch.setattr(subject, "ask_description", lambda *_: next(described))
    monkeypatch.setattr(subject, "offer_model", lambda *_: next(replies))
    monkeypatch.setattr(subject, "POLL_S", 0.0)
    transport = TransportConfig(address="127.0.0.1:1", connect_timeout_s=1e-9)  # but a model that comes is waited for
    subject.introduce(transport, "b", {"w": jnp.ones(3)}, KINDS)
    assert next(replies, None) is None


def test_a_model_that_the_run_cannot_take_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "ask_description", lambda *_: Description(dump(RunConfig()), ""))
    monkeypatch.setattr(subject, "offer_model", lambda *_: "the model has 3 parameters, the limit is 2")
    with pytest.raises(ValueError, match="cannot take this loop's model: the model has 3 parameters"):
        subject.introduce(TransportConfig(address="127.0.0.1:1"), "b", {"w": jnp.ones(3)}, KINDS)


def test_a_model_that_is_not_finite_is_not_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "ask_description", lambda *_: Description(dump(RunConfig()), ""))
    with pytest.raises(ValueError, match=r"'w'.*NaN or infinite"):
        subject.introduce(TransportConfig(address="127.0.0.1:1"), "b", {"w": jnp.array([1.0, jnp.nan, 2.0])}, KINDS)
