"""Where a slice of several listens, from the addresses on its command line."""

import argparse
import socket

import pytest

from diloco_jax.cli import runs
from diloco_jax.transport.link import listening_address
from diloco_jax.transport.session.front import bind_all
from tests.limits import HANGS_S

EVERYWHERE = {"[::]:7100", "0.0.0.0:7100"}


@pytest.mark.parametrize("own", ["here", "10.0.0.2", "localhost", "[::1]"])
def test_a_slice_with_a_name_listens_at_all_addresses_of_its_machine(own: str) -> None:
    """The name of a machine may lead to loopback on that machine, and to another address on all others."""
    arguments = argparse.Namespace(slice=1, slices=f"there:7100,{own}:7100")
    other, listens = runs._slice_place(arguments, None).addresses
    assert other == "there:7100"
    assert listens in EVERYWHERE if own == "here" else listens == f"{own}:7100"


@pytest.mark.net
def test_a_machine_can_listen_before_anyone_knows_its_name() -> None:
    (listener,) = bind_all(listening_address("island-0-slice-0.invalid:0"))
    with listener, socket.create_connection(("127.0.0.2", listener.getsockname()[1]), HANGS_S):
        pass
