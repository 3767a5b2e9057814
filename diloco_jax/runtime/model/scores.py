"""Numbers of the user's own about the global model (`evaluation.module`), without which the run goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from diloco_jax.settings.run import EvaluationConfig
from diloco_jax.training.named import failure, make_named

NAMES_MAX = 32
NAME_MAX = 64  # characters

log = logging.getLogger(__name__)


class Scorer:
    """An object of the class that a config names; without one there are no scores.

    Attributes:
        alarms: the first error of that object, if there was one.

    Raises:
        ValueError: it cannot be made, or cannot be called.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self._module, self.alarms = config.module, list[str]()
        self._object = make_named("evaluation", config.module, config.args) if config.module else None
        if config.module and not callable(self._object):
            kind = f"a {type(self._object).__name__} without __call__(self, model, step)"
            raise ValueError(f"evaluation.module '{config.module}' makes {kind}, which returns numbers by name; add it")

    def scores(self, model: Callable[[], nnx.Module], global_step: int) -> dict[str, float | None]:
        """Return what the object says of a model, None for what is not finite; nothing if it fails."""
        if self._object is None:
            return {}
        try:
            return _checked(self._object(model(), global_step))
        except (Exception, SystemExit) as error:
            if not self.alarms:
                self.alarms.append(
                    f"{failure('evaluation.module', self._module, error)}; the run goes on without its numbers"
                )
                log.warning(self.alarms[0], exc_info=error)
            return {}


def _checked(found: Any) -> dict[str, float | None]:
    if not isinstance(found, Mapping) or len(found) > NAMES_MAX:
        raise TypeError(f"it returned {str(found)[:NAME_MAX]}; return a dict of at most {NAMES_MAX} numbers by name")
    for name in found:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_MAX):
            raise TypeError(f"it named a number {str(name)[:NAME_MAX]!r}; use 1 to {NAME_MAX} printable characters")
    values = {name: float(value) for name, value in found.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
