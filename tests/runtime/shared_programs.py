"""Islands of one process that share what is compiled, for tests that start many equal ones and do not ask for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import jax
import pytest

from diloco_jax.core.codec import Format
from diloco_jax.training import island
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.exchange import Exchange


class SharedBlueprint(Blueprint):
    """A blueprint whose islands share their programs; each island has its own state, anchors and residuals."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._steps: dict[str, jax.stages.Lowered] = {}
        self._exchanges: dict[tuple[Format, bool], Exchange] = {}

    def lower_step(self, shapes: Any) -> jax.stages.Lowered:
        """Lower a step once; JAX compiles the result once."""
        key = repr(sorted((name, each.shape, each.dtype) for name, each in shapes.items()))
        if key not in self._steps:
            self._steps[key] = super().lower_step(shapes)
        return self._steps[key]

    def exchange(self, wire: Format, rebase: bool) -> Exchange:
        """Return a new exchange with the programs of those before it."""
        if (wire, rebase) not in self._exchanges:
            self._exchanges[wire, rebase] = super().exchange(wire, rebase)
        made = copy(self._exchanges[wire, rebase])
        made.held = {}
        return made


@contextmanager
def sharing() -> Iterator[None]:
    """Give islands with equal settings one blueprint."""
    made: dict[str, SharedBlueprint] = {}

    def blueprint(*arguments: Any, **named: Any) -> SharedBlueprint:
        key = repr((arguments, named))
        if key not in made:
            made[key] = SharedBlueprint(*arguments, **named)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(island, "Blueprint", blueprint)
        yield
