"""Slices of one island in one thread: real members with a model of seven numbers, and connections without sockets.

Time passes only while a slice waits for a message that nobody sends.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from diloco_jax.core.fragments import Fragment, Slice
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.slices.following import Chosen, Obedience
from diloco_jax.runtime.slices.leading import Leadership
from diloco_jax.runtime.slices.member import HeldState, SliceMember
from diloco_jax.runtime.slices.messages import MESSAGES, Follow
from diloco_jax.training.parts import Part
from diloco_jax.training.whole_state.staging import PartialLeaf, Shard, StagedShards
from diloco_jax.transport.slices.frames import Vocabulary
from diloco_jax.transport.slices.links import Item

SLICES, SIZE, SAMPLES = 3, 7, 2
TERM = 64
RATE = 0.5
FOREVER_S = 1000.0
NAME = StateName(1, 0, 0, (5, 6), "run").to_text()
WORDS = Vocabulary(MESSAGES)
Ranges = tuple[tuple[int, int], ...]
PARTS: tuple[Ranges, ...] = (((0, 2),), ((2, 3), (9, 10)), ((3, 5),))


def gradient(x: np.ndarray, part: Ranges) -> np.ndarray:
    """The gradient of the model's loss on these samples: any function of both whose sums round."""
    seed = sum(start * 7 + stop for start, stop in part)
    return np.asarray(x / 3 + np.random.default_rng(seed).standard_normal(SIZE), np.float32)


def stepped(x: np.ndarray, parts: Sequence[Ranges], rate: float = RATE) -> np.ndarray:
    """The parameters after a step, in the fewest words: the mean of the parts' gradients in their order."""
    total = gradient(x, parts[0])
    for part in parts[1:]:
        total = total + gradient(x, part)
    return np.asarray(x - np.float32(rate) * (total / np.float32(len(parts))), np.float32)


class Model:
    """The state of one slice, as `ExchangedState` offers it."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def shards(self) -> list[Shard]:
        return [Shard("x", "float32", (SIZE,), ((0, SIZE),))]

    def stage_shards(self) -> StagedShards:
        return StagedShards(self.shards(), cast(Any, [self.x.copy()]))

    def wait(self, handle: dict[str, float]) -> dict[str, float]:
        return handle

    def check_shards(self, leaves: dict[str, PartialLeaf]) -> None:
        assert leaves["x"].shape == (SIZE,)

    def load_shards(self, leaves: dict[str, PartialLeaf]) -> None:
        self.x = np.array(leaves["x"].pieces[0])

    def adopt(self, fragment: Fragment, values: Any, *, mode: str, alpha: float, sent: Any = None) -> None:
        weight = np.float32(alpha if mode == "blend" else 0.0)
        for piece in fragment.slices:
            self.x[piece.at] = weight * self.x[piece.at] + (1 - weight) * values[piece.key]

    def overwrite(self, fragment: Fragment, values: Any) -> None:
        self.adopt(fragment, values, mode="overwrite", alpha=0.0)


class Loop:
    """The model's steps, as `BuiltInLoop` and `PartSteps` offer them."""

    part_size, size = SAMPLES, SIZE

    def __init__(self) -> None:
        self.island = Model(np.arange(SIZE, dtype=np.float32))
        self.parts = self
        # The parts that this slice has computed, in order.
        self.computed: list[Ranges] = []

    def put_batch(self, part: Ranges, ahead: Ranges) -> None:
        self._next = part

    def take_batch(self) -> tuple[Ranges, int]:
        return self._next, self._next[0][0]

    def gradient(self, part: Ranges, position: int) -> Ranges:
        self.computed.append(part)
        return part

    def take(self, part: Ranges) -> Part:
        return Part(gradient(self.island.x, part), {"loss": float(len(self.computed))}, 1.0)

    def apply(self, mean: np.ndarray, rate: float, metrics: Any) -> Any:
        self.island.x = np.asarray(self.island.x - np.float32(rate) * mean, np.float32)
        return {**metrics, "grad_norm": math.sqrt(float(np.dot(mean, mean)))}


class Links:
    """The connections of one slice, as `SliceLinks` offers them."""

    queue_bytes_max = 1 << 20

    def __init__(self, net: "Net", own: int) -> None:
        self._net, self._own = net, own
        self.session = net.session(own)
        self.connected: dict[int, int] = {}
        self.inbox: deque[Item] = deque()
        self.sent: list[tuple[int, Any]] = []
        # What waits in a queue at each of the next looks.
        self.queued: deque[int] = deque()
        self.looked = 0
        # Why this slice ended connections, by slice.
        self.dropped: dict[int, str] = {}

    def send(self, to: int, message: Any, payload: Any = b"") -> bool:
        if to == self._own or not 0 <= to < self._net.slices:
            raise ValueError(f"there is no other slice {to}")
        head = WORDS.pack(message)
        if to not in self.connected:
            return False
        self.sent.append((to, message))
        content = memoryview(bytes(payload))
        self._net.on_sent(self._own, to, message, content)
        self._net.links[to].inbox.append(Item(self._own, self._net.session(self._own), WORDS.unpack(head), content))
        return True

    def receive(self, timeout_s: float) -> Item | None:
        if not self.inbox:
            self._net.others_work(self._own)
        if self.inbox:
            return self.inbox.popleft()
        self._net.now_s += timeout_s
        assert self._net.now_s < FOREVER_S, "a slice waits forever"
        self._net.on_wait()
        return None

    def put(self, message: Any) -> None:
        self.inbox.append(Item(self._own, self.session, message))

    def silent_s(self, number: int) -> float:
        since_s = self._net.silent_since_s.get(number, self._net.now_s)
        return self._net.now_s - since_s if number in self.connected else 0.0

    def listens(self, number: int, timeout_s: float) -> bool:
        return number not in self._net.ended

    def waiting_bytes(self, to: int) -> int:
        self.looked += 1
        return self.queued.popleft() if self.queued else 0

    def close(self, grace_s: float) -> None:
        for number in list(self.connected):
            self._net.cut(self._own, number)

    def drop(self, number: int, reason: str) -> None:
        if number in self.connected:
            self.dropped[number] = reason
            self._net.cut(self._own, number)


