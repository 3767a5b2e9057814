"""A callback that fails, for runs with real processes."""

from typing import Any


class Raising:
    """Fails at the first call in every process."""

    def on_step(self, *arguments: Any) -> None:
        raise RuntimeError("out of order")

    on_round = on_step
