"""The same two ends, in a bucket in this process's memory."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.transport.bucket import listener as listening
from diloco_jax.transport.bucket import session
from diloco_jax.transport.bucket.listener import BucketListener
from diloco_jax.transport.store import bucket, term
from tests.transport.bucket.faults import Faults
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


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults of all stores that are opened from now on."""
    made = Faults()
    monkeypatch.setattr(bucket, "ObjectStore", made.make)
    return made


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that takes seconds take a hundredth of them."""
    for module, names in {
        session: ("AGAIN_S", "DOUBT_S", "FAREWELL_S"),
        listening: ("LINGER_S",),
        term: ("BEAT_S",),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) / 100)
