"""What the hosts of an island receive, pass on and hold, on emulated devices: each value against the whole one."""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, FragmentPlan, plan_fragments
from diloco_jax.core.held import everything, one_buffer, regrouped
from diloco_jax.core.host_bytes import join_host_bytes
from diloco_jax.core.layout import value_digest, whole
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.runtime.island.adoptions import GlobalValues, Values
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.passing import Passing
from diloco_jax.runtime.model import cuts as model_cuts
from diloco_jax.runtime.model.cuts import COLUMNS, ROWS_MAX, Cuts, HostCut, pack_blocks, read_blocks
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.exchange import Exchange
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.transport.commands import HostShared

MODEL = {
    "vocab_size": 256,
    "dim": 1024,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    # Shards of heads have whole blocks.
    "head_dim": 256,
    "mlp_dim": 1024,
}
ISLANDS: Sequence[tuple[dict[str, int], int]] = (
    ({"fsdp": 4}, 2),
    ({"fsdp": 4}, 4),
    ({"tensor": 4}, 2),
    ({"tensor": 4}, 4),
    ({"fsdp": 2, "tensor": 2}, 2),
    ({"fsdp": 2, "tensor": 2}, 4),
    # Every block is on two hosts, and then on all of two or four.
    ({"data": 2, "fsdp": 2}, 2),
    ({"data": 2, "fsdp": 2}, 4),
    ({"data": 4}, 4),
)
FRAGMENTS = 3
SESSION = 5


class Network:
    """The way of blocks among hosts: messages of two hosts keep their order, all others come in any order.

    Attributes:
        passed: Bytes by sender and receiver.
    """

    def __init__(self, blocks: Sequence[IslandBlocks], formats: dict[GlobalFragment, Format], seed: int) -> None:
        self._drawn = random.Random(seed)
        self._waiting: dict[tuple[int, int], list[tuple[HostShared, bytes]]] = {}
        self.passed: Counter[tuple[int, int]] = Counter()
        self.passing = [
            Passing(each, formats.__getitem__, partial(self._send, host)) for host, each in enumerate(blocks)
        ]
        for each in self.passing:
            each.begin(SESSION)

    def _send(self, source: int, command: HostShared, payload: Any, host: int) -> None:
        whole = b"".join(payload)
        self.passed[source, host] += len(whole)
        self._waiting.setdefault((source, host), []).append((command, whole))

    def bring(self, waits: list[Callable[[], None]]) -> None:
        """Call functions, and bring every message, in any order."""
        while waits or self._waiting:
            chosen = self._drawn.choice([None, *self._waiting] if waits else [*self._waiting])
            if chosen is None:
                waits.pop(self._drawn.randrange(len(waits)))()
                continue
            source, host = chosen
            command, payload = self._waiting[chosen].pop(0)
            if not self._waiting[chosen]:
                del self._waiting[chosen]
            self.passing[host].on_shared(source, command, payload)


@cache
def blueprint_of(mesh: tuple[tuple[str, int], ...], **model: int) -> Blueprint:
    """Describe the model on four devices; cases that differ in the number of hosts share it."""
    made = MeshConfig(**dict(mesh))
    return Blueprint(ModelConfig(args=MODEL | model), OptimizerConfig(), made, jax.devices()[:4], seed=0)


