"""The description of a model as text: JSON, {path: [shape, form, stack]} in ascending order of the paths."""

import json
from collections.abc import Mapping
from typing import get_args

from diloco_jax.core.kinds import Form, Kind
from diloco_jax.transport.endpoints.greeting import LAYOUT_BYTES_MAX

TENSORS_MAX = 20_000
PATH_LENGTH_MAX = 500


def layout_of(shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]) -> str:
    """Return the description of a model as JSON."""
    rows = {path: [list(shapes[path]), kinds[path].form, kinds[path].stack] for path in sorted(shapes)}
    return json.dumps(rows, separators=(",", ":"))


def read_layout(layout: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Kind]]:
    """Parse a description of `layout_of` into shapes and kinds; ValueError if it is malformed or too large."""
    if len(layout) > LAYOUT_BYTES_MAX:
        raise ValueError(f"a layout of {len(layout)} characters is too long: at most {LAYOUT_BYTES_MAX}")
    shapes, kinds = {}, {}
    try:
        rows = json.loads(layout)
        if not 0 < len(rows) <= TENSORS_MAX:
            raise ValueError(f"{len(rows)} tensors; use 1 to {TENSORS_MAX}")
        for path, (shape, form, stack) in rows.items():
            # Half a surrogate pair cannot be sent or stored.
            path.encode()
            sound = all(isinstance(n, int) and n >= 0 for n in (*shape, stack)) and stack <= len(shape)
            if not sound or form not in get_args(Form) or not 0 < len(path) <= PATH_LENGTH_MAX:
                raise ValueError(f"tensor {path[:80]!r} of shape {shape}, form {form!r} and stack {stack}")
            shapes[path], kinds[path] = tuple(shape), Kind(form, stack)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the layout describes no model: {error}") from error
    return shapes, kinds
