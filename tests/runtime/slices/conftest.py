"""Fixtures of the tests in this folder."""

from types import SimpleNamespace

import pytest

from diloco_jax.runtime.slices import following, leading
from tests.runtime.slices.island import Net


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    """Return three connected slices, whose states are sent at once, and whose time passes while they wait."""
    made = Net()
    for module in (following, leading):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now_s))
        monkeypatch.setattr(module, "start_thread", lambda body, name, daemon: body() if name == "give" else None)
    return made
