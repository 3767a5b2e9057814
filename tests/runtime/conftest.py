"""Fixtures of the tests in this folder."""

from collections.abc import Iterator

import pytest

from tests.quick import quick_compiler  # noqa: F401


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """Let islands with equal settings share what is compiled; for tests that do not ask what an island compiles."""
    # Most modules of this folder never import JAX.
    from tests.runtime.shared_programs import sharing

    with sharing():
        yield
