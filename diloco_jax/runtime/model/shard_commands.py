"""The words between a syncer's control process and its merge shards, which run the same program on the same host.

A shard obeys commands in the order in which they were sent. A command comes with a number, and unless that is 0 it is
answered once, by a ShardAnswer of that number. Arrays travel beside a command, never in it (shard_pipe.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.passes import State
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment
from diloco_jax.transport.link import Traffic


class ShardBegin(NamedTuple):
    """First command: make your share of this plan, for merges with so many threads."""

    plan: FragmentPlan
    threads: int


class ShardListen(NamedTuple):
    """Listen to learners in this life of the syncer; answer with the address and its real port."""

    address: str
    epoch: int


class ShardHangUp(NamedTuple):
    """Send what is queued for learners for at most so long, and end their sessions."""

    grace_s: float


class ShardSend(NamedTuple):
    """Send a learner your part of the version that the message names."""

    peer: str
    message: GlobalFragment


class ShardInspect(NamedTuple):
    """Answer with the squared norms of these parts; see ModelShare.inspect."""

    fragment_id: int
    parts: tuple[int, ...]
    bases: tuple[int, ...]


class ShardUpdate(NamedTuple):
    """Answer with what ModelShare.update returns."""

    fragment_id: int
    version: int
    chosen: tuple[int, ...]
    weights: tuple[float, ...]


class ShardForget(NamedTuple):
    """Let go of what was inspected of a fragment."""

    fragment_id: int


class ShardPublish(NamedTuple):
    """Put in place what the last update of a fragment made."""

    fragment_id: int


class ShardLoad(NamedTuple):
    """Take the state that comes along; `names` are those of its outer arrays."""

    fragment_id: int
    version: int
    names: tuple[str, ...]


class ShardRestore(NamedTuple):
    """Take the value that comes along."""

    fragment_id: int
    version: int


class ShardCapture(NamedTuple):
    """Capture the share as it is now, under this number; see ModelShare.capture."""

    capture: int
    bounded: bool


class ShardRead(NamedTuple):
    """Answer with the names of a captured fragment's outer arrays, or of none; its state comes along."""

    capture: int
    fragment_id: int
    value_only: bool


class ShardFree(NamedTuple):
    """Drop a part of a learner's value, a capture, or a fragment of one."""

    part: int = -1
    capture: int = -1
    fragment_id: int = -1


class ShardEnd(NamedTuple):
    """Last command: end the process."""


class ShardAnswer(NamedTuple):
    """The answer to the command of this number, or the reason why it failed."""

    number: int
    result: Any = None
    error: str = ""


class ShardHello(NamedTuple):
    """A learner said hello in this session."""

    learner_id: str
    session: int


class ShardHolds(NamedTuple):
    """A learner's value came: the shard keeps its part under this number."""

    session: int
    message: FragmentValue
    part: int
    size: int


ShardEvent = ShardHello | ShardHolds | Traffic


def pack_state(state: State) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return a state as names of its outer arrays, and arrays."""
    return tuple(state.outer), [state.value, state.residual, *(np.asarray(leaf) for leaf in state.outer.values())]


def unpack_state(names: Sequence[str], arrays: Sequence[np.ndarray]) -> State:
    return State(arrays[0], dict(zip(names, arrays[2:], strict=True)), arrays[1])
