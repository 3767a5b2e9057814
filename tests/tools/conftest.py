"""Fixtures of all tools."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.quick import quick_compiler  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def described_once() -> Iterator[None]:
    """Trace each model once and size each fragment once for all tests.

    Tools ask for those of a few models hundreds of times, and under test the types of every call are checked.
    """
    from diloco_jax.settings import resolved
    from diloco_jax.training import blueprint
    from diloco_jax.training.models.protocol import find_model

    describe, known = blueprint._describe_model, dict[Any, Any]()

    def described(config: Any, seed: int) -> Any:
        key = config.own or find_model(config.module), repr((config, seed))
        if key not in known:
            known[key] = describe(config, seed)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blueprint, "_describe_model", described)
        patched.setattr(resolved, "encoded_size", functools.cache(resolved.encoded_size))
        yield


@pytest.fixture
def few_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate 20 failures for a forecast's goodput instead of 2000, for tests that do not look at this mean."""
    monkeypatch.setattr("diloco_jax.tools.plan.forecast.FAILURES", 20)
    monkeypatch.setattr("diloco_jax.tools.plan.forecast.STEPS_MAX", 2000)
