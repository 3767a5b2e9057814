"""The same two ends, in a bucket in this process's memory."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.transport.bucket.listener import BucketListener
from tests.transport.ends import Ends

NUMBERS = itertools.count()
POLL_S = 0.005


@pytest.fixture
def address() -> str:
    """A bucket that no other test uses."""
    return f"memory://test-{next(NUMBERS)}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def ends(address: str) -> Iterator[Ends]:
    made = Ends(address=address, poll_s=POLL_S)
    yield made
    made.close()


@pytest.fixture
def listener(ends: Ends) -> BucketListener:
    found: BucketListener = ends.listen(subscribers_max=2)
    return found
