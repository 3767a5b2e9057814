"""Global models of a few numbers, and of some leaves, and outer gradients for them."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan, Slice, plan_fragments
from diloco_jax.core.layout import whole
from diloco_jax.core.merge import MergeConfig, merge_rules
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.runtime.model.arithmetic import Arithmetic, Setup, outer_of
from diloco_jax.runtime.model.global_model import GlobalModel, Merged

SHAPES = {"layer/kernel": (4, 6), "layer/bias": (6,), "embed": (8, 4)}
OWN = "docs.examples.own_outer:decayed"  # outer.module
FRAGMENTS = 2
LEAFY = {"embed": (1 << 10, 600), "norm": (300,), **{f"layer_{n}/kernel": (64, 40 + n) for n in range(5)}}
LEAFY_PLAN: FragmentPlan = plan_fragments(LEAFY, 2)


def make_model(outer: OuterConfig | None = None, wire_down: codec.Format = "float32", **merge: float) -> GlobalModel:
    """The model with its initial values."""
    plan, settings = plan_fragments(SHAPES, FRAGMENTS), MergeConfig(**merge)  # type: ignore[arg-type]
    how = outer or OuterConfig(learning_rate=0.7, momentum=0.9)
    return model_of(plan, drawn(SHAPES), how, settings, down=wire_down)


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The initial values of a model."""
    rng = np.random.default_rng(7)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def model_of(
    plan: FragmentPlan,
    parameters: Mapping[str, np.ndarray],
    outer: OuterConfig,
    merge: MergeConfig | None = None,
    *,
    up: codec.Format = "float32",
    down: codec.Format = "float32",
    anchor_history: int = 2,
) -> GlobalModel:
    """A model in this process."""
    merge, how = merge or MergeConfig(), outer_of(outer, plan)
    layouts = tuple(map(whole, plan.fragments))
    arithmetic = Arithmetic(Setup(layouts, merge_rules(plan, merge), how, up, down, anchor_history))
    return GlobalModel(plan, parameters.items(), arithmetic, weights="tokens2_per_step", merge=merge)


Saved = tuple[dict[tuple[str, Slice], np.ndarray], dict[str, Any]]


def saved(model: GlobalModel) -> Saved:
    """What a snapshot holds of a model: arrays by group and slice, and plain values."""
    capture = model.capture()
    pieces = {(piece.group, piece.where): piece.value.copy() for piece in model.pieces(capture)}
    return pieces, json.loads(json.dumps(model.plain(capture)))


def go_on(model: GlobalModel, saved: Saved) -> None:
    """Let a model become what was saved."""
    model.load_saved(lambda group, where: saved[0][group, where], saved[1])


def leafy_payload(fragment_id: int, seed: int, format: codec.Format, size: float = 1e-3) -> bytes:
    """An encoded outer gradient of LEAFY_PLAN."""
    rng = np.random.default_rng(seed)
    shapes = LEAFY_PLAN.fragments[fragment_id].keys_shapes
    return codec.encode({key: (size * rng.normal(size=shape)).astype(np.float32) for key, shape in shapes}, format)


def gradient(model: GlobalModel, fragment_id: int, seed: int, norm: float = 1.0) -> bytes:
    """An encoded outer gradient of this norm."""
    rng = np.random.default_rng(seed)
    values = {key: rng.normal(size=shape) for key, shape in model.plan.fragments[fragment_id].keys_shapes}
    length = math.sqrt(sum(float((value**2).sum()) for value in values.values()))
    return codec.encode({key: (value * norm / length).astype(np.float32) for key, value in values.items()}, "float32")


def order(model: GlobalModel, step: int, fragment_id: int, names: str, steps: int = 1) -> Merge:
    """The protocol's wish to merge these learners' values."""
    version = model.versions[fragment_id]
    return Merge(step, fragment_id, tuple(Contribution(name, step, steps, 64 * steps, version, 4) for name in names))


def merge(model: GlobalModel, step: int, payloads: Mapping[str, bytes], fragment_id: int = 0, steps: int = 1) -> Merged:
    """A round from its values to its publication."""
    merged = model.merge(order(model, step, fragment_id, "".join(sorted(payloads)), steps), payloads)
    model.publish(merged)
    return merged
