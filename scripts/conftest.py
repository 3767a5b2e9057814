"""The settings of the suite, for the tests that are stored beside the programs which they test."""

from tests.conftest import pytest_configure  # noqa: F401
from tests.extras import pytest_runtest_setup  # noqa: F401
from tests.limits import pytest_collection_modifyitems  # noqa: F401
