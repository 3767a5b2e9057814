"""Values that arrive at an island: what is refused, whose memory is used again, and which wait on the devices."""

import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment, plan_fragments, take
from diloco_jax.core.layout import value_digest
from diloco_jax.core.outer import NOTHING
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.runtime.island.adoptions import FREE_MAX, ArrivedValue, GlobalValues, Values
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.host import PLACED_MAX, Host
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.text import load
from tests.runtime.helpers import ROOT, write_config

PLAN = plan_fragments({"a": (40, 30), "b": (7, 11), "c": (300,)}, 2)


def drawn(fragment: Fragment, seed: int) -> Values:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in fragment.keys_shapes}


class Sender:
    """The messages of a syncer that has sent whole values first, then steps."""

    def __init__(self) -> None:
        self.arrivals = GlobalValues(PLAN.fragments, "int4")
        self.values: dict[int, Values] = {}

    def message(self, fragment_id: int, version: int, *, wrong: int = 0) -> tuple[GlobalFragment, bytes]:
        fragment, base = PLAN.fragments[fragment_id], NO_VERSION
        values = drawn(fragment, version)
        payload = codec.encode(values, "float32")
        if fragment_id in self.values:
            base, payload = version - 1, codec.encode(values, "int4")
            step = codec.decode(payload, fragment.keys_shapes, "int4")
            values = {key: value + step[key] for key, value in self.values[fragment_id].items()}
        self.values[fragment_id] = values
        return GlobalFragment(
            version, fragment_id, version, 1, value_digest(values) + wrong, len(payload), base
        ), payload

    def send(self, fragment_id: int, version: int) -> ArrivedValue:
        message, payload = self.message(fragment_id, version)
        arrived = self.arrivals.read(message, payload)
        self.arrivals.keep(message, arrived)
        return arrived

    def is_sent(self, fragment_id: int, arrived: ArrivedValue) -> bool:
        return value_digest(arrived.values) == value_digest(self.values[fragment_id])


def test_steps_follow_the_newest_value_and_held_values_stay() -> None:
    sender = Sender()
    held = [(fragment_id, sender.send(fragment_id, version)) for version in range(1, 5) for fragment_id in (0, 1)]
    digests = [value_digest(arrived.values) for _, arrived in held]
    assert all(sender.is_sent(fragment_id, arrived) for fragment_id, arrived in held[-2:])
    # One slice is enough to hold a value: somebody may still send it or copy it to a device.
    kept = [next(iter(arrived.values.values())) for _, arrived in held]
    copies = [piece.copy() for piece in kept]
    del held
    for version in range(5, 10):
        assert sender.is_sent(0, sender.send(0, version)) and sender.is_sent(1, sender.send(1, version))
    assert len(set(digests)) == 8 and all(map(np.array_equal, kept, copies))


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    sender = Sender()
    addresses = [sender.send(0, version).flat.ctypes.data for version in range(1, 21)]
    # Beside the newest value, one array is being written and FREE_MAX are free.
    assert len(set(addresses)) <= 2 + FREE_MAX
    assert addresses[-1] != addresses[-2], "a step was added in place"


def test_a_refused_value_changes_nothing() -> None:
    sender = Sender()
    first = sender.send(0, 1)
    before = dict(sender.values)
    message, payload = sender.message(0, 2, wrong=1)
    with pytest.raises(ValueError, match="arrived damaged"):
        sender.arrivals.read(message, payload)
    right = message._replace(digest=message.digest - 1)
    with pytest.raises(ValueError, match="payload has"):
        sender.arrivals.read(right, payload[:-1])
    with pytest.raises(ValueError, match="none of the 2 of this model"):
        sender.arrivals.read(message._replace(fragment_id=2), payload)
    with pytest.raises(ValueError, match="a value that did not arrive"):
        sender.arrivals.read(message._replace(fragment_id=1), payload)
    assert value_digest(first.values) == value_digest(before[0])
    assert sender.is_sent(0, sender.arrivals.read(right, payload))


def test_islands_of_one_process_may_join_at_the_same_time() -> None:
    """In a new process, which compiles the loops or loads them."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.runtime.island.adoptions import GlobalValues
fragments, together = plan_fragments({"a": (40,)}, 1).fragments, Barrier(3)
def join(number):
    together.wait()
    return GlobalValues(fragments, "int4")
with ThreadPoolExecutor(3) as pool:
    print(len([*pool.map(join, range(3))]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "3\n", ran.stderr


@pytest.mark.usefixtures("quick_compiler")
def test_few_values_wait_on_the_devices_and_a_dropped_one_is_freed(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, protocol={"num_fragments": 4}))
    loop = BuiltInLoop(config, "island-0", jax.devices()[:1])
    host = Host(resolve(config, loop.island.shapes, loop.island.kinds), loop.island)
    arrived = [ArrivedValue(drawn(fragment, 1), NOTHING) for fragment in host.fragments]
    for number, value in enumerate(arrived):
        host.place(number, value)
    assert [value.placed is not None for value in arrived] == [True] * PLACED_MAX + [False] * (4 - PLACED_MAX)
    # A newer version of the second one replaces it before it was adopted.
    arrays = [weakref.ref(array) for array in arrived[1].placed.arrays]  # type: ignore[union-attr]
    arrived[1] = ArrivedValue(drawn(host.fragments[1], 2), NOTHING)
    assert all(array() is None for array in arrays), "its memory on the devices is not freed"
    host.place(1, arrived[1])
    assert arrived[1].placed is not None
    host.place(2, arrived[2])
    assert arrived[2].placed is None
    for number, value in enumerate(arrived):
        host.adopt(GlobalFragment(1, number, 1, 1, 0, 0), value)
        assert value.placed is None and host.anchors[number] is value.values
        local = take(loop.island.parameters(), host.fragments[number])
        assert all(np.array_equal(local[key], value.values[key].astype(local[key].dtype)) for key in local)
    host.place(3, arrived[3])
    assert arrived[3].placed is not None, "adopted values still count"
    loop.close()
