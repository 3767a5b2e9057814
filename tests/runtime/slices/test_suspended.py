"""An island of two slices of real processes. If one is suspended or killed, the other one trains on."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.limits import HANGS_S
from tests.runtime.slices.one_slice import PATIENCE_S
from tests.sockets import free_port

pytestmark = [pytest.mark.net, pytest.mark.long]


class Slice:
    """A process of a slice, and what it printed."""

    def __init__(self, own: int, leader: int, floods: bool, addresses: list[str]) -> None:
        command = [sys.executable, "-m", "tests.runtime.slices.one_slice", str(own), str(3 + (own == leader))]
        self.process = subprocess.Popen([*command, str(int(floods)), *addresses], stdout=subprocess.PIPE)
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def next(self, event: str) -> dict[str, Any]:
        """Return the next thing that happened, which must be this."""
        found = self._events.get(timeout=HANGS_S)
        assert found["event"] == event, found
        return found

    def end(self) -> None:
        self.process.kill()
        self._reader.join(HANGS_S)
        self.process.communicate()

    def nothing(self) -> bool:
        return self._events.empty()


Start = Callable[[int, bool], tuple[Slice, Slice]]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Slice] = []

    def make(leader: int, floods: bool) -> tuple[Slice, Slice]:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        made.extend(Slice(own, leader, floods, addresses) for own in range(2))
        leads, follows = made[leader], made[1 - leader]
        assert leads.next("leads")["term"] == follows.next("follows")["term"]
        return leads, follows

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("floods", [False, True], ids=["idle", "unread"])
@pytest.mark.parametrize("leader", [0, 1])
def test_a_suspended_follower_follows_again(start: Start, leader: int, floods: bool) -> None:
    """The leader trained on meanwhile, so a term of the follower would undo its steps."""
    leads, follows = start(leader, floods)
    follows.process.send_signal(signal.SIGSTOP)
    # The leader gives it up, and brings the reason for another second.
    time.sleep(PATIENCE_S + 2)
    follows.process.send_signal(signal.SIGCONT)
    follows.next("loses")
    assert follows.next("follows")["leader"] == leader and leads.nothing()


@pytest.mark.parametrize("floods", [False, True], ids=["idle", "unread"])
@pytest.mark.parametrize("leader", [0, 1])
def test_a_suspended_leader_finds_the_one_that_leads_meanwhile(start: Start, leader: int, floods: bool) -> None:
    leads, follows = start(leader, floods)
    leads.process.send_signal(signal.SIGSTOP)
    follows.next("loses")
    assert follows.next("leads")["leader"] == 1 - leader
    leads.process.send_signal(signal.SIGCONT)
    leads.next("resigns")
    assert follows.nothing()


@pytest.mark.parametrize("leader", [0, 1])
def test_a_killed_leader_is_replaced(start: Start, leader: int) -> None:
    leads, follows = start(leader, False)
    leads.process.kill()
    follows.next("loses")
    assert follows.next("leads")["leader"] == 1 - leader
