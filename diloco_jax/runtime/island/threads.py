"""Threads of an island, which place arrays on the devices of the island that started them."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def placed(body: Callable[P, T]) -> Callable[P, T]:
    """Let a function that another thread calls use the default device of this thread; JAX has one for each thread."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]

    @wraps(body)
    def call(*values: P.args, **named: P.kwargs) -> T:
        with jax.default_device(device):
            return body(*values, **named)

    return call


def start_thread(body: Callable[[], None], name: str, *, daemon: bool) -> None:
    """Start a thread with the default device of this thread."""
    threading.Thread(target=placed(body), name=name, daemon=daemon).start()
