"""Merges, cuts and codes that lost against those of the package, so that their experiments stay repeatable.

They replace functions of the package within the process of one training. A schedule's `instead` names them:

  unit      the unit of RDA's norms and directions: `row` of a matrix, or `fragment` with all of its matrices
  cut       the cut into fragments: `layer`, `tensor` (whole tensors in their order), `whole` (whole tensors, evenly)
  bits      bits per element on the wire, both ways: 4 (the package's int4), 2 (the best four levels for a normal
            distribution), 1 (signs); the scale is the mean square or mean magnitude of 256 elements
  feedback  false: the error of rounding is lost
  momentum  true: the slow momenta of a round's islands are averaged too (momenta.py)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diloco_jax.core import codec, fragments, merge, passes
from diloco_jax.core.kinds import Kind
from diloco_jax.core.merge import MergeConfig, Rule, coefficients
from diloco_jax.tools.replay.replica import Replica
from experiments.momenta import average_momenta

KNOWN = ("unit", "cut", "bits", "feedback", "momentum")
# The levels and the threshold of the best four levels (Max, 1960).
INNER, OUTER, BETWEEN = 0.4528, 1.5104, 0.9816


def put_in_place(wanted: Mapping[str, Any]) -> None:
    """Replace the named functions of the package in this process.

    Raises:
        ValueError: a name is unknown.
    """
    if unknown := sorted(set(wanted) - set(KNOWN)):
        raise ValueError(f"instead has '{unknown[0]}'; use {', '.join(KNOWN)}")
    if "unit" in wanted:
        {"row": _by_row, "fragment": _by_fragment}[wanted["unit"]]()
    if "cut" in wanted:
        fragments.FragmentConfig.plan = _cut_by(wanted["cut"])  # type: ignore[method-assign]
    if "bits" in wanted:
        _with_codes(wanted["bits"], feedback=wanted.get("feedback", True))
    if wanted.get("momentum"):
        average_momenta()


def payload_bytes(elements: int, bits: int) -> int:
    """Return the encoded bytes of this many elements; each 256 elements share a float32 scale."""
    return math.ceil(elements / codec.BLOCK) * (4 + codec.BLOCK * bits // 8)


def coded(values: np.ndarray, bits: int) -> np.ndarray:
    """Round float32[n] to codes of this many bits, and return the decoded float32[n]."""
    if bits == 4:
        codes, scales = codec.quantize_on_cpu(values, "int4")
        return codec.dequantize_on_cpu(codes, scales, values.size, "int4")
    blocks = codec.to_blocks(np, values)
    signs = np.where(blocks < 0, np.float32(-1), np.float32(1))
    if bits == 1:
        found = signs * np.abs(blocks).mean(1, keepdims=True)
    else:
        scale = np.sqrt((blocks**2).mean(1, keepdims=True))
        found = signs * scale * np.where(np.abs(blocks) < BETWEEN * scale, np.float32(INNER), np.float32(OUTER))
    return found.astype(np.float32).reshape(-1)[: values.size]


def _by_row() -> None:
    def rule(path: str, shape: tuple[int, ...], kind: Kind, config: MergeConfig) -> Rule:
        usual = original(path, shape, kind, config)
        return usual if usual.method == "average" else Rule(usual.method, shape[-1])

    original, merge.merge_rule = merge.merge_rule, rule


def _by_fragment() -> None:
    def shares(self: passes.Merger, products: Any, weights: Any) -> list[Any]:
        usual, rules = original(self, products, weights), self._rules
        matrices = [
            each.sum(0)
            for leaf, each in zip(self.layout.leaves, products, strict=True)
            if rules[leaf.piece].method == "rda"
        ]
        if not matrices:
            return usual
        ours = coefficients(np.sum(matrices, axis=0), weights, "rda")
        return [
            np.tile(ours, (len(own), 1)) if rule.method == "rda" else own
            for own, rule in zip(usual, rules, strict=True)
        ]

    original, passes.Merger.shares = passes.Merger.shares, shares  # type: ignore[method-assign]


def _cut_by(way: str) -> Callable[..., fragments.FragmentPlan]:
    def plan(self: Any, shapes: Any, kinds: Any, num_fragments: int, groups: Any = ()) -> fragments.FragmentPlan:
        pieces = [
            (fragments.Slice(path, fragments.WHOLE, 0, shape[0]), shape) for path, shape in sorted(shapes.items())
        ]
        if way == "whole":
            members = fragments._dealt(pieces, num_fragments)
        else:
            layers = list(dict.fromkeys(_layer_of(piece.path) for piece, _ in pieces))
            members = [[] for _ in range(num_fragments if way == "tensor" else len(layers))]
            for number, each in enumerate(pieces):
                at = number * num_fragments // len(pieces) if way == "tensor" else layers.index(_layer_of(each[0].path))
                members[at].append(each)
        if len(members) != num_fragments:
            raise ValueError(
                f"protocol.num_fragments is {num_fragments}, but the model has {len(members)} layers; use that number"
            )
        if not all(members):
            raise ValueError(f"{len(pieces)} tensors are too few for {num_fragments} fragments; lower num_fragments")
        made = tuple(fragments._fragment(number, content) for number, content in enumerate(members))
        return fragments.FragmentPlan(made, dict(sorted(shapes.items())), kinds, f"{way:0<16}", (num_fragments,))

    return plan


def _layer_of(path: str) -> str:
    head, *rest = path.split("/")
    return f"{head}/{rest[0]}" if rest and rest[0].isdigit() else "others"


def _with_codes(bits: int, *, feedback: bool) -> None:
    """Round the values that learners send and the changes that the syncer sends, on a wire of float32."""
    kept: dict[Any, np.ndarray] = {}

    def rounded(key: Any, values: np.ndarray) -> np.ndarray:
        wanted = values + kept[key] if key in kept else values
        found = coded(wanted, bits)
        if feedback:
            kept[key] = wanted - found
        return found

    def value(self: Replica, fragment_id: int, local_step: int) -> bytes:
        payload = sends(self, fragment_id, local_step)
        layout = self._trainer.fragments[fragment_id].keys_shapes
        decoded = codec.decode(payload, layout, "float32")
        incarnation = self.incarnation.learner_id, fragment_id
        return codec.encode(
            {key: rounded((*incarnation, key), each.reshape(-1)).reshape(each.shape) for key, each in decoded.items()},
            "float32",
        )

    def apply(self: passes.Merger, values: Any, shares: Any, state: passes.State) -> passes.Update:
        made = applies(self, values, shares, state)
        new = np.empty_like(state.value)
        for number, leaf in enumerate(self.layout.leaves):
            here = self.layout.where(leaf)
            delta = made.state.value[here] - state.value[here]
            new[here] = state.value[here] + rounded((id(self), number), delta)
        return made._replace(state=made.state._replace(value=new), digests=self.layout.leaf_digests(new))

    sends, Replica.value = Replica.value, value  # type: ignore[method-assign]
    applies, passes.Merger.apply = passes.Merger.apply, apply  # type: ignore[method-assign]
