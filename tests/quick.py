"""A fixture that folders with compiled models import into their conftest.py."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """LLVM optimizes nothing: programs take half the time to compile. For tests that depend on no last bit."""
    # Most test processes of other folders never import JAX.
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
