"""Slices against the tables of Google Cloud's documentation."""

from __future__ import annotations

import pytest

from diloco_jax.settings.slices import Topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator_type", "machine_type"),
    [
        ("v5p:2x2x1", 4, 1, "v5p-8", "ct5p-hightpu-4t"),
        ("v5p:2x2x2", 8, 2, "v5p-16", "ct5p-hightpu-4t"),
        ("v5p:4x4x4", 64, 16, "v5p-128", "ct5p-hightpu-4t"),
        ("v6e:1x1", 1, 1, "v6e-1", "ct6e-standard-1t"),
        ("v6e:2x2", 4, 1, "v6e-4", "ct6e-standard-4t"),
        ("v6e:2x4", 8, 1, "v6e-8", "ct6e-standard-8t"),
        ("v6e:4x4", 16, 4, "v6e-16", "ct6e-standard-4t"),
        ("v6e:16x16", 256, 64, "v6e-256", "ct6e-standard-4t"),
    ],
)
def test_a_slice_is_what_the_cloud_says(
    name: str, chips: int, hosts: int, accelerator_type: str, machine_type: str
) -> None:
    topology = Topology.parse(name)
    assert (topology.chips, topology.hosts) == (chips, hosts)
    assert (topology.accelerator_type, topology.machine_type) == (accelerator_type, machine_type)
    assert str(topology) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v7:4x4", "v5p or v6e"),
        ("v5p:4x4", "3 sizes"),
        ("v6e:4x4x4", "2 sizes"),
        ("v6e", "2 sizes"),
        ("v6e:0x4", "at least 1"),
        ("v6e:-4x4", "at least 1"),
        ("v6e:32x32", "at most 256"),
        ("v5p:1x1x1", "whole hosts; use a multiple of 4"),
        ("v6e:3x4", "no v6e slice; choose v6e: 1x1, 2x2, 2x4"),
        ("v6e:4x2", "no v6e slice"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Topology.parse(name)


def test_peak_is_that_of_all_chips() -> None:
    assert Topology.parse("v5p:4x4x4").peak_flops == 64 * 459e12
