"""A global model of a few numbers, and outer gradients for it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.merge import MergeConfig
from diloco_jax.core.outer import OuterConfig, make_outer
from diloco_jax.core.shards import share
from diloco_jax.protocol.effects import Merge, Part
from diloco_jax.runtime.model.arithmetic import local_arithmetic
from diloco_jax.runtime.model.global_model import GlobalModel, Merged
from diloco_jax.runtime.model.model_share import Setup

SHAPES = {"layer/kernel": (4, 6), "layer/bias": (6,), "embed": (8, 4)}
FRAGMENTS = 2


def make_model(
    outer: OuterConfig | None = None, wire_down: codec.Format = "float32", shards: int = 1, **merge: float
) -> GlobalModel:
    """The model with its initial values."""
    rng = np.random.default_rng(7)
    parameters = {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    plan, settings = plan_fragments(SHAPES, FRAGMENTS), MergeConfig(**merge)  # type: ignore[arg-type]
    how = make_outer(outer or OuterConfig(learning_rate=0.7, momentum=0.9))
    shares = share(plan, settings, shards, cut=how.elementwise)
    arithmetic = local_arithmetic(Setup(shares, how, "float32", wire_down, 2))
    factor = settings.outlier_factor
    return GlobalModel(plan, parameters, arithmetic, weights="tokens2_per_step", outlier_factor=factor)


def gradient(model: GlobalModel, fragment_id: int, seed: int, norm: float = 1.0) -> bytes:
    """An encoded outer gradient of this norm."""
    rng = np.random.default_rng(seed)
    values = {key: rng.normal(size=shape) for key, shape in model.plan.fragments[fragment_id].keys_shapes}
    length = math.sqrt(sum(float((value**2).sum()) for value in values.values()))
    return codec.encode({key: (value * norm / length).astype(np.float32) for key, value in values.items()}, "float32")


def order(model: GlobalModel, step: int, fragment_id: int, names: str, steps: int = 1) -> Merge:
    """The protocol's wish to merge these learners' values."""
    version = model.versions[fragment_id]
    return Merge(step, fragment_id, tuple(Part(name, step, steps, 64 * steps, version, 4) for name in names))


def merge(model: GlobalModel, step: int, payloads: Mapping[str, bytes], fragment_id: int = 0, steps: int = 1) -> Merged:
    """A round from its values to its publication."""
    merged = model.merge(order(model, step, fragment_id, "".join(sorted(payloads)), steps), payloads)
    model.publish(merged)
    return merged
