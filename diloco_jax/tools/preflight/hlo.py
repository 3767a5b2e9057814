"""The work of a compiled program, read from its HLO text: matrix FLOPs, collectives, and transfers to the CPU.

The compiler's cost analysis counts the body of a loop once. This module counts every computation as often as it runs:
the body of a `while` as often as its condition allows, other computations as often as their callers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

DTYPE_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")
KERNEL = 'custom_call_target="tpu_custom_call"'
# Words in the targets of custom calls that exchange data with the CPU.
HOST_CALLS = ("MoveToHost", "MoveToDevice", "callback", "HostExecute")

_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation|async_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_BEGIN, _WAIT = "async-collective-start", "async-collective-done"
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")


class Tensor(NamedTuple):
    """An array type."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        return self.elements * DTYPE_BYTES.get(self.dtype, 1)


class Instruction(NamedTuple):
    """One line of a computation."""

    # Without the sign %.
    name: str
    # For example fusion.
    opcode: str
    # The text of its type.
    shape: str
    # The text between the parentheses, and the text behind them.
    operands: str
    attributes: str
    # Whether the computation returns it.
    root: bool

    @property
    def inputs(self) -> list[str]:
        """Return the names of the operands."""
        return _NAME.findall(self.operands)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the types of the result: an array, or the arrays of a tuple."""
        return _tensors(self.shape)


Computation = dict[str, Instruction]


class Collective(NamedTuple):
    """A collective operation of a program."""

    # One of COLLECTIVES.
    kind: str
    # The results on each device.
    results: tuple[Tensor, ...]
    # The number of runs in one run of the program.
    times: int
    # Whether start and end are separate instructions, so that a device computes in between.
    overlapped: bool = False

    @property
    def num_bytes(self) -> float:
        return sum(tensor.num_bytes for tensor in self.results)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.results)


class Program(NamedTuple):
    """The work of one run of a program on each device."""

    # FLOPs of dots and convolutions, 2 per multiply-add; products with padding and holes are not counted.
    matrix_flops: float
    collectives: tuple[Collective, ...]
    # The names of instructions that exchange data with the CPU while the program runs.
    host_transfers: tuple[str, ...]
    # The number of devices that run the program together.
    devices: int
    # The number of calls of hand-written kernels, whose FLOPs are unknown.
    kernels: int
    # The loops with an unknown number of runs, which count as one run.
    unread_loops: tuple[str, ...]

    @property
    def collective_counts(self) -> dict[str, int]:
        """Count the runs of collectives, by kind."""
        return self._sums(lambda each: each.times)

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Add up the bytes of results on each device, by kind."""
        return self._sums(lambda each: int(each.times * each.num_bytes))

    def _sums(self, of: Callable[[Collective], int]) -> dict[str, int]:
        kinds = sorted({each.kind for each in self.collectives})
        return {kind: sum(of(each) for each in self.collectives if each.kind == kind) for kind in kinds}


