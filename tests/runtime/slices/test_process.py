"""What all slices must have in common, and the end of the process of one slice."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from diloco_jax.protocol.messages import STOPPED_OUTSIDE
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED
from diloco_jax.runtime.slices import process
from diloco_jax.runtime.slices.following import Chosen
from diloco_jax.runtime.slices.leading import SliceLost
from diloco_jax.runtime.slices.member import HeldState
from diloco_jax.runtime.slices.process import SlicePlace, SliceProcess, settings_of
from diloco_jax.settings.run import RunConfig

HALVES = ((0, 4),), ((4, 7),)


def settings(gradient: Any, state: Any) -> str:
    """Return the digest of a host that holds these places of one tensor."""
    mesh = SimpleNamespace(shape={"fsdp": 2}, devices=np.array(jax.devices()[:1]))
    shards = [SimpleNamespace(name="x", spans=spans) for spans in state]
    island = SimpleNamespace(mesh=mesh, base=SimpleNamespace(digest=""), shards=lambda: shards)
    parts = SimpleNamespace(places={"x": gradient})
    loop = SimpleNamespace(island=island, parts=parts, corpus="", batch_size=4)
    run = SimpleNamespace(config=RunConfig(name="run"), fingerprint=lambda *_: ())
    return settings_of(cast(Any, run), cast(Any, loop))


def test_hosts_that_hold_other_shards_do_not_connect() -> None:
    """Their messages have the same sizes, so a wrong mean or state would not be noticed."""
    one, other = ([place] for place in HALVES)
    assert settings(one, one) == settings(one, one)
    assert len({settings(one, one), settings(other, one), settings(one, other)}) == 3
    assert settings(one, [*HALVES]) != settings(one, [*reversed(HALVES)]), "states travel shard by shard"


@pytest.mark.parametrize("asked", [True, False])
def test_all_hosts_of_a_leader_that_is_asked_to_end_are_interrupted(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status that the learner sends its hosts is that of a stopped one, as the status of host 0 is."""
    ends: list[tuple[bool, str]] = []

    class Run(LearnerRun):
        def __init__(self, joining: Any, stop: threading.Event, *, make_loop: Any, explain: Any) -> None:
            def begin() -> None:
                raise SliceLost("another one leads on")

            def leave(reason: str) -> None:
                ends.append((stop.is_set(), reason))

            self._stop, self._explain, self.loop = stop, explain, cast(Any, SimpleNamespace(close=lambda: None))
            self.joined = cast(Any, SimpleNamespace(machine=None, begin=begin, leave=leave))

    leadership = SimpleNamespace(gather=lambda: None, close=lambda: None)
    monkeypatch.setattr(process, "Leadership", lambda *_: leadership)
    monkeypatch.setattr(process, "SlicedLoop", lambda *_, **how: SimpleNamespace())
    monkeypatch.setattr(process, "start_thread", lambda *_, **how: None)
    monkeypatch.setattr(process, "island_pulse", lambda *_: SimpleNamespace(close=lambda: None))
    made = SliceProcess.__new__(SliceProcess)
    made._config, made._place, made._stop = RunConfig(name="run"), SlicePlace(0, ()), threading.Event()
    made._learner_id, made._address, made._run_dir, made._incarnation = "island-0", "", Path(), lambda: 1
    made._member, made._make = cast(Any, SimpleNamespace(copy=None)), Run
    if asked:
        made._stop.set()
    assert made._lead(Chosen(0, 64, HeldState())) == (INTERRUPTED if asked else FAILED)
    assert ends == [(True, "another one leads on") if asked else (False, STOPPED_OUTSIDE)]
