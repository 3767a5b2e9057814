"""Virtual time."""

from __future__ import annotations

import pytest

from diloco_jax.sim.engine import NEVER_S, Engine


def test_events_run_by_time_then_in_order() -> None:
    engine = Engine(0)
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((engine.now_s, name))
        if name == "b":
            engine.at(engine.now_s, note, "b again")

    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (2.0, "d"), (9.0, "later")):
        engine.at(time_s, note, name)
    engine.run(2.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "b again"), (2.0, "c"), (2.0, "d")]
    assert engine.events == 5
    engine.run(NEVER_S)
    assert seen[-1] == (9.0, "later") and engine.events == 6


def test_stop_leaves_the_rest_for_the_next_run() -> None:
    engine = Engine(0)
    seen: list[str] = []
    engine.at(1.0, lambda _: engine.stop())
    engine.at(2.0, seen.append, "rest")
    engine.run(NEVER_S)
    assert (engine.now_s, seen) == (1.0, [])
    engine.run(NEVER_S)
    assert seen == ["rest"]


def test_the_past_is_over() -> None:
    engine = Engine(0)
    engine.at(5.0, lambda _: engine.at(4.0, lambda _: None))
    with pytest.raises(AssertionError, match=r"an event for 4.0 s was asked for at 5.0 s"):
        engine.run(NEVER_S)
