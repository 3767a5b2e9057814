"""The syncer's numbers: global fragments, their recent versions, outer state, and the merge that makes new ones.

The protocol decides who is merged (Merge); this file computes the result with `core`. It holds no rule of who or when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import FragmentPlan, put, take
from diloco_jax.core.merge import MergeConfig, WeightScheme, merge_fragment, merge_method, token_weights
from diloco_jax.core.outer import OuterOptimizer
from diloco_jax.protocol.messages import Merge

Values = dict[str, np.ndarray]


class GlobalModel:
    """Global value of every fragment, with the versions that learners may still refer to.

    Args:
        plan: the partition of the model.
        parameters: initial values by path, float32, unsharded.
        outer: the outer optimizer; its state is kept per fragment.
        merge: which tensors are merged how.
        weights: a learner's weight in a merge.
        wire_up: format of the learners' outer gradients.
        anchor_history: versions of a fragment that are kept.
    """

    def __init__(
        self,
        plan: FragmentPlan,
        parameters: Mapping[str, np.ndarray],
        outer: OuterOptimizer,
        *,
        merge: MergeConfig,
        weights: WeightScheme,
        wire_up: codec.Format,
        anchor_history: int,
    ) -> None:
        self.plan = plan
        self._outer = outer
        self._weights: WeightScheme = weights
        self._wire_up: codec.Format = wire_up
        self._anchor_history = anchor_history
        self._parameters = {path: np.array(value, np.float32) for path, value in parameters.items()}
        self._methods = [
            {piece.key: merge_method(piece.path, shape, merge) for piece, shape in zip(f.slices, f.shapes, strict=True)}
            for f in plan.fragments
        ]
        values = [take(self._parameters, fragment) for fragment in plan.fragments]
        self._values: list[dict[int, Values]] = [{0: value} for value in values]
        self._states: list[Any] = [outer.init(value) for value in values]
        self._payloads = [codec.encode(value, "float32") for value in values]

    def payload(self, fragment_id: int) -> bytes:
        """The newest version as it travels to learners: float32, so that anchors are equal bit for bit."""
        return self._payloads[fragment_id]

    def publish(self, fragment_id: int, payload: bytes) -> None:
        """Let `payload` return a merge's result: together with the new version, so that no old one has new bytes."""
        self._payloads[fragment_id] = payload

    def parameters(self) -> Values:
        """The whole model, newest version of every fragment, as new arrays by path."""
        parameters: Mapping[str, np.ndarray] = self._parameters
        for fragment, versions in zip(self.plan.fragments, self._values, strict=True):
            parameters = put(parameters, fragment, versions[max(versions)])
        return dict(parameters)

    def merge(self, order: Merge, payloads: Mapping[str, bytes | memoryview]) -> tuple[list[str], bytes]:
        """Apply one round: outer gradients, merge, outer update (paper, Alg. 2 and App. D.2).

        Delta_m = Theta - theta_m, where the learner sent theta_base - theta_m against the version it held; if that is
        not the newest any more, Theta - theta_base is added.

        Args:
            order: the protocol's decision.
            payloads: encoded outer gradient of each part, by learner.

        Returns:
            Reasons why parts were left out (not finite, or not decodable), one line each, and the new payload for
            `publish`.
        """
        fragment = self.plan.fragments[order.fragment_id]
        versions = self._values[order.fragment_id]
        newest = versions[max(versions)]
        gradients, tokens, steps, left_out = [], [], [], []
        for part in order.parts:
            try:
                gradient = codec.decode(payloads[part.learner_id], fragment.keys_shapes, self._wire_up)
            except ValueError as error:
                left_out.append(f"{part.learner_id} in round {order.global_step}: {error}")
                continue
            if not all(np.isfinite(value).all() for value in gradient.values()):
                left_out.append(f"{part.learner_id} in round {order.global_step}: NaN or infinity in its value")
                continue
            base = versions[part.base_version]
            if base is not newest:
                gradient = {key: (newest[key] - base[key]) + value for key, value in gradient.items()}
            gradients.append(gradient)
            tokens.append(part.tokens)
            steps.append(part.steps)
        value = newest
        if gradients:
            shares = token_weights(tokens, steps, self._weights)
            merged = merge_fragment(gradients, shares, self._methods[order.fragment_id])
            state = self._states[order.fragment_id]
            value, self._states[order.fragment_id] = self._outer.step(newest, merged, state)
        versions[order.global_step] = value
        for old in sorted(versions)[: -self._anchor_history]:
            del versions[old]
        return left_out, codec.encode(value, "float32")
