"""The simulated network's faults, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_jax.protocol.messages import Advance, GlobalFragment
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.network import Network, NetworkOptions, SimulatedLink


class Way:
    """One link, and what arrives on it when."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(0)
        self.network = Network(self.engine, NetworkOptions(delay_s=0.25, **options), faultless=False)
        self.up: list[tuple[float, int]] = []
        self.down: list[tuple[float, int]] = []
        self.link = SimulatedLink(
            "a", 1, None, lambda item: self._came(self.up, item), lambda item: self._came(self.down, item)
        )

    def _came(self, where: list[tuple[float, int]], item: tuple[SimulatedLink, Any]) -> None:
        where.append((self.engine.now_s, item[1].global_step))

    def send(self, at_s: float, number: int, payload_bytes: int | None = None) -> None:
        """One message each way."""
        message: Any = Advance(number)
        if payload_bytes is not None:
            message = GlobalFragment(number, 0, number, 1, 0, payload_bytes)
        for pipe in (self.link.up, self.link.down):
            self.engine.at(at_s, lambda pipe: self.network.send(pipe, message), pipe)


@pytest.mark.parametrize(("direction", "up_s", "down_s"), [("both", 5.0, 5.0), ("up", 5.0, 1.25), ("down", 1.25, 5.0)])
def test_a_hold_keeps_messages_of_its_direction_and_their_order(direction: str, up_s: float, down_s: float) -> None:
    way = Way()
    way.engine.at(0.5, lambda _: way.network.hold("a", direction))
    way.engine.at(5.0, lambda _: way.network.release("a", direction))
    for at_s, number in ((0.0, 1), (1.0, 2), (1.0, 3), (6.0, 4)):
        way.send(at_s, number)
    way.engine.run(10.0)
    assert way.up == [(0.25, 1), (up_s, 2), (up_s, 3), (6.25, 4)]
    assert way.down == [(0.25, 1), (down_s, 2), (down_s, 3), (6.25, 4)]


def test_two_holds_end_one_by_one() -> None:
    way = Way()
    for at_s, direction in ((0.5, "both"), (0.75, "up")):
        way.engine.at(at_s, lambda direction: way.network.hold("a", direction), direction)
    for at_s, direction in ((5.0, "both"), (8.0, "up")):
        way.engine.at(at_s, lambda direction: way.network.release("a", direction), direction)
    way.send(1.0, 1)
    way.engine.run(10.0)
    assert (way.up, way.down) == ([(8.0, 1)], [(5.0, 1)])


def test_what_a_hold_kept_dies_with_its_connection() -> None:
    way = Way()
    way.network.hold("a", "both")
    way.send(1.0, 1)
    way.engine.at(2.0, lambda _: setattr(way.link, "alive", False))
    way.engine.at(3.0, lambda _: way.network.release("a", "both"))
    way.engine.run(10.0)
    assert (way.up, way.down, way.network.lost) == ([], [], 2)


@pytest.mark.parametrize("thin", [(), (("a", 50.0),)])
def test_a_narrow_link_delays_payloads_until_it_is_wide_again(thin: tuple[tuple[str, float], ...]) -> None:
    way = Way(thin_links=thin)
    way.network.narrow("a", 10.0)
    way.engine.at(50.0, lambda _: way.network.widen("a"))
    way.send(0.0, 1, payload_bytes=100)
    way.send(1.0, 2)
    way.send(60.0, 3, payload_bytes=100)
    way.engine.run(100.0)
    assert way.down == [(1.25, 2), (10.25, 1), (62.25 if thin else 60.25, 3)]
