"""The simulated network's delays, losses and faults, message by message."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from faulty.network import TroubledNetwork, TroubledOptions

from diloco_jax.protocol.messages import Advance, FragmentValue, GlobalFragment, Heartbeat, Message
from diloco_jax.sim.engine import NEVER_S, Engine
from diloco_jax.sim.network import SimulatedLink


class Wire:
    """One link, and what arrives on it when."""

    def __init__(self, seed: int = 0, *, faultless: bool = False, **options: Any) -> None:
        self.engine = Engine(seed)
        self.network = TroubledNetwork(self.engine, TroubledOptions(**options), faultless=faultless)
        self.up: list[tuple[float, int]] = []
        self.down: list[tuple[float, int]] = []
        self.link = SimulatedLink("a", 1, None, partial(self._came, self.up), partial(self._came, self.down))

    def _came(self, where: list[tuple[float, int]], item: tuple[SimulatedLink, Any]) -> None:
        message = item[1]
        number = message.incarnation if isinstance(message, Heartbeat | FragmentValue) else message.global_step
        where.append((round(self.engine.now_s, 9), number))

    def send(self, number: int, payload_bytes: int | None = None) -> None:
        """Send one message up, now."""
        message: Message = Heartbeat("a", number)
        if payload_bytes is not None:
            message = FragmentValue("a", number, 1, 0, 1, 1, 1, 0, 1, payload_bytes)
        self.network.send(self.link.up, message)

    def send_at(self, at_s: float, number: int, payload_bytes: int | None = None) -> None:
        """Send one message each way, then."""
        message: Message = Advance(number)
        if payload_bytes is not None:
            message = GlobalFragment(number, 0, number, 1, 0, payload_bytes)
        for pipe in (self.link.up, self.link.down):
            self.engine.at(at_s, lambda pipe: self.network.send(pipe, message), pipe)

    def numbers(self) -> list[int]:
        """Return what arrives above, in its order."""
        self.engine.run(NEVER_S)
        return [number for _, number in self.up]


@pytest.mark.parametrize("faultless", [True, False])
def test_delay(faultless: bool) -> None:
    wire = Wire(faultless=faultless, delay_s=0.25)
    wire.send(1)
    wire.send(2, 1000)
    assert wire.numbers() == [1, 2] and wire.up == [(0.25, 1), (0.25, 2)]


def test_payloads_share_the_bandwidth_and_let_control_messages_pass() -> None:
    wire = Wire(delay_s=0.5, bandwidth_bytes_per_s=1000.0)
    wire.send(1, 2000)
    wire.send(2, 1000)
    wire.send(3)
    assert wire.numbers() == [3, 1, 2] and wire.up == [(0.5, 3), (2.5, 1), (3.5, 2)]


def test_jitter_keeps_the_order_of_a_lane() -> None:
    wire = Wire(delay_s=0.0, jitter_s=1.0)
    for number in range(50):
        wire.send(number)
    assert wire.numbers() == list(range(50))
    assert wire.up[0][0] < wire.up[-1][0] <= 1.0


@pytest.mark.parametrize(("option", "low", "high"), [("loss", 700, 800), ("duplication", 1200, 1300)])
def test_loss_and_duplication_are_as_likely_as_asked(option: str, low: int, high: int) -> None:
    wire = Wire(**{option: 0.25})
    for number in range(1000):
        wire.send(number)
    assert low < len(wire.numbers()) < high
    assert wire.network.lost == (1000 - len(wire.up) if option == "loss" else 0)


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
        TroubledOptions(**{name: value})


@pytest.mark.parametrize(("direction", "up_s", "down_s"), [("both", 5.0, 5.0), ("up", 5.0, 1.25), ("down", 1.25, 5.0)])
def test_a_hold_keeps_messages_of_its_direction_and_their_order(direction: str, up_s: float, down_s: float) -> None:
    way = Wire(delay_s=0.25)
    way.engine.at(0.5, lambda _: way.network.hold("a", direction))
    way.engine.at(5.0, lambda _: way.network.release("a", direction))
    for at_s, number in ((0.0, 1), (1.0, 2), (1.0, 3), (6.0, 4)):
        way.send_at(at_s, number)
    way.engine.run(10.0)
    assert way.up == [(0.25, 1), (up_s, 2), (up_s, 3), (6.25, 4)]
    assert way.down == [(0.25, 1), (down_s, 2), (down_s, 3), (6.25, 4)]


def test_two_holds_end_one_by_one() -> None:
    way = Wire(delay_s=0.25)
    for at_s, direction in ((0.5, "both"), (0.75, "up")):
        way.engine.at(at_s, lambda direction: way.network.hold("a", direction), direction)
    for at_s, direction in ((5.0, "both"), (8.0, "up")):
        way.engine.at(at_s, lambda direction: way.network.release("a", direction), direction)
    way.send_at(1.0, 1)
    way.engine.run(10.0)
    assert (way.up, way.down) == ([(8.0, 1)], [(5.0, 1)])


def test_what_a_hold_kept_dies_with_its_connection() -> None:
    way = Wire(delay_s=0.25)
    way.network.hold("a", "both")
    way.send_at(1.0, 1)
    way.engine.at(2.0, lambda _: setattr(way.link, "alive", False))
    way.engine.at(3.0, lambda _: way.network.release("a", "both"))
    way.engine.run(10.0)
    assert (way.up, way.down, way.network.lost) == ([], [], 2)


@pytest.mark.parametrize("thin", [(), (("a", 50.0),)])
def test_a_narrow_link_delays_payloads_until_it_is_wide_again(thin: tuple[tuple[str, float], ...]) -> None:
    way = Wire(delay_s=0.25, thin_links=thin)
    way.network.narrow("a", 10.0)
    way.engine.at(50.0, lambda _: way.network.widen("a"))
    way.send_at(0.0, 1, payload_bytes=100)
    way.send_at(1.0, 2)
    way.send_at(60.0, 3, payload_bytes=100)
    way.engine.run(100.0)
    assert way.down == [(1.25, 2), (10.25, 1), (62.25 if thin else 60.25, 3)]
