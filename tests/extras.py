"""Tests that need an extra of pyproject.toml that `./scripts/test` does not install: they skip, and name it.

A test, a row of its table or a module has the mark `extra(NAME)`, and imports the packages of the extra in functions.
A module that needs them at its top is skipped as a whole:

    torch = pytest.importorskip("torch", reason=absent("parity"))
    pytestmark = pytest.mark.extra("parity")
"""

import functools
import importlib.metadata
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
OWN = "diloco-jax"


@functools.cache
def declared() -> dict[str, list[str]]:
    """Return the requirements of each extra."""
    # The file and not the installed metadata, which is as old as the environment.
    found: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return found


def absent(extra: str) -> str:
    """Return the reason for a skip; KeyError if pyproject.toml has no such extra."""
    assert declared()[extra]
    return f"the extra {extra} is not installed"


@functools.cache
def missing(extra: str) -> tuple[str, ...]:
    """Name the distributions of an extra, and of the extras that it includes, that are not installed."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for needed in map(Requirement, declared()[extra]):
        if needed.marker is not None and not needed.marker.evaluate():
            continue
        if needed.name == OWN:
            found += [name for nested in sorted(needed.extras) for name in missing(nested)]
            continue
        try:
            importlib.metadata.distribution(needed.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(needed.name)
    return tuple(found)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test before its fixtures are made if it needs an extra that is not installed."""
    for mark in item.iter_markers("extra"):
        (extra,) = mark.args
        if missing(extra):
            pytest.skip(absent(extra))
