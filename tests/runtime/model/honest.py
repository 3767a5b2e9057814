"""Learners as a merge sees them: honest ones that train with AdamW, and what goes wrong with a value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.merge import MergeConfig
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.runtime.model.global_model import GlobalModel, Merged
from tests.runtime.models import model_of

Arrays = dict[str, np.ndarray]


def make_model(parameters: Mapping[str, np.ndarray], fragments: int) -> GlobalModel:
    """A model whose versions are the learners' average: outer SGD with rate 1, float32 both ways."""
    plan = plan_fragments({path: value.shape for path, value in parameters.items()}, fragments)
    average, plain = MergeConfig(method="average"), OuterConfig(learning_rate=1.0, momentum=0.0)
    return model_of(plan, parameters, plain, average, anchor_history=4)


class Sent(NamedTuple):
    """A learner's outer gradient of a fragment, as slices by key."""

    values: Arrays
    steps: int
    base: int


def merge(model: GlobalModel, number: int, fragment_id: int, sent: Mapping[str, Sent]) -> Merged:
    """A round from its values to its publication."""
    parts = tuple(
        Contribution(name, number, one.steps, 64 * one.steps, one.base, 4) for name, one in sorted(sent.items())
    )
    payloads = {name: codec.encode(one.values, "float32") for name, one in sent.items()}
    merged = model.merge(Merge(number, fragment_id, parts), payloads)
    model.publish(merged)
    return merged


class AdamW:
    """A learner with dense tensors and an embedding; few rows of the embedding are in use at a time.

    Args:
        parameters: that it begins with; of a path with "embed" only the rows in use have gradients.
        b2: of the second moment.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray], rng: np.random.Generator, rate: float, b2: float, decay: float
    ) -> None:
        self.parameters = {path: value.copy() for path, value in parameters.items()}
        self._rng, self._rate, self._b2, self._decay = rng, rate, b2, decay
        self._m = {path: np.zeros_like(value) for path, value in parameters.items()}
        self._v = {path: np.zeros_like(value) for path, value in parameters.items()}
        self._drift = {path: rng.normal(size=value.shape) for path, value in parameters.items()}
        self._count = 0

    def step(self, rows: Sequence[int]) -> None:
        """One inner step on a batch with these tokens."""
        self._count += 1
        for path, value in self.parameters.items():
            gradient = (self._drift[path] + self._rng.normal(size=value.shape)).astype(np.float32)
            if "embed" in path:
                unused = np.ones(len(value), bool)
                unused[list(rows)] = False
                gradient[unused] = 0
            m, v = self._m[path], self._v[path]
            m += 0.1 * (gradient - m)
            v += (1 - self._b2) * (gradient**2 - v)
            fixed = m / (1 - 0.9**self._count) / (np.sqrt(v / (1 - self._b2**self._count)) + 1e-8)
            self.parameters[path] = value - (self._rate * (fixed + self._decay * value)).astype(np.float32)


def bursts(rng: np.random.Generator, rows: int) -> Iterator[list[int]]:
    """Tokens of every step: rare ones rest for hundreds of steps, until a text comes by that is full of them."""
    while True:
        for _ in range(int(rng.exponential(700))):
            yield []
        share = rng.uniform(0.05, 0.5)
        for _ in range(int(rng.integers(1, 48))):
            yield list(np.flatnonzero(rng.random(rows) < share))
