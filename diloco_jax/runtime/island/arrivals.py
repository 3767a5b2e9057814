"""Global fragments as they arrive: a whole value, or a step from the one that came before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment

Values = dict[str, np.ndarray]


class GlobalValues:
    """The newest value of each fragment that arrived, adopted or not. One thread at a time.

    Args:
        fragments: of the model.
        down: format of the steps.
    """

    def __init__(self, fragments: Sequence[Fragment], down: codec.Format) -> None:
        self._fragments = fragments
        self._down: codec.Format = down
        self._newest: dict[int, Values] = {}

    def read(self, message: GlobalFragment, payload: codec.Bytes) -> Values:
        """Return the value that a message brings; `keep` it, so that later steps apply to it.

        Raises:
            ValueError: there is no such fragment, the payload is of another length, or the value has another digest.
        """
        if not 0 <= message.fragment_id < len(self._fragments):
            raise ValueError(f"is none of the {len(self._fragments)} of this model")
        layout = self._fragments[message.fragment_id].keys_shapes
        if message.base == NO_VERSION:
            values = codec.decode(payload, layout, "float32")
        elif message.fragment_id not in self._newest:
            raise ValueError("is a step from a value that did not arrive")
        else:
            step = codec.decode(payload, layout, self._down)
            values = {key: value + step[key] for key, value in self._newest[message.fragment_id].items()}
        if value_digest(values) != message.digest:
            raise ValueError("arrived damaged")
        return values

    def keep(self, message: GlobalFragment, values: Values) -> None:
        """Let later steps of the fragment apply to this value."""
        self._newest[message.fragment_id] = values