class Hosts:
    """The hosts of an island, and the syncer's side of what they receive.

    Args:
        mesh: Axes of the island's four devices.
        count: Number of hosts, which have equally many devices each.
    """

    def __init__(self, mesh: dict[str, int], count: int, down: Format = "int4", **model: int) -> None:
        blueprint = blueprint_of(tuple(mesh.items()), **model)
        self.exchange: Exchange = blueprint.exchange("int4", False)
        self.plan: FragmentPlan = plan_fragments(blueprint.shapes, FRAGMENTS, kinds=blueprint.kinds)
        self.down, self.count = down, count
        self.host_of = {device: number * count // 4 for number, device in enumerate(jax.devices()[:4])}
        fragments = self.plan.fragments

        def boxes(fragment: Fragment) -> Any:
            return self.exchange.boxes(fragment, self.host_of.__getitem__)

        self.blocks = [IslandBlocks(fragments, boxes, host, count) for host in range(count)]
        self.values = [GlobalValues(fragments, down, each.held) for each in self.blocks]
        self.cuts = Cuts([whole(each) for each in fragments], down)
        self.formats: dict[GlobalFragment, Format] = {}
        self.network = Network(self.blocks, self.formats, seed=count)
        # Bytes from the syncer, by host, and versions so far.
        self.received, self.number = [0] * count, 0

    def send(self, fragment: Fragment, version: int, value: Values, payload: bytes) -> list[Values]:
        """Send a version to every host; return what each has read."""
        number, base = fragment.fragment_id, version - 1 if version else NO_VERSION
        message = GlobalFragment(version, number, version, 1, value_digest(value), len(payload), base)
        self.formats[message] = self.down if version else "float32"
        flat = whole(fragment).flat(value)
        sent = self.cuts.version(number, payload, flat, is_whole=not version)
        got = [(digest, one_buffer(make())) for digest, make in (sent.cut(each.statement) for each in self.blocks)]
        self.number += 1
        waits = list[Callable[[], None]]()
        for host, (_, cut) in enumerate(got):
            self.received[host] += len(cut)
            waits.append(partial(self.network.passing[host].arrived, self.number, message, cut))
        self.network.bring(waits)
        read = []
        for (digest, _), passing, values in zip(got, self.network.passing, self.values, strict=True):
            own = passing.take(self.number)
            assert own is not None and passing.take(self.number) is None
            arrived = values.read(message, own, digest)
            values.keep(message, arrived)
            read.append(arrived.values)
            passing.handled(self.number)
        return read

    def check(self, fragment: Fragment, value: Values, read: Sequence[Values]) -> None:
        """Check what every device gets of a value against the whole value."""
        for window in self.exchange._windows_of(fragment).windows:
            key = window.part.key
            for device, box in window.value_sharding.devices_indices_map(window.shape).items():
                np.testing.assert_array_equal(read[self.host_of[device]][key][box], value[key][box], err_msg=key)

    def holders(self, fragment: Fragment) -> np.ndarray:
        """Count the hosts that need an element of each block, element by element."""
        found = []
        for window in sorted(self.exchange._windows_of(fragment).windows, key=lambda each: each.part.key):
            needed = np.zeros((self.count, *window.shape), bool)
            for device, box in window.value_sharding.devices_indices_map(window.shape).items():
                needed[self.host_of[device]][box] = True
            flat = needed.reshape(self.count, -1)
            padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 256)))
            found.append(padded.reshape(self.count, -1, 256).any(axis=2).sum(axis=0))
        return np.concatenate(found)


@cache
def drawn(fragment: Fragment, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, fragment.fragment_id))
    return {key: rng.standard_normal(shape, np.float32) for key, shape in fragment.keys_shapes}


@cache
def encoded(fragment: Fragment, seed: int, format: Format) -> bytes:
    """Encode drawn values once for all islands."""
    return codec.encode(drawn(fragment, seed), format)


