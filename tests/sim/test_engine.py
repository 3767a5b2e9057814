"""Virtual time, and what the network does to messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.protocol.messages import FragmentValue, Heartbeat, Message
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.faults import NEVER_S
from diloco_jax.sim.network import Network, NetworkOptions, SimulatedLink

ROOT = Path(__file__).resolve().parents[2]


def test_the_simulator_needs_no_array_library() -> None:
    code = (
        "import sys, diloco_jax.sim, diloco_jax.sim.__main__; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr or "diloco_jax.sim imports jax or numpy"


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


class Wire:
    """One link, and what arrives at its upper end."""

    def __init__(self, seed: int = 0, *, faultless: bool = False, **options: Any) -> None:
        self.engine = Engine(seed)
        self.network = Network(self.engine, NetworkOptions(**options), faultless=faultless)
        self.arrived: list[tuple[float, int]] = []
        self.link = SimulatedLink("a", 1, None, self._arrive, self._arrive)

    def _arrive(self, item: tuple[SimulatedLink, Any]) -> None:
        self.arrived.append((round(self.engine.now_s, 9), item[1].incarnation))

    def send(self, number: int, payload_bytes: int | None = None) -> None:
        message: Message = Heartbeat("a", number)
        if payload_bytes is not None:
            message = FragmentValue("a", number, 1, 0, 1, 1, 1, 0, 1, payload_bytes)
        self.network.send(self.link.up, message)

    def numbers(self) -> list[int]:
        self.engine.run(NEVER_S)
        return [number for _, number in self.arrived]


@pytest.mark.parametrize("faultless", [True, False])
def test_delay(faultless: bool) -> None:
    wire = Wire(faultless=faultless, delay_s=0.25)
    wire.send(1)
    wire.send(2, 1000)
    assert wire.numbers() == [1, 2] and wire.arrived == [(0.25, 1), (0.25, 2)]


def test_payloads_share_the_bandwidth_and_let_control_messages_pass() -> None:
    wire = Wire(delay_s=0.5, bandwidth_bytes_per_s=1000.0)
    wire.send(1, 2000)
    wire.send(2, 1000)
    wire.send(3)
    assert wire.numbers() == [3, 1, 2] and wire.arrived == [(0.5, 3), (2.5, 1), (3.5, 2)]


def test_jitter_keeps_the_order_of_a_lane() -> None:
    wire = Wire(delay_s=0.0, jitter_s=1.0)
    for number in range(50):
        wire.send(number)
    assert wire.numbers() == list(range(50))
    assert wire.arrived[0][0] < wire.arrived[-1][0] <= 1.0


@pytest.mark.parametrize(("option", "low", "high"), [("loss", 700, 800), ("duplication", 1200, 1300)])
def test_loss_and_duplication_are_as_likely_as_asked(option: str, low: int, high: int) -> None:
    wire = Wire(**{option: 0.25})
    for number in range(1000):
        wire.send(number)
    assert low < len(wire.numbers()) < high
    assert wire.network.lost == (1000 - len(wire.arrived) if option == "loss" else 0)


def test_reorder() -> None:
    wire = Wire(reorder=0.25, reorder_s=1.0)
    for number in range(100):
        wire.send(number)
    numbers = wire.numbers()
    assert numbers != sorted(numbers) and sorted(numbers) == list(range(100))
    assert numbers[:50] != sorted(numbers[:50]) or numbers[50:] != sorted(numbers[50:])


def test_troubles_end() -> None:
    wire = Wire(loss=0.9, duplication=0.9, reorder=0.9, heals_s=1.0)
    wire.engine.at(1.0, lambda _: [wire.send(number) for number in range(100)])
    assert wire.numbers() == list(range(100))


def test_partition_takes_what_is_sent_and_what_is_under_way() -> None:
    wire = Wire(delay_s=1.0)
    wire.send(1)
    wire.network.partition("a")
    wire.network.partition("a")
    wire.send(2)
    wire.engine.run(1.0)
    wire.network.heal("a")
    wire.send(3)
    wire.network.heal("a")
    wire.send(4)
    assert wire.numbers() == [4] and wire.network.lost == 3


@pytest.mark.parametrize(("late", "arrives"), [(0.0, []), (0.999999, [1])])
def test_a_broken_link_may_still_deliver(late: float, arrives: list[int]) -> None:
    wire = Wire(late=late)
    wire.send(1)
    wire.link.alive = False
    wire.send(2)
    assert wire.numbers() == arrives


@pytest.mark.parametrize(("name", "value"), [("loss", 1.0), ("late", -0.1), ("delay_s", -1.0)])
def test_impossible_options(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"network.{name} is {value}"):
        NetworkOptions(**{name: value})
