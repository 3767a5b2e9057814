"""Sixteen numbers at once, for compiled loops: the vector units of the processor without the guesses of a compiler.

`Lanes` is a type of Numba. Its values are made by the functions here, and have Python's operators. Every operation is
the plain IEEE or integer operation on each of the numbers, never contracted to a fused multiply-add. LLVM turns it into
whatever vector instructions the processor has, so that all processors give equal bits.

A loop over arrays would be vectorised, too. But for each call it first compares the addresses of all its arrays, and it
cannot write past the caches (`stream`), which a merge gains most from.
"""

import operator
from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.extending import intrinsic, register_model, type_callable

from diloco_jax.core.memory import LANES

_WORD = ir.IntType(32)


class Lanes(types.Type):
    """The type of sixteen numbers of one kind.

    Args:
      element: LLVM's type of each number.
    """

    def __init__(self, element: Any) -> None:
        super().__init__(f"lanes of {element}")
        self.vector = ir.VectorType(element, LANES)


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


FLOATS, INTS, DOUBLES = Lanes(ir.FloatType()), Lanes(_WORD), Lanes(ir.DoubleType())


_OPERATORS = {
    FLOATS: {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"},
    DOUBLES: {operator.add: "fadd", operator.mul: "fmul"},
    INTS: {
        operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.and_: "and_", operator.or_: "or_",
        operator.lshift: "shl", operator.rshift: "ashr",
    },
}  # fmt: skip


def _give(kind: Lanes, of: Any, name: str) -> None:
    """Give numbers of this kind an operator of Python, by the name of LLVM's instruction."""

    @type_callable(of)
    @no_type_check
    def typed(context):
        return lambda a, b: kind if a is kind and b is kind else None

    @lower_builtin(of, kind, kind)
    @no_type_check
    def lowered(context, builder, signature, both):
        return getattr(builder, name)(*both)


for _kind, _known in _OPERATORS.items():
    for _of, _name in _known.items():
        _give(_kind, _of, _name)


def _operation(result: Any, *kinds: Any) -> Any:
    """Make a function of compiled loops from one that writes its instructions.

    Args:
      result: type of the result.
      kinds: types of the arguments.
    """

    def made(write: Any) -> Any:
        def code(context: Any, builder: Any, types: Any, arguments: Any) -> Any:
            value = write(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        # Numba counts the arguments of a function by its names.
        if len(kinds) == 1:

            @intrinsic
            @no_type_check
            def defined(typingctx, a):
                return result(*kinds), code

        else:

            @intrinsic
            @no_type_check
            def defined(typingctx, a, b):
                return result(*kinds), code

        return defined

    return made


def _pointer(builder: Any, at: Any, kind: Any) -> Any:
    return builder.inttoptr(at, kind.as_pointer())


def _splat(builder: Any, number: Any) -> Any:
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))


def _reduced(builder: Any, value: Any, name: str) -> Any:
    kind = ir.FunctionType(value.type.element, (value.type,))
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v16i32"), [value]
    )


@_operation(FLOATS, types.uint64)
def load(builder: Any, at: Any) -> Any:
    """Return the sixteen float32 numbers at an address."""
    return builder.load(_pointer(builder, at, FLOATS.vector), align=4)


@_operation(types.void, types.uint64, FLOATS)
def store(builder: Any, at: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, at, FLOATS.vector), align=4)


@_operation(types.void, types.uint64, FLOATS)
def stream(builder: Any, at: Any, value: Any) -> None:
    """Store numbers past the caches, which then need not read the old content; the address is a multiple of 64.

    Other threads see them after a `memory.fence`.
    """
    hint = builder.module.add_metadata([_WORD(1)])
    builder.store(value, _pointer(builder, at, FLOATS.vector), align=64).set_metadata("nontemporal", hint)


@_operation(INTS, types.uint64)
def load_int8(builder: Any, at: Any) -> Any:
    """Return the sixteen bytes at an address as numbers of -128 to 127."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    return builder.sext(builder.load(_pointer(builder, at, kind), align=1), INTS.vector)


@_operation(INTS, types.uint64)
def load_uint8(builder: Any, at: Any) -> Any:
    """Return the sixteen bytes at an address as numbers of 0 to 255."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    return builder.zext(builder.load(_pointer(builder, at, kind), align=1), INTS.vector)


@_operation(types.void, types.uint64, INTS)
def store_bytes(builder: Any, at: Any, value: Any) -> None:
    """Store the lowest byte of each number."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    builder.store(builder.trunc(value, kind), _pointer(builder, at, kind), align=1)


@_operation(FLOATS, types.float32)
def floats(builder: Any, number: Any) -> Any:
    """Return sixteen times the same number."""
    return _splat(builder, number)


@_operation(INTS, types.int32)
def ints(builder: Any, number: Any) -> Any:
    """Return sixteen times the same number."""
    return _splat(builder, number)


@_operation(FLOATS, INTS)
def float_lanes(builder: Any, value: Any) -> Any:
    """Return whole numbers as float32."""
    return builder.sitofp(value, FLOATS.vector)


@_operation(INTS, FLOATS)
def int_lanes(builder: Any, value: Any) -> Any:
    """Return float32 numbers without their fractions; the result is undefined beyond 32 bits."""
    return builder.fptosi(value, INTS.vector)


@_operation(DOUBLES, FLOATS)
def double_lanes(builder: Any, value: Any) -> Any:
    """Return float32 numbers as float64."""
    return builder.fpext(value, DOUBLES.vector)


@_operation(INTS, FLOATS)
def magnitude_bits(builder: Any, value: Any) -> Any:
    """Return the bits of the magnitudes; as integers they sort like the magnitudes, with NaN last."""
    bits = builder.bitcast(value, INTS.vector)
    return builder.and_(bits, _splat(builder, _WORD(0x7FFFFFFF)))


@_operation(FLOATS, FLOATS)
def magnitudes(builder: Any, value: Any) -> Any:
    bits = builder.and_(builder.bitcast(value, INTS.vector), _splat(builder, _WORD(0x7FFFFFFF)))
    return builder.bitcast(bits, FLOATS.vector)


@_operation(INTS, FLOATS, FLOATS)
def above(builder: Any, a: Any, b: Any) -> Any:
    """Return 1 where a > b, and 0 elsewhere."""
    return builder.zext(builder.fcmp_ordered(">", a, b), INTS.vector)


@_operation(INTS, INTS, INTS)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger one of each two numbers."""
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@_operation(types.uint32, INTS)
def largest(builder: Any, value: Any) -> Any:
    """Return the largest of sixteen numbers, which are not negative."""
    return _reduced(builder, value, "umax")


@_operation(types.int32, INTS)
def total(builder: Any, value: Any) -> Any:
    """Return the sum of sixteen whole numbers."""
    return _reduced(builder, value, "add")


@_operation(types.float32, FLOATS)
def folded(builder: Any, value: Any) -> Any:
    """Return the sum of sixteen numbers, by adding the second half to the first until one number is left."""
    half = LANES // 2
    while half:
        order = [min(lane + half, LANES - 1) for lane in range(LANES)]
        above = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_WORD, LANES), order))
        value, half = builder.fadd(value, above), half // 2
    return builder.extract_element(value, _WORD(0))


@_operation(types.float64, DOUBLES)
def in_order(builder: Any, value: Any) -> Any:
    """Return the sum of sixteen numbers, added one after another to 0."""
    sum = ir.DoubleType()(0)
    for lane in range(LANES):
        sum = builder.fadd(sum, builder.extract_element(value, _WORD(lane)))
    return sum
