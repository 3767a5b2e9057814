"""Compile the loops of a merge ahead of the first round, once for all arguments.

Numba compiles a function when it is called with types that it has not seen. That takes seconds, during which learners
train on and nobody merges: so each function has one program here, and any other call of it is an error.
"""

from numba import types

from diloco_jax.core import kernels

_ADDRESSES, _AT = types.Array(types.uint64, 1, "C"), types.UniTuple(types.int64, 2)
_READ = types.Array(types.float32, 1, "C", readonly=True)  # an array that may be written to can stand for it
_WRITTEN, _STEP = types.Array(types.float32, 1, "C"), types.Array(types.uint8, 1, "C")
_PRODUCTS, _SHARES = types.Array(types.float64, 3, "C"), types.Array(types.float32, 2, "C", readonly=True)
_VALUES = (_ADDRESSES, _ADDRESSES)
_LEAF = (types.int64, _AT, types.int64)  # format, where the tensor begins, where the leaf does
_STATE, _NEXT = (_READ, _READ, _READ), (_WRITTEN, _WRITTEN, _WRITTEN)  # value, trace, residual
_RATES = (types.float32, types.float32)
_SIGNATURES = (
    (kernels.gram, (*_VALUES, *_LEAF, types.int64, types.int64, _PRODUCTS)),
    (kernels.update, (*_VALUES, _SHARES, types.int64, *_LEAF, *_STATE, *_RATES, types.int64, _STEP, _AT, *_NEXT)),
)


def prepare() -> None:
    """Compile every loop, or load what an earlier process compiled; at once when that is done already."""
    for function, signature in _SIGNATURES:
        if signature not in function.signatures:
            function.compile(signature)
            function.disable_compile()
