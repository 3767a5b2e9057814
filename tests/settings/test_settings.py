"""Islands that differ: what one has, what is refused, and that a file and its dump mean the same."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from diloco_jax.settings.text import dump, parse
from diloco_jax.training.sharding import MeshConfig

MIXED: dict[str, Any] = {
    "name": "mixed",
    "islands": {
        "count": 3,
        "devices": 2,
        "batch_size": 8,
        "each": {
            "island-1": {"devices": 4, "batch_size": 16, "mesh": {"fsdp": -1}},
            "island-2": {"devices": "auto", "topology": "v6e:4x4", "mesh": {"fsdp": 8, "data": -1}, "batch_size": 32},
        },
    },
}


def test_an_island_has_what_all_have_but_for_what_it_has_differently() -> None:
    config = parse(MIXED, "test")
    first, second, third = (config.island(name) for name in config.islands.names)
    assert (first.devices, first.hosts, first.batch_size, first.mesh) == (2, 1, 8, MeshConfig(data=-1))
    assert (second.devices, second.batch_size, second.mesh) == (4, 16, MeshConfig(fsdp=-1))
    assert (third.devices, third.hosts, third.batch_size) == (0, 4, 32), "a slice knows its hosts"
    assert config.island("a stranger")[1:] == first[1:]


def test_the_dump_reads_back() -> None:
    config = parse(MIXED, "test")
    assert parse(yaml.safe_load(dump(config)), "dump") == config


@pytest.mark.parametrize(
    ("islands", "words"),
    [
        ({"each": {"island-9": {}}}, "island-0 to island-3"),
        ({"each": {"island-1": {"mash": 1}}}, "did you mean islands.each.island-1.mesh"),
        ({"each": {"island-1": {"mesh": {"fdsp": 1}}}}, "did you mean islands.each.island-1.mesh.fsdp"),
        ({"each": 3}, "islands.each is 3"),
        ({"devices": 0}, "islands.devices is 0; use 1 to 64, or auto"),
        ({"each": {"island-1": {"devices": 65}}}, "islands.each.island-1.devices is 65; use 1 to 64, or auto"),
        ({"devices": "all"}, "islands.devices"),
        ({"each": {"island-1": 3}}, "islands.each.island-1 is 3"),
        ({"each": {"island-1": {"devices": 3}}}, "island-1's batch of 8"),
        ({"devices": 2, "hosts": 3}, "3 hosts cannot share 2 devices"),
        ({"devices": 4, "topology": "v5p:2x2x1"}, "set devices to auto"),
        ({"topology": "v5p:2x2x1", "mesh": {"data": 3}}, "does not fit 4 devices"),
        ({"topology": "v6e:4x4", "mesh": {"fsdp": -1}}, "batch of 8"),
    ],
)
def test_what_cannot_be_is_refused_by_name(islands: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse({"islands": islands}, "test")
