"""Code as a user may write it and name it in a config, each with one thing wrong; and a source with nothing wrong."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax


class Ids:
    """Windows of a text: right, or wrong as it is told."""

    def __init__(self, count: int = 900, length: int = 33, dtype: str = "uint8", highest: int = 255) -> None:
        self.count, self.length, self.dtype, self.highest = count, length, dtype, highest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.linspace(0, self.highest, self.length).astype(self.dtype)


class Raising(Ids):
    def __getitem__(self, index: int) -> np.ndarray:
        raise KeyError("shard-7")


class Unsized:
    pass


def not_one() -> dict[str, int]:
    return {}


def forgetful() -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: ({}, state))


def needs_loss() -> optax.GradientTransformation:
    return optax.contrib.reduce_on_plateau()


def noisy() -> optax.GradientTransformation:
    return optax.add_noise(0.1, 0.5, jax.random.key(0))


class Scores:
    """Returns what it is told, or raises it."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def __call__(self, model: Any, step: int) -> Any:
        if self.result is None:
            raise RuntimeError("no scores today")
        return self.result


def moment() -> optax.GradientTransformation:
    return optax.trace(0.9)