def read_program(text: str) -> Program:
    """Read the HLO text of a compiled program."""
    computations, entry = parse(text)
    runs, unread = _runs(computations, entry)
    overlapped, repeated = _asynchronous(computations)
    flops, kernels, collectives, transfers = 0.0, 0, [], []
    for name, times in runs.items():
        computation = computations[name]
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in ("dot", "convolution"):
                flops += times * matrix_flops(instruction, computation)
            elif kind in COLLECTIVES:
                if name not in repeated:
                    apart = name in overlapped or instruction.opcode != kind
                    collectives.append(_collective(instruction, kind, name, times)._replace(overlapped=apart))
            elif kind in HOST_TRANSFERS or (
                kind == "custom-call" and any(word in instruction.attributes for word in HOST_CALLS)
            ):
                transfers.append(f"{instruction.opcode} {instruction.name}")
            elif KERNEL in instruction.attributes:
                kernels += times
    devices = math.prod(int(n) for n in re.findall(r"\bnum_(?:partitions|replicas)=(\d+)", text[: text.find("\n")]))
    return Program(flops, tuple(collectives), tuple(transfers), devices, kernels, tuple(unread))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations by name, and the name of the first to run; ValueError if the text has none."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        # A brace alone does not end a computation, because lines of notes on kernels may start with one.
        if line == "}" or line.startswith("}, execution_thread"):
            current = None
        elif current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("the compiler's HLO text has no entry computation; is this jax too new for preflight?")
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    rest = line[start.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opened = rest.find("(")
    closed = _closing(rest, opened)
    return Instruction(
        start[2], rest[:opened], shape, rest[opened + 1 : closed], rest[closed + 1 :], start[1] is not None
    )


def _closing(text: str, opened: int) -> int:
    depth = 0
    for position in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _elements(shape: str) -> list[str]:
    """Split a tuple's type into its elements, which may be tuples themselves."""
    elements, begin, depth = [], 1, 0
    for position, sign in enumerate(shape):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        if (sign == "," and depth == 1) or (sign == ")" and not depth):
            elements.append(shape[begin:position])
            begin = position + 1
    return elements


def _tensors(shape: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(dtype, _dims(dims)) for dtype, dims in _ARRAY.findall(shape))


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size.lstrip("<=")) for size in text.split(",") if size)


def _runs(computations: Mapping[str, Computation], entry: str) -> tuple[Counter[str], list[str]]:
    """Count the runs of every computation, and list the loops with an unknown number of runs."""
    runs: Counter[str] = Counter()
    unread: list[str] = []

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for instruction in computations[name].values():
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = trip_count(instruction, computations[name], computations)
                if trips is None:
                    unread.append(instruction.name)
            for called in _called(instruction):
                if called in computations:
                    visit(called, times * (1 if trips is None else trips))

    visit(entry, 1)
    return runs, unread


def _asynchronous(computations: Mapping[str, Computation]) -> tuple[set[str], set[str]]:
    """Find the computations that start an asynchronous collective, and those that only repeat it while it runs.

    The compiler either gives the collective to another core, such as a sparse core, or cuts it into pieces: one starts
    it, some are fused with other work, and one waits for it.
    """
    overlapped, repeated = set[str](), {name for name in computations if name.startswith("async_collective_fusion")}
    for computation in computations.values():
        for instruction in computation.values():
            if instruction.opcode in ("async-start", "call-start") or instruction.name.startswith(_BEGIN):
                overlapped.update(_called(instruction))
            elif instruction.name.startswith(_WAIT):
                repeated.update(_called(instruction))
    return overlapped, repeated


def _called(instruction: Instruction) -> Iterator[str]:
    """Yield the computations that an instruction runs, except those of reductions, which have no matrix product."""
    yield from _CALLED.findall(instruction.attributes)
    for names in _BRANCHES.findall(instruction.attributes):
        yield from re.findall(r"[\w.\-]+", names)
    if instruction.opcode in ("call", "call-start"):
        yield from re.findall(r"\bto_apply=%?([\w.\-]+)", instruction.attributes)


def trip_count(loop: Instruction, computation: Computation, computations: Mapping[str, Computation]) -> int | None:
    """Return the runs of a `while` body, from the compiler's note or from its condition; None if both are unknown."""
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known[1])
    parts = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.attributes))
    condition, body = computations[parts["condition"]], computations[parts["body"]]
    before = computation.get(loop.inputs[0])
    compare = next((each for each in condition.values() if each.opcode == "compare"), None)
    if compare is None or before is None or before.opcode != "tuple":
        return None
    # The two compared numbers, and the positions in the loop's tuple of those that are counters.
    bounds, counters = [], []
    for name in compare.inputs:
        side = _source(condition, name)
        if side is not None and side.opcode == "get-tuple-element":
            counters.append(int(side.attributes.partition("index=")[2].partition(",")[0]))
            bounds.append(_number(computation, before.inputs[counters[-1]]))
        else:
            bounds.append(_number(condition, name))
    direction = re.search(r"\bdirection=(LT|LE|GT|GE)\b", compare.attributes)
    first, last = bounds
    step = _step(body, counters[0]) if counters else None
    if direction is None or first is None or last is None or not step:
        return None
    inclusive = direction[1] in ("LE", "GE")
    return max(0, math.ceil((abs(last - first) + inclusive) / abs(step)))


