"""The names of a syncer and of an island, from arguments or the environment.

This module imports no JAX, so that a command checks them before it spends half a minute on imports.
"""

import os

from diloco_jax.transport.link import check_name

SYNCER_ENV = "DILOCO_SYNCER"  # host:port
ISLAND_ENV = "DILOCO_ISLAND"  # name


def place_of(syncer: str | None, name: str | None) -> tuple[str, str]:
    """Return the address of the syncer and the name of the island; ValueError if neither source names them."""
    return _given(syncer, SYNCER_ENV, "syncer"), check_name(_given(name, ISLAND_ENV, "name"))


def _given(value: str | None, variable: str, argument: str) -> str:
    found = value or os.environ.get(variable, "")
    if not found:
        raise ValueError(f"join() needs {argument}=, or {variable} in the environment")
    return found
