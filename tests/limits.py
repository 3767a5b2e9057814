"""Kinds of tests by length, and time limits that only end what hangs: no test comes near them on a busy machine."""

from collections.abc import Sequence

import pytest

# A single wait, for a thread, a process or a state of a run, takes at most a minute on an idle machine.
HANGS_S = 600.0
# In tests of these kinds a single wait takes minutes.
SLOW_KINDS = ("slow", "nightly", "trainers", "device")
SLOW_HANGS_S = 6 * HANGS_S
KINDS = ("long", *SLOW_KINDS)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give tests that take minutes another limit than that of pyproject.toml, and refuse a test of two kinds."""
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if len(kinds) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked {' and '.join(kinds)}; keep one of these marks")
        if kinds and kinds[0] in SLOW_KINDS:
            item.add_marker(pytest.mark.timeout(2 * SLOW_HANGS_S))
