"""Numbers of the user's own about the global model (`evaluation.module`), without which the run goes on."""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from diloco_jax.settings.run import EvaluationConfig
from diloco_jax.training.named import failure, make_named

NAMES_MAX = 32
NAME_MAX = 64  # characters

log = logging.getLogger(__name__)


class Scorer:
    """An object of the class that a config names, if it does; ValueError if it cannot be made, or cannot be called."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._module, self._timeout_s, self.alarms = config.module, config.timeout_s, list[str]()
        self._object = make_named("evaluation", config.module, config.args) if config.module else None
        if config.module and not callable(self._object):
            kind = f"a {type(self._object).__name__} without __call__(self, model, step)"
            raise ValueError(f"evaluation.module '{config.module}' makes {kind}, which returns numbers by name; add it")

    def scores(self, model: Callable[[], nnx.Module], global_step: int) -> dict[str, float | None]:
        """Return what the object says of a model, None for what is not finite; nothing if it fails or hangs."""
        if self._object is None:
            return {}
        score, found, errors = self._object, list[dict[str, float | None]](), list[BaseException]()

        def call() -> None:
            try:
                found.append(_checked(score(model(), global_step)))
            except (Exception, SystemExit) as error:
                errors.append(error)

        thread = threading.Thread(target=call, name="scores", daemon=True)  # one that hangs must not hold the run's end
        thread.start()
        thread.join(self._timeout_s)
        if found:
            return found[0]
        if not errors:
            self._object = None  # its thread may still be there
        why = f"evaluation.module '{self._module}' took more than evaluation.timeout_s = {self._timeout_s:g} s"
        if not self.alarms:
            told = failure("evaluation.module", self._module, errors[0]) if errors else why
            self.alarms.append(f"{told}; the run goes on without its numbers")
            log.warning(self.alarms[0], exc_info=errors[0] if errors else None)
        return {}


def _checked(found: Any) -> dict[str, float | None]:
    if not isinstance(found, Mapping) or len(found) > NAMES_MAX:
        raise TypeError(f"it returned {str(found)[:NAME_MAX]}; return a dict of at most {NAMES_MAX} numbers by name")
    for name in found:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_MAX):
            raise TypeError(f"it named a number {str(name)[:NAME_MAX]!r}; use 1 to {NAME_MAX} printable characters")
    values = {name: float(value) for name, value in found.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