def _source(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction that makes a value, behind any copies of it."""
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = computation.get(instruction.inputs[0])
    return instruction


def _number(computation: Computation, name: str) -> int | None:
    instruction = _source(computation, name)
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.operands) if re.fullmatch(r"-?\d+", instruction.operands) else None


def _step(body: Computation, index: int) -> int | None:
    """Return the number that a loop adds to its counter, element `index` of its tuple."""
    root = next((each for each in body.values() if each.root), None)
    if root is None or root.opcode != "tuple":
        return None
    addition = _source(body, root.inputs[index])
    if addition is None or addition.opcode not in ("add", "subtract"):
        # The addition is part of a larger fusion. The counters of JAX's loops increase by one.
        return 1
    numbers = [number for name in addition.inputs if (number := _number(body, name)) is not None]
    return numbers[0] if numbers else None


def _collective(instruction: Instruction, kind: str, where: str, times: int) -> Collective:
    tensors, elements = instruction.tensors, _elements(instruction.shape)
    if instruction.opcode.endswith("-start") and len(elements) > 1 and kind != "all-reduce":
        # The elements are operands, results and internal counters.
        tensors = _tensors(elements[1])
    if kind == "all-reduce" and "reduce-scatter" in where:
        # On TPUs, a reduce-scatter is a fusion of an all-reduce that keeps only one part.
        kind = "reduce-scatter"
    return Collective(kind, tensors, times)


def matrix_flops(instruction: Instruction, computation: Computation) -> float:
    """Return the FLOPs of one `dot` or `convolution`, 2 per multiply-add; padding and holes do not count."""
    shapes = [computation[name].tensors[0].dims for name in instruction.inputs[:2]]
    out = instruction.tensors[0].dims
    if instruction.opcode == "dot":
        found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return 2.0 * math.prod(out) * math.prod(shapes[0][dim] for dim in _dims(found[1] if found else ""))
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None, f"a convolution without dim_labels: {instruction.name}"
    left, right, result = labels[1], labels[2], labels[3]
    groups = re.search(r"\bbatch_group_count=(\d+)", instruction.attributes)
    batch = shapes[0][left.index("b")] // (int(groups[1]) if groups else 1)
    products = batch * shapes[1][right.index("i")] * shapes[1][right.index("o")]
    window = _window(instruction.attributes)
    for dim in sorted(set(left) - set("bf")):
        products *= _positions(
            shapes[0][left.index(dim)], shapes[1][right.index(dim)], out[result.index(dim)], window.get(int(dim), {})
        )
    return 2.0 * products


def _window(attributes: str) -> dict[int, dict[str, tuple[int, ...]]]:
    """Read stride, padding and dilations of every spatial dimension."""
    found = _WINDOW.search(attributes)
    settings: dict[int, dict[str, tuple[int, ...]]] = {}
    for item in found[1].split() if found else ():
        key, _, values = item.partition("=")
        for dim, value in enumerate(values.split("x")):
            settings.setdefault(dim, {})[key] = tuple(map(int, value.split("_")))
    return settings


def _positions(size: int, kernel: int, out: int, window: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of pairs of output and kernel positions that read an element of the input."""
    stride, low = window.get("stride", (1,))[0], window.get("pad", (0,))[0]
    holes, spread = window.get("lhs_dilate", (1,))[0], window.get("rhs_dilate", (1,))[0]
    if kernel == 1 and low == 0 and holes == 1:
        return out
    places = np.arange(out)[:, None] * stride - low + np.arange(kernel)[None, :] * spread
    return int(np.count_nonzero((places % holes == 0) & (places >= 0) & (places < size * holes)))