@pytest.mark.parametrize(("mesh", "count"), ISLANDS, ids=str)
def test_every_host_reads_its_blocks_and_an_island_receives_each_block_once(mesh: dict[str, int], count: int) -> None:
    hosts, total, least = Hosts(mesh, count), 0, 0
    for fragment in hosts.plan.fragments:
        value = drawn(fragment, 0)
        payload = encoded(fragment, 0, "float32")
        hosts.check(fragment, value, hosts.send(fragment, 0, value, payload))
        delta = encoded(fragment, 1, "int4")
        step = codec.decode(delta, fragment.keys_shapes, "int4")
        value = {key: value[key] + step[key] for key in value}
        read = hosts.send(fragment, 1, value, delta)
        hosts.check(fragment, value, read)
        parts = [
            b"".join(blocks.got[fragment.fragment_id].host_bytes(values))
            for blocks, values in zip(hosts.blocks, read, strict=True)
        ]
        assert bytes(join_host_bytes(parts, 1 << 30)) == codec.encode(value, "float32")
        # All slices of this model have whole blocks: 256 float32, and a scale with 128 bytes of codes.
        holders = hosts.holders(fragment)
        assert len(payload) + len(delta) == (1024 + 132) * holders.size
        total += len(payload) + len(delta)
        least += int((1024 + 132) * (holders - 1).sum())
    assert sum(hosts.received) == total, "an island receives each block once"
    passed = hosts.network.passed
    assert passed.total() == least, "no block goes to a host twice"
    share = total / count
    for host in range(count):
        sent, got = (sum(size for way, size in passed.items() if way[end] == host) for end in (0, 1))
        assert hosts.received[host] == pytest.approx(share, abs=0.03 * share)
        assert max(sent, got) <= least / count + 0.03 * share, "no host moves more than its share"
    replicas = {"data": 2, "fsdp": 2}.keys() == mesh.keys() and count == 4
    if replicas:
        assert 1 <= passed.total() / total < 1.01, "the least for two replicas"
    elif "data" not in mesh:
        assert passed.total() < 0.05 * total
    for blocks in hosts.blocks:
        for fragment, held in zip(hosts.plan.fragments, blocks.held, strict=True):
            copies = mesh.get("data", 1)
            assert held.layout.size < 1.05 * fragment.num_elements * copies / count, "memory is that of the share"


@pytest.mark.parametrize("count", range(1, 10))
def test_blocks_reach_all_holders_whatever_their_number(count: int) -> None:
    """All hosts hold two slices, and each a part of another; two hosts share the blocks that their parts cut."""
    (fragment,) = plan_fragments({"everywhere": (40 * 256 + 7,), "cut": (12 * 256,), "one": (1,)}, 1).fragments
    layout = whole(fragment)
    edges = np.linspace(0, 12 * 256, count + 1).astype(int)

    def boxes(_: Fragment) -> Any:
        everywhere = {"everywhere": [(slice(None),)], "one": [(slice(None),)]}
        return {host: everywhere | {"cut": [(slice(*edges[host : host + 2]),)]} for host in range(count)}

    blocks = [IslandBlocks([fragment], boxes, host, count) for host in range(count)]
    value = {key: np.random.default_rng(3).standard_normal(shape, np.float32) for key, shape in fragment.keys_shapes}
    payload, message = codec.encode(value, "int2"), GlobalFragment(1, 0, 1, 1, 0, 0)
    source = [(everything(layout), payload)]
    for seed in range(5):
        network = Network(blocks, {message: "int2"}, seed)
        cuts = [one_buffer(regrouped(source, each.got[0], "int2")) for each in blocks]
        assert sum(map(len, cuts)) == len(payload)
        network.bring([partial(p.arrived, 1, message, cut) for p, cut in zip(network.passing, cuts, strict=True)])
        for each, passing in zip(blocks, network.passing, strict=True):
            assert passing.take(1) == one_buffer(regrouped(source, each.held[0], "int2"))
        hops = max((step for each in blocks for step in range(len(each.steps[0]))), default=-1) + 1
        assert hops == (count - 1).bit_length()


def test_heads_that_cut_blocks_spread_what_they_share_over_all_hosts() -> None:
    """Four heads of 64 elements on four hosts: each block of the attention's matrices is on all of them."""
    hosts, total = Hosts({"tensor": 4}, 4, head_dim=64), 0
    for fragment in hosts.plan.fragments:
        value = drawn(fragment, 0)
        payload = codec.encode(value, "float32")
        hosts.check(fragment, value, hosts.send(fragment, 0, value, payload))
        total += len(payload)
    passed = hosts.network.passed
    assert sum(hosts.received) == total and 0.1 < passed.total() / total < 1
    for host in range(4):
        for end in (0, 1):
            moved = sum(size for way, size in passed.items() if way[end] == host)
            assert moved == pytest.approx(passed.total() / 4, rel=0.03)