class Net:
    """All slices of an island, and the time."""

    def __init__(self, slices: int = SLICES) -> None:
        self.now_s, self.slices = 0.0, slices
        self._sessions = [0] * slices
        self.links = [Links(self, number) for number in range(slices)]
        self.members = [self._member(number) for number in range(slices)]
        # Slices that follow, and do what they can whenever another one waits.
        self.following: dict[int, Obedience] = {}
        self.silent_since_s: dict[int, float] = {}
        # Slices whose process ended.
        self.ended: set[int] = set()
        self.slow: set[int] = set()
        # Called before a following slice takes a message; it may cut connections, or return True to lose the message.
        self.on_message: Callable[[int, Item], bool | None] = lambda number, item: None
        # Called when a slice has waited in vain.
        self.on_wait: Callable[[], None] = lambda: None
        # Called with sender, receiver, message and payload of everything that is sent.
        self.on_sent: Callable[[int, int, Any, memoryview], None] = lambda *sent: None
        for number in range(slices):
            for other in range(number):
                self.connect(number, other)

    def _member(self, number: int) -> SliceMember:
        halves = [Slice("x", 0, 0, 4), Slice("x", 0, 4, SIZE)]
        fragments = [Fragment(n, (half,), ((half.stop - half.start,),), 4 - n) for n, half in enumerate(halves)]
        islands = SimpleNamespace(slices=self.slices)
        run = SimpleNamespace(fragments=tuple(fragments), config=SimpleNamespace(islands=islands))
        return SliceMember(number, cast(Any, run), cast(Any, Loop()), cast(Any, self.links[number]))

    def session(self, number: int) -> int:
        return self._sessions[number]

    def connect(self, one: int, other: int) -> None:
        self.links[one].connected[other] = self._sessions[other]
        self.links[other].connected[one] = self._sessions[one]

    def cut(self, one: int, other: int) -> None:
        for own, peer in ((one, other), (other, one)):
            if peer in self.links[own].connected:
                session = self.links[own].connected.pop(peer)
                self.links[own].inbox.append(Item(peer, session, None, reason="cut"))

    def kill(self, number: int) -> None:
        """End the process of a slice."""
        self.following.pop(number, None)
        self.ended.add(number)
        for other in list(self.links[number].connected):
            self.cut(number, other)
        self.links[number].inbox.clear()

    def start(self, number: int) -> None:
        """Start a process of a slice again; it has no state."""
        self._sessions[number] += 1
        self.ended.discard(number)
        self.links[number] = Links(self, number)
        self.members[number] = self._member(number)
        for other in set(range(self.slices)) - {number}:
            self.connect(number, other)

    def put(self, to: int, sender: int, message: Any, payload: bytes = b"") -> None:
        """Let a message arrive that its sender would never send."""
        self.links[to].inbox.append(Item(sender, self._sessions[sender], message, memoryview(payload)))

    def others_work(self, waiting: int) -> None:
        """Let the slices that follow take what has arrived for them, until all of them wait."""
        busy = True
        while busy:
            busy = False
            for number in sorted(self.following.keys() - {waiting} - self.slow - self.silent_since_s.keys()):
                busy |= self._work(number)

    def _work(self, number: int) -> bool:
        links, obedience = self.links[number], self.following[number]
        if not links.inbox:
            return False
        item = self.next_item(number)
        if item is None:
            obedience.advance()
        elif not self.on_message(number, item) and self.following.get(number) is obedience:
            if (problem := obedience.take(item.slice, item.message, item.payload)) is not None:
                links.drop(item.slice, problem)
            if obedience.advance() is not None:
                del self.following[number]
        return True

    def next_item(self, number: int) -> Item | None:
        """Return the next item of a slice's connections, which have one."""
        return self.links[number].inbox.popleft()

    def lead(self, least: int = 1, straggler_s: float = 3.0) -> Leadership:
        """Let slice 0 lead the others, which all have its state."""
        chosen = Chosen(0, TERM, HeldState())
        return Leadership(self.members[0], chosen, least, straggler_s, lambda: False)

    def follow(self, number: int, leadership: Leadership, has_state: bool = True) -> Obedience:
        """Let a slice follow the one that leads, as `FollowingSlice.follow` does."""
        member, leader = self.members[number], leadership.member.own
        if has_state:
            member.begin_term(leadership.term)
        self.following[number] = Obedience(member, leader, leadership.term, has_state)
        self.links[number].send(leader, Follow(leadership.term, has_state))
        return self.following[number]

    def state(self, number: int) -> np.ndarray:
        return cast(Model, self.members[number].loop.island).x

    def computed(self, number: int) -> list[Ranges]:
        return cast(Loop, self.members[number].loop).computed
