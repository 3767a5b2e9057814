"""Memory by its address, for compiled loops: arrays, copies and hints to the processor; and how loops are compiled."""

import contextlib
import hashlib
from typing import Any, no_type_check

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

BLOCK = 256
# Bytes of a block in float32.
ROW = np.uint64(4 * BLOCK)
# Elements that a vector operation works on at once, and the number of partial sums of a sum in a fixed order.
LANES = 16
# How `prefetch` asks for a cache line, in LLVM's numbers: to read it, as data, and soon but once.
_READ, _DATA, _NEAR = 0, 1, 2


def compiled(function: Any) -> Any:
    """Compile a loop, and cache the compiled code if there is a folder for it."""
    loop = njit(nogil=True, error_model="numpy")(function)
    # With NUMBA_DISABLE_JIT the loop is a function of Python.
    if hasattr(loop, "_cache"):
        # Without a folder that can be written to, not even the user's, nothing is cached.
        with contextlib.suppress(RuntimeError):
            loop._cache = _MachineCode(function)
    return loop


class _MachineCode(FunctionCache):
    """The compiled code of one loop on disk, where each file has a digest of all that its code depends on as its name.

    Numba alone compares the stamp of the function's file, and finds the code by a number in an index. It misses a
    change of functions that are inlined from other files. If a process is killed between its writes of the index and
    of the code, the index names older code. Errors of the disk, and damaged files, cost only time here.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._versions = (_sources(function.__globals__), numba.__version__, llvmlite.__version__)

    def load_overload(self, signature: Any, context: Any) -> Any:
        context.refresh()
        try:
            stored = self._cache_file._load_data(self._file(signature, context.codegen()))
            return self._impl.rebuild(context, stored)
        except Exception:
            # There is no file, or its content is damaged, which raises errors of many kinds.
            return None

    def save_overload(self, signature: Any, code: Any) -> None:
        # Code with addresses of this process cannot be cached.
        if not self._impl.check_cachable(code):
            return
        with contextlib.suppress(OSError):
            self._impl.locator.ensure_cache_path()
            self._cache_file._save_data(self._file(signature, code.codegen), self._impl.reduce(code))

    def _file(self, signature: Any, codegen: Any) -> str:
        about = repr((self._index_key(signature, codegen), self._versions))
        return f"{self._impl.filename_base}.{_digest(about)}.nbc"


def _sources(names: dict[str, Any]) -> str:
    """Return a digest of the source of a module, given its names, and of the modules whose loops it uses."""
    modules, left = {}, [names]
    while left:
        module = left.pop()
        if module["__name__"] in modules:
            continue
        modules[module["__name__"]] = module["__spec__"].loader.get_source(module["__name__"]) or ""
        # Numba's name for the Python function behind a compiled loop, and behind an intrinsic.
        inlined = [getattr(value, "py_func", None) or getattr(value, "_defn", None) for value in module.values()]
        left += [function.__globals__ for function in inlined if function is not None]
    return _digest("".join(modules.values()))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _at(dtype: Any, size: int = BLOCK) -> Any:
    """Return a function that takes an address and returns the array stored there."""

    @intrinsic
    @no_type_check
    def pointer(typingctx, address):
        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.uint64), code

    @njit(forceinline=True)
    @no_type_check
    def array(address):
        return carray(pointer(address), (size,))

    return array


scalar, address = _at(types.float32, 1), _at(types.uint64, 1)
float32s, uint32s = _at(types.float32), _at(types.uint32)
int16s, uint16s = _at(types.int16), _at(types.uint16)
int8s, uint8s = _at(types.int8), _at(types.uint8)


@intrinsic
@no_type_check
def float_of(typingctx, bits):
    """Return the float32 number that has these bits."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), code


@compiled
@no_type_check
def fill(to_at, begin):
    to = float32s(to_at)
    for j in range(begin, BLOCK):
        to[j] = np.float32(0)


@intrinsic
@no_type_check
def copy_bytes(typingctx, to_at, from_at, num_bytes):
    """Copy bytes with the C library."""

    def code(context, builder, signature, arguments):
        pointer = context.get_value_type(types.CPointer(types.uint8))
        to_at, from_at = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to_at, from_at, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), code


@intrinsic
@no_type_check
def prefetch(typingctx, at):
    """Tell the processor that the cache line at this address will be read; any address is allowed."""

    def code(context, builder, signature, arguments):
        word = ir.IntType(32)
        place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), (place.type, word, word, word))
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, (place, word(_READ), word(_NEAR), word(_DATA)))
        return context.get_dummy_value()

    return types.void(types.uint64), code


@intrinsic
@no_type_check
def fence(typingctx):
    """Make other threads see all writes so far before any write after this, also those of `lanes.stream`."""

    def code(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code