def test_what_the_leader_has_handled_and_what_is_of_another_session_is_forgotten() -> None:
    (fragment,) = plan_fragments({"a": (1024,)}, 1).fragments
    both = {host: {"a": [(slice(None),)]} for host in range(2)}
    blocks = [IslandBlocks([fragment], lambda _: both, host, 2) for host in range(2)]
    sent, completed = list[tuple[HostShared, bytes]](), list[int]()
    message = GlobalFragment(1, 0, 1, 1, 0, 0)
    passing = Passing(
        blocks[0],
        lambda _: "float32",
        lambda command, payload, _: sent.append((command, b"".join(payload))),
        completed.append,
    )
    half = bytes(2048)
    passing.begin(5)
    with pytest.raises(ValueError, match="has 9 bytes, but the blocks of this host take 2048"):
        passing.arrived(1, message, bytes(9))
    passing.arrived(1, message, half)
    assert sent == [(HostShared(message, 5, 1, 0), half)] and passing.take(1) is None
    # The leader does not want the first version, and another host passes on its blocks late.
    passing.handled(1)
    passing.on_shared(1, HostShared(message, 5, 1, 0), half)
    passing.on_shared(1, HostShared(message, 4, 7, 0), half)
    passing.on_shared(1, HostShared(message, 6, 1, 0), half)
    assert [*passing._arriving] == [(6, 1)] and not completed
    passing.begin(6)
    passing.arrived(1, message, half)
    assert completed == [1] and passing.take(1) == 2 * half
    assert not passing._arriving


def test_a_damaged_cut_is_noticed_by_its_host_alone() -> None:
    hosts = Hosts({"fsdp": 4}, 2)
    fragment = hosts.plan.fragments[0]
    value = drawn(fragment, 0)
    payload = codec.encode(value, "float32")
    sent = hosts.cuts.version(0, payload, whole(fragment).flat(value), is_whole=True)
    message = GlobalFragment(0, 0, 0, 1, value_digest(value), len(payload))
    hosts.formats[message] = "float32"
    digests, makers = zip(*(sent.cut(each.statement) for each in hosts.blocks), strict=True)
    cuts = [bytearray(one_buffer(make())) for make in makers]
    assert digests[0] != digests[1] != message.digest
    # The first block is on this host alone.
    cuts[1][5] ^= 1
    passing = hosts.network.passing
    hosts.network.bring([partial(each.arrived, 1, message, cut) for each, cut in zip(passing, cuts, strict=True)])
    own = [each.take(1) for each in passing]
    with pytest.raises(ValueError, match="arrived damaged"):
        hosts.values[1].read(message, own[1], digests[1])  # type: ignore[arg-type]
    hosts.values[0].read(message, own[0], digests[0])  # type: ignore[arg-type]


def test_a_cut_that_waits_does_not_hold_the_value() -> None:
    hosts = Hosts({"fsdp": 4}, 2)
    fragment = hosts.plan.fragments[0]
    flat = whole(fragment).flat(drawn(fragment, 0))
    step = np.zeros(hosts.cuts.whole(0).layout.payload_bytes("int4"), np.uint8)
    value = weakref.ref(flat)
    cuts = Cuts([whole(each) for each in hosts.plan.fragments], "int4")
    version = cuts.version(0, step.data, flat, is_whole=False)
    _, make = version.cut(hosts.blocks[1].statement)
    del flat, version
    gc.collect()
    assert value() is None
    assert len(one_buffer(make())) == hosts.blocks[1].got[0].layout.payload_bytes("int4")


