"""The description of a model as text: JSON, {path: [shape, form, stack]} in ascending order of the paths."""

import json
from collections.abc import Collection, Mapping
from typing import get_args

from diloco_jax.core.kinds import Form, Kind
from diloco_jax.transport.endpoints.greeting import LAYOUT_BYTES_MAX

TENSORS_MAX = 20_000
PATH_LENGTH_MAX = 500
# A part of a path is the name of a folder in every checkpoint.
PART_BYTES_MAX = 255
# TensorStore keeps such names for itself.
LOCK = ".__lock"
# Names in the folder of a tensor: its chunks and their description.
OF_TENSOR = ("c", "zarr.json")
# The name of the file that describes all tensors of a checkpoint.
OF_CHECKPOINT = "_METADATA"


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
            _check_path(path)
            sound = all(isinstance(n, int) and n >= 0 for n in (*shape, stack)) and stack <= len(shape)
            if not sound or form not in get_args(Form):
                raise ValueError(f"tensor {path[:80]!r} of shape {shape}, form {form!r} and stack {stack}")
            shapes[path], kinds[path] = tuple(shape), Kind(form, stack)
        _check_folders(shapes)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the layout describes no model: {error}") from error
    return shapes, kinds


def _check_path(path: str) -> None:
    """Check that a tensor can be stored under its path; ValueError otherwise.

    The syncer uses paths from islands as folders, so none may lead out of the folder of a checkpoint.
    """
    # Half a surrogate pair cannot be sent or stored.
    parts = [part.encode() for part in path.split("/")]
    if len(path) > PATH_LENGTH_MAX or max(map(len, parts)) > PART_BYTES_MAX:
        raise ValueError(
            f"tensor {path[:80]!r}... has a path of {len(path)} characters; use at most {PATH_LENGTH_MAX}, and "
            f"{PART_BYTES_MAX} bytes between two slashes"
        )
    odd = any(letter == "\\" or letter < " " for letter in path)
    if odd or not {b"", b".", b".."}.isdisjoint(parts) or parts[0] == OF_CHECKPOINT.encode() or LOCK in path:
        raise ValueError(
            f"tensor {path!r} cannot be stored under this path; rename it: its parts between slashes may not be empty, "
            f"'.' or '..', nor contain control characters, backslashes or {LOCK!r}, and the first one may not be "
            f"{OF_CHECKPOINT!r}"
        )


def _check_folders(paths: Collection[str]) -> None:
    """Check that no tensor would be stored over the chunks of another one; ValueError otherwise."""
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts)):
            if parts[count] in OF_TENSOR and (outer := "/".join(parts[:count])) in paths:
                raise ValueError(f"tensors {outer!r} and {path!r} would have the same files; rename one of them")
