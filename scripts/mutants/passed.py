"""Pytest plugin: writes the passed tests and their seconds to the file that MUTANT_PASSED names."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_seconds: Counter[str] = Counter()
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        kept = {test: seconds for test, seconds in _seconds.items() if test not in _failed}
        Path(os.environ["MUTANT_PASSED"]).write_text(json.dumps(kept))
