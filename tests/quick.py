"""A compiler that takes a quarter of the usual time, for tests that depend on no last bit.

Folders with compiled models import the fixture into their conftest.py.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

# XLA's newer emitters of fusions take half of the compiler's time, and make programs for the CPU faster. Without LLVM's
# optimizations they are not worth it, nor are many small modules.
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@cache
def known_options() -> dict[str, Any]:
    """Return OPTIONS; nothing if this release of XLA has other ones."""
    import jax

    try:
        jax.jit(lambda: 0, compiler_options=OPTIONS).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        assert "No such compile option" in str(error)
        return {}
    return OPTIONS


def compile_quickly() -> Callable[[], None]:
    """Compile all programs quickly from now on, until the returned function is called."""
    # Most test processes of other folders never import JAX.
    import jax
    from jax._src import compiler

    options, right = known_options(), compiler.get_compile_options

    def quick(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        found.env_option_overrides = [*found.env_option_overrides, *options.items()]
        return found

    def undo() -> None:
        compiler.get_compile_options = right
        jax.config.update("jax_disable_most_optimizations", False)

    compiler.get_compile_options = quick
    jax.config.update("jax_disable_most_optimizations", True)
    return undo


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """LLVM optimizes nothing: programs take a quarter of the time to compile."""
    undo = compile_quickly()
    yield
    undo()
