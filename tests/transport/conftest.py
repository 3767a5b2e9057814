"""Fixtures of all tests that open connections."""

from collections.abc import Iterator

import pytest

from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from tests.transport.ends import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def listener(ends: Ends) -> GrpcListener:
    return ends.listen()
