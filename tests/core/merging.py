"""A merge in a few lines of NumPy, values to merge, and a round of the real one."""

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from diloco_jax.core.codec import Format, decode, encode
from diloco_jax.core.layout import Layout, Piece, make_layout
from diloco_jax.core.merge import Method, Rule
from diloco_jax.core.outer import Nesterov, Outer
from diloco_jax.core.passes import Merger, State, Update, values_of

# no multiple of a block, one element, exactly one block, one more
SHAPES = {"a/kernel": (30, 70), "b": (1,), "embed": (64, 4), "z": (257,)}
FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "int8", "int4", "int2", "ternary")
NESTEROV = Nesterov(0.7, 0.9)


def layout_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Layout:
    return make_layout(Piece(*each) for each in shapes.items())


def random_values(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


def payload_of(values: Mapping[str, np.ndarray], format: Format) -> np.ndarray:
    return np.frombuffer(encode(values, format), np.uint8)


def make_merger(layout: Layout, up: Format, down: Format, outer: Outer = NESTEROV, method: str = "average") -> Merger:
    return Merger(layout, rules_of(layout, *[method] * len(layout.pieces)), outer, up, down)


def round_of(merger: Merger, payloads: Sequence[np.ndarray], weights: np.ndarray, state: State) -> Update:
    """A whole round of values against the newest version."""
    values = values_of(payloads)
    return merger.update(values, merger.inspect(values), weights, state)


def rules_of(layout: Layout, *methods: Method) -> list[Rule]:
    """Rules for pieces that are no stacks."""
    return [Rule(how, piece.size) for how, piece in zip(methods, layout.pieces, strict=True)]


def share_of(payload: np.ndarray, layout: Layout, format: Format, weight: np.float32) -> np.ndarray:
    """weight * decoded payload, flat, with the roundings of the kernels: (weight * scale) * code."""
    found = []
    for piece, place in zip(layout.pieces, layout.places(format), strict=True):
        codes = payload[place.codes : place.end]
        if format in ("float32", "bfloat16"):
            dtype = np.dtype(np.float32) if format == "float32" else np.dtype(ml_dtypes.bfloat16)
            found.append(weight * codes.copy().view(dtype).astype(np.float32))
            continue
        levels = {"int8": 256, "int4": 16, "int2": 4, "ternary": 3}[format]
        codes = codes.reshape(-1, {"int8": 256, "int4": 128, "int2": 64, "ternary": 52}[format]).astype(np.int64)
        parts = [codes // levels**k % levels for k in range(-(-256 // codes.shape[1]))]
        # Codes in base 3 are stored plus one, others in two's complement.
        signed = [p - 1 if levels == 3 else np.where(p >= levels // 2, p - levels, p) for p in parts]
        codes = np.concatenate(signed, axis=1)[:, :256]
        scales = payload[place.scales : place.codes].copy()
        scales = scales.view(ml_dtypes.bfloat16 if format == "ternary" else np.float32).astype(np.float32)
        factors = weight * scales
        found.append((factors[:, None] * codes.astype(np.float32)).reshape(-1)[: piece.size])
    return np.concatenate(found)


def reference(
    layout: Layout, payloads: Sequence[np.ndarray], weights: np.ndarray, state: State, up: Format, down: Format
) -> tuple[State, bytes]:
    """The next state and the step, by Nesterov's rule with the constants of NESTEROV, in float32."""
    rate, momentum = np.float32(0.7), np.float32(0.9)
    mean = np.zeros(layout.size, np.float32)
    for payload, weight in zip(payloads, weights.astype(np.float32), strict=True):
        mean = mean + share_of(payload, layout, up, weight)
    trace = mean + momentum * state.outer["trace"]
    wanted = -rate * (mean + momentum * trace)
    if down == "float32":
        return State(state.value + wanted, {"trace": trace}, state.residual), b""
    wanted = state.residual + wanted
    step = encode(layout.views(wanted), down)
    keys_shapes = [(piece.key, piece.shape) for piece in layout.pieces]
    decoded = layout.flat(decode(step, keys_shapes, down))
    return State(state.value + decoded, {"trace": trace}, wanted - decoded), step


def bits(state: State) -> list[bytes]:
    return [state.value.tobytes(), state.residual.tobytes(), *(leaf.tobytes() for leaf in state.outer.values())]


def level_ties() -> tuple[np.ndarray, np.ndarray]:
    """Mean magnitudes whose level of ternary is halfway between two numbers of bfloat16, or next to it, and levels."""
    means = np.float32(1) + np.arange(2**21, dtype=np.float32) * np.float32(2**-23)
    ends = (means * np.float32(1.5336)).view(np.uint32) & 0xFFFF
    means = np.concatenate([means[ends == end][:64] for end in (0x7FFF, 0x8000, 0x8001)])
    return means, means * np.float32(1.5336)


def code_ties() -> tuple[np.ndarray, np.ndarray]:
    """Blocks of ternary with elements of half their scale (0, 2) and one a little larger (1), and the scales."""
    scales = level_ties()[1].astype(ml_dtypes.bfloat16).astype(np.float32)
    rows = np.repeat(scales, 256).reshape(-1, 256)
    rows[:, :128] *= np.float32(0.5)
    # The mean magnitude is then scale / 1.5336.
    rows[:, 128:] *= np.float32(0.8042)
    rows[:, 1] = np.nextafter(rows[:, 1], np.float32(9))
    rows[:, 2] *= -1
    return rows, scales