def test_few_statements_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = whole(plan_fragments({"a": (300_000,)}, 1).fragments[0])
    cuts = Cuts([layout], "int4")
    monkeypatch.setattr(model_cuts, "KEPT_BYTES_MAX", 4 * 8 * COLUMNS)
    statements = [np.array([(0, 0, 0, start, 1, 1, 1)], "<i8").tobytes() for start in range(6)]
    for each in (*statements[:4], statements[0], *statements[4:]):
        assert cuts.of(0, each).held.tables[0][0, 0] == each[24]
    assert [*cuts._read] == [statements[3], statements[0], *statements[4:]]


def test_a_delta_applies_to_the_version_that_it_names_until_all_hosts_have_a_newer_one() -> None:
    hosts = Hosts({"fsdp": 4}, 2)
    fragment, values = hosts.plan.fragments[0], hosts.values[1]
    held = hosts.blocks[1].held[0]
    deltas = []
    for version in range(3):
        value = drawn(fragment, version)
        message = GlobalFragment(version, 0, version, 1, 0, 0)
        cut = one_buffer(regrouped([(everything(held.whole), codec.encode(value, "float32"))], held, "float32"))
        values.add(message, values.read(message, cut, held.digest(whole(fragment).flat(value))))
        deltas.append(message)
    assert [*values._bases[0]] == [0, 1, 2]
    values.forget_older(deltas[1])
    assert [*values._bases[0]] == [1, 2]
    with pytest.raises(ValueError, match="is a step from a value that did not arrive"):
        values.read(GlobalFragment(3, 0, 3, 1, 0, 0, 0), b"", 0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((9, 0, 0, 0, 1, 1, 1), "name fragment, slice and kind"),
        ((0, 99, 0, 0, 1, 1, 1), "name fragment, slice and kind"),
        ((0, 0, 2, 0, 1, 1, 1), "name fragment, slice and kind"),
        ((0, 0, -1, 0, 1, 1, 1), "name fragment, slice and kind"),
        ((0, 0, 0, 1 << 40, 1, 1, 1), "is not a row of the"),
        ((0, 0, 0, 0, 1, 1, 1 << 40), "is not a row of the"),
    ],
)
def test_blocks_that_are_not_of_this_model_are_refused(row: tuple[int, ...], words: str) -> None:
    fragment = plan_fragments({"a": (40, 30), "b": (7,)}, 1).fragments[0]
    layouts = [whole(fragment)]
    read_blocks(
        np.array([(0, 0, 0, 0, 1, 1, 1), (0, 1, 0, 0, 1, 1, 1), (0, 0, 1, 0, 5, 5, 1)], "<i8").tobytes(), layouts
    )
    with pytest.raises(ValueError, match=words):
        read_blocks(np.array(row, "<i8").tobytes(), layouts)
    backwards = np.array([(0, 1, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1)], "<i8")
    with pytest.raises(ValueError, match="not in order"):
        read_blocks(backwards.tobytes(), layouts)
    with pytest.raises(ValueError, match="are not the blocks of a host"):
        read_blocks(bytes(8 * COLUMNS * ROWS_MAX + 8 * COLUMNS), layouts)
    with pytest.raises(ValueError, match="are not the blocks of a host"):
        read_blocks(bytes(9), layouts)


def test_a_host_whose_blocks_take_too_many_rows_learns_it_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = everything(whole(plan_fragments({"a": (40, 30), "b": (7,)}, 1).fragments[0]))
    monkeypatch.setattr(model_cuts, "ROWS_MAX", 4)
    assert len(pack_blocks([HostCut(blocks, blocks)])) == 4 * 8 * COLUMNS
    monkeypatch.setattr(model_cuts, "ROWS_MAX", 3)
    with pytest.raises(ValueError, match="take 4 rows, the limit is 3: shard tensors along their first axes"):
        pack_blocks([HostCut(blocks, blocks)])
