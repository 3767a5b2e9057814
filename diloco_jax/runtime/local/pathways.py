"""Pathways as the controller of all islands: the start of its client, and slices that go away and come back.

pathwaysutils recognises an error that a lost slice caused, and tests whether a slice computes. Its `wait_for_slices`
is not used, because it sleeps where nothing can end it, and a test that raises an error ends it.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import jax
from jax.extend import backend

from diloco_jax.runtime.local.machine import PROXY, need_proxy

PACKAGE = "pathwaysutils"
# The reason of an island's goodbye when its slice was taken away, and its phase until the slice is back.
WAITS = "waits for its slice"
# A first test that takes longer than this shows that the slice was away.
ANSWER_S = 60.0
LOOK_S = 0.1
# Errors in a chain of causes that are examined.
CAUSES_MAX = 16

Wait = Literal["there", "back", "away", "over"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LentSlices:
    """Slices that Pathways may take away from their islands."""

    # The module pathwaysutils.elastic.elastic.
    elastic: ModuleType
    # Pause between two tests of a slice, in seconds.
    poll_s: float = 10.0

    def caused(self, error: BaseException) -> bool:
        """Return whether a lost slice may have caused an error, directly or through the errors that it came from."""
        found: BaseException | None = error
        for _ in range(CAUSES_MAX):
            if found is None:
                return False
            if isinstance(found, Exception) and self.elastic.is_error_due_to_slice_down(found, log_traceback=False):
                return True
            found = found.__cause__ or found.__context__
        return False

    def computes(self, devices: Sequence[jax.Device]) -> bool:
        """Run a small program on the devices of one slice, and return whether its result is right."""
        try:
            return bool(self.elastic.get_active_slice_indices({0: list(devices)}))
        # The test raises what the proxy raises, and it raises ValueError for a wrong result.
        except Exception as error:
            log.info(f"the test of a slice failed: {error}")
            return False

    def wait(self, devices: Sequence[jax.Device], timeout_s: float, over: Callable[[], bool]) -> Wait:
        """Wait until the devices of a slice compute again.

        Returns:
            "there" if the first test succeeded, "back" after a longer wait, "away" after `timeout_s` seconds, or "over"
            if `over` became true meanwhile.
        """
        began_s = time.monotonic()
        found, end, failed = threading.Event(), threading.Event(), threading.Event()

        def look() -> None:
            while not end.is_set():
                if self.computes(devices):
                    found.set()
                    return
                failed.set()
                end.wait(self.poll_s)

        # A test may hang on a slice that is away, and must not keep the process from ending.
        threading.Thread(target=look, name="slice", daemon=True).start()
        try:
            while not found.wait(LOOK_S):
                if over():
                    return "over"
                if time.monotonic() - began_s > timeout_s:
                    return "away"
        finally:
            end.set()
        return "back" if failed.is_set() or time.monotonic() - began_s > ANSWER_S else "there"


def use_pathways() -> LentSlices:
    """Let JAX use the devices of Pathways, before it looks for others.

    Raises:
        ValueError: The package is not installed, or JAX was told to use other devices.
        ConnectionError: The proxy cannot be reached.
    """
    try:
        module = importlib.import_module(PACKAGE)
        elastic = importlib.import_module(f"{PACKAGE}.elastic.elastic")
    except ImportError:
        raise ValueError(
            f"islands.pathways is set, but the package {PACKAGE} is not installed: install diloco-jax[pathways] where "
            "`diloco islands` runs, or set islands.pathways to false"
        ) from None
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    need_proxy(platforms)
    module.initialize()
    try:
        chosen = jax.devices()[0].client
        proxy = backend.get_backend(PROXY)
    except RuntimeError as error:
        target = jax.config.read("jax_backend_target")
        raise ConnectionError(
            f"JAX cannot use Pathways' proxy at {target!r}: {error}; start the proxy, or correct JAX_BACKEND_TARGET"
        ) from error
    if chosen is not proxy:
        raise ValueError(
            f"islands.pathways is set, but JAX uses {chosen.platform} first, because JAX_PLATFORMS is {platforms!r}: "
            f"set JAX_PLATFORMS={PROXY}"
        )
    return LentSlices(elastic)
