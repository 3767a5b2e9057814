"""The states of loaders as JSON: dicts and lists of numbers, texts, bytes and arrays, exactly, without pickle."""

import base64
import json
import sys
from math import prod
from typing import Any

import numpy as np

# A dict with this key is not a dict of the state, but one of the kinds below.
KIND = "~"
# Nested containers in one state.
DEPTH_MAX = 64


def pack(value: Any) -> bytes:
    """Return a state as JSON; ValueError names a value that JSON cannot hold."""
    return json.dumps(_plain(value, "state", DEPTH_MAX), separators=(",", ":")).encode()


def unpack(content: bytes) -> Any:
    """Return the state that `pack` got; ValueError if the bytes hold none."""
    try:
        return _value(json.loads(content))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"these bytes are not the state of a loader ({error!r})") from error


def _plain(value: Any, path: str, depth: int) -> Any:
    if not depth:
        raise ValueError(f"{path[:200]} is nested deeper than {DEPTH_MAX} levels")
    below = depth - 1
    if value is None or isinstance(value, bool | int | float | str):
        # A subclass, such as an enumeration's, would come back as another type.
        plain: Any = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        return value if plain is None else plain(value)
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and KIND not in value:
            return {key: _plain(each, f"{path}[{key!r}]", below) for key, each in value.items()}
        return {KIND: "dict", "items": [_plain([*each], f"{path}[{each[0]!r}]", below) for each in value.items()]}
    if isinstance(value, list):
        return [_plain(each, f"{path}[{number}]", below) for number, each in enumerate(value)]
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": _plain([*value], path, below)}
    if isinstance(value, bytes):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    return _plain_array(value, path)


def _plain_array(value: Any, path: str) -> dict[str, Any]:
    tensor = type(value).__module__ == "torch" and type(value).__name__ == "Tensor"
    array = value.detach().cpu().numpy() if tensor else value
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.hasobject or not array.dtype.isbuiltin:
        raise ValueError(
            f"{path[:200]} is a {type(value).__name__}; a loader's state may hold numbers, texts, bytes, arrays, and "
            "dicts, lists and tuples of them"
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    kind = "tensor" if tensor else "array" if isinstance(array, np.ndarray) else "scalar"
    return {KIND: kind, "dtype": array.dtype.str, "shape": [*array.shape], "data": data}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if KIND not in plain:
        return {key: _value(each) for key, each in plain.items()}
    match plain[KIND]:
        case "dict":
            return {_value(key): _value(each) for key, each in plain["items"]}
        case "tuple":
            return tuple(_value(plain["items"]))
        case "bytes":
            return base64.b64decode(plain["data"], validate=True)
        case "array" | "scalar" | "tensor" as kind:
            return _array(plain, kind)
    raise ValueError(f"a state of a loader has no values of the kind {plain[KIND]!r}")


def _array(plain: dict[str, Any], kind: str) -> Any:
    dtype, shape = np.dtype(plain["dtype"]), [int(size) for size in plain["shape"]]
    data = base64.b64decode(plain["data"], validate=True)
    if dtype.hasobject or min(shape, default=0) < 0 or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError("an array in a loader's state is damaged")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    if kind == "tensor":
        torch: Any = sys.modules.get("torch")
        if torch is None:
            raise ValueError("the loader's state holds a tensor of PyTorch, which this program has not imported")
        return torch.from_numpy(array)
    return array if kind == "array" else array[()]
