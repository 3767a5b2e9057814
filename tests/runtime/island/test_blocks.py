"""What the hosts of an island receive, pass on and hold, on emulated devices: each value against the whole one."""

import gc
import weakref
from collections.abc import Sequence
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
from diloco_jax.runtime.model import cuts as model_cuts
from diloco_jax.runtime.model.cuts import COLUMNS, ROWS_MAX, Cuts, HostCut, pack_blocks, read_blocks
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.exchange import Exchange
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig

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
    ({"fsdp": 2, "tensor": 2}, 4),
    # Every block is on two hosts.
    ({"data": 2, "fsdp": 2}, 4),
)
FRAGMENTS = 3


class Hosts:
    """The hosts of an island, and the syncer's side of what they receive.

    Args:
        mesh: Axes of the island's four devices.
        count: Number of hosts, which have equally many devices each.
    """

    def __init__(self, mesh: dict[str, int], count: int, down: Format = "int4") -> None:
        devices = jax.devices()[:4]
        blueprint = Blueprint(ModelConfig(args=MODEL), OptimizerConfig(), MeshConfig(**mesh), devices, seed=0)
        self.exchange: Exchange = blueprint.exchange("int4", False)
        self.plan: FragmentPlan = plan_fragments(blueprint.shapes, FRAGMENTS, kinds=blueprint.kinds)
        self.down, self.count = down, count
        self.host_of = {device: number * count // 4 for number, device in enumerate(devices)}
        fragments = self.plan.fragments

        def boxes(fragment: Fragment) -> Any:
            return self.exchange.boxes(fragment, self.host_of.__getitem__)

        self.blocks = [IslandBlocks(fragments, boxes, host, count) for host in range(count)]
        self.values = [GlobalValues(fragments, down, each.held) for each in self.blocks]
        self.cuts = Cuts([whole(each) for each in fragments], down)
        # Bytes that came from the syncer, and that the leader sent on.
        self.received, self.passed = 0, 0

    def send(self, fragment: Fragment, version: int, value: Values, payload: bytes) -> list[Values]:
        """Send a version to every host; return what each has read."""
        number, base = fragment.fragment_id, version - 1 if version else NO_VERSION
        message = GlobalFragment(version, number, version, 1, value_digest(value), len(payload), base)
        format: Format = self.down if version else "float32"
        flat = whole(fragment).flat(value)
        sent = self.cuts.version(number, payload, flat, is_whole=not version)
        got = [(digest, one_buffer(make())) for digest, make in (sent.cut(each.statement) for each in self.blocks)]
        self.received += sum(len(cut) for _, cut in got)
        shared = self.blocks[0].for_others(number, got[0][1], format)
        self.passed += sum(map(len, shared.values()))
        read = []
        for host, (blocks, values) in enumerate(zip(self.blocks, self.values, strict=True)):
            own = blocks.for_own(number, got[host][1], shared.get(host, b""), format)
            arrived = values.read(message, own, got[host][0])
            values.keep(message, arrived)
            read.append(arrived.values)
        return read

    def check(self, fragment: Fragment, value: Values, read: Sequence[Values]) -> None:
        """Check what every device gets of a value against the whole value."""
        for window in self.exchange._windows_of(fragment).windows:
            key = window.part.key
            for device, box in window.value_sharding.devices_indices_map(window.shape).items():
                np.testing.assert_array_equal(read[self.host_of[device]][key][box], value[key][box], err_msg=key)


def drawn(fragment: Fragment, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, fragment.fragment_id))
    return {key: rng.standard_normal(shape, np.float32) for key, shape in fragment.keys_shapes}


@pytest.mark.parametrize(("mesh", "count"), ISLANDS, ids=str)
def test_every_host_reads_its_blocks_and_an_island_receives_each_block_once(mesh: dict[str, int], count: int) -> None:
    hosts, total = Hosts(mesh, count), 0
    replicated = "data" in mesh
    for fragment in hosts.plan.fragments:
        value = drawn(fragment, 0)
        payload = codec.encode(value, "float32")
        hosts.check(fragment, value, hosts.send(fragment, 0, value, payload))
        delta = codec.encode(drawn(fragment, 1), "int4")
        step = codec.decode(delta, fragment.keys_shapes, "int4")
        value = {key: value[key] + step[key] for key in value}
        read = hosts.send(fragment, 1, value, delta)
        hosts.check(fragment, value, read)
        total += len(payload) + len(delta)
        parts = [
            b"".join(blocks.owned[fragment.fragment_id].host_bytes(values))
            for blocks, values in zip(hosts.blocks, read, strict=True)
        ]
        assert bytes(join_host_bytes(parts, 1 << 30)) == codec.encode(value, "float32")
    assert hosts.received == total
    if not replicated:
        assert hosts.passed < 0.05 * total
    # A leader that passed on everything would send (count - 1) times the total.
    assert hosts.passed < 0.51 * (count - 1) * total
    for blocks in hosts.blocks:
        for fragment, held in zip(hosts.plan.fragments, blocks.held, strict=True):
            share = 2 if replicated else count
            assert held.layout.size < 1.05 * fragment.num_elements / share, "memory is that of the share"


def test_a_damaged_cut_is_noticed_by_its_host_alone() -> None:
    hosts = Hosts({"fsdp": 4}, 2)
    fragment = hosts.plan.fragments[0]
    value = drawn(fragment, 0)
    payload = codec.encode(value, "float32")
    sent = hosts.cuts.version(0, payload, whole(fragment).flat(value), is_whole=True)
    message = GlobalFragment(0, 0, 0, 1, value_digest(value), len(payload))
    digests, makers = zip(*(sent.cut(each.statement) for each in hosts.blocks), strict=True)
    cuts = [make() for make in makers]
    assert digests[0] != digests[1] != message.digest
    shared = hosts.blocks[0].for_others(0, one_buffer(cuts[0]), "float32")
    damaged = bytearray(one_buffer(cuts[1]))
    damaged[5] ^= 1
    own = hosts.blocks[1].for_own(0, damaged, shared.get(1, b""), "float32")
    with pytest.raises(ValueError, match="arrived damaged"):
        hosts.values[1].read(message, own, digests[1])
    own = hosts.blocks[0].for_own(0, one_buffer(cuts[0]), b"", "float32")
    hosts.values[0].read(message, own, digests[0])


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
