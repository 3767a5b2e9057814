"""The fragments of every shipped config are even, few, and whole where that matters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from diloco_jax.core.fragments import FINEST
from diloco_jax.settings.text import load
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import MeshConfig

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_fragments_of_a_shipped_config_are_even(path: Path) -> None:
    config = load(path)
    blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), 1, seed=0)
    count = config.protocol.num_fragments
    plan = config.fragments.plan(blueprint.shapes, blueprint.kinds, count)
    sizes = [fragment.num_elements for fragment in plan.fragments]
    share = math.ceil(sum(sizes) / count)
    assert max(sizes) <= 1.15 * sum(sizes) / count
    assert sum(len(fragment.slices) for fragment in plan.fragments) <= FINEST * count + len(blueprint.shapes)
    for piece in (piece for fragment in plan.fragments for piece in fragment.slices):
        shape, kind = blueprint.shapes[piece.path], blueprint.kinds[piece.path]
        if piece.axis >= 0:  # cut: a stack between layers, so that each has one norm, or what is larger than a share
            assert piece.axis == 0 if kind.stack else math.prod(shape) > share, piece.key
