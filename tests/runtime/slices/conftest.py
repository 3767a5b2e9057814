"""Fixtures of the tests in this folder."""

from types import SimpleNamespace
from typing import TypeVar

import pytest

from diloco_jax.runtime.slices import following, hosts, leading, obeying
from tests.runtime.slices.hosts import HostsNet
from tests.runtime.slices.island import Net

AnyNet = TypeVar("AnyNet", bound=Net)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    """Return three connected slices, whose states are sent at once, and whose time passes while they wait."""
    return timeless(Net(), monkeypatch)


@pytest.fixture
def hosts_net(monkeypatch: pytest.MonkeyPatch) -> HostsNet:
    """Return the same with two hosts in each slice."""
    return timeless(HostsNet(), monkeypatch)


@pytest.fixture
def three_hosts(monkeypatch: pytest.MonkeyPatch) -> HostsNet:
    """Return the same with three hosts in each slice."""
    return timeless(HostsNet(3), monkeypatch)


def timeless(made: AnyNet, monkeypatch: pytest.MonkeyPatch) -> AnyNet:
    for module in (following, leading, obeying, hosts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    for module in (following, leading, obeying):
        monkeypatch.setattr(
            module, "start_thread", lambda body, name, daemon: body() if name in ("give", "look") else None
        )
    return made
