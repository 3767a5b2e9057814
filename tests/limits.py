"""Time limits of tests. They only end what hangs: no test comes near them, not even on a busy machine."""

from collections.abc import Sequence

import pytest

# A single wait, for a thread, a process or a state of a run, takes at most a minute on an idle machine.
HANGS_S = 600.0
# In tests of these kinds a single wait takes minutes.
SLOW_KINDS = ("slow", "nightly", "trainers", "device")
SLOW_HANGS_S = 6 * HANGS_S


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give tests that take minutes another limit than that of pyproject.toml."""
    for item in items:
        if any(item.get_closest_marker(kind) for kind in SLOW_KINDS):
            item.add_marker(pytest.mark.timeout(2 * SLOW_HANGS_S))
