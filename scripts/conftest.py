"""The settings of the suite, for the tests that lie beside the programs which they test."""

import tests.conftest  # noqa: F401
from tests.extras import pytest_runtest_setup  # noqa: F401
