"""Where a slice of several listens, from the addresses on its command line."""

import argparse
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.cli import runs
from diloco_jax.runtime.slices import process
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import listening_address
from diloco_jax.transport.session.front import bind_all
from tests.limits import HANGS_S

EVERYWHERE = {"[::]:7100", "0.0.0.0:7100"}


def test_a_slice_with_a_name_listens_at_all_addresses_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name of a machine may lead to loopback on that machine, and to another address on all others."""
    places: list[process.SlicePlace] = []

    class Slice:
        def __init__(self, config: RunConfig, name: str, place: process.SlicePlace, *more: Any) -> None:
            places.append(place)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(process, "SliceProcess", Slice)
    for own, other in (("here", "there"), ("10.0.0.2", "there"), ("localhost", "127.0.0.3"), ("[::1]", "there")):
        arguments = argparse.Namespace(island="island-0", slice=1, slices=f"{other}:7100,{own}:7100")
        assert runs._in_slices(arguments, RunConfig(), tmp_path, "s:1", threading.Event(), None) == 0
        listens = places[-1].addresses[1]
        assert places[-1].addresses[0] == f"{other}:7100"
        assert listens in EVERYWHERE if own == "here" else listens == f"{own}:7100"


@pytest.mark.net
def test_a_machine_can_listen_before_anyone_knows_its_name() -> None:
    (listener,) = bind_all(listening_address("island-0-slice-0.invalid:0"))
    with listener, socket.create_connection(("127.0.0.2", listener.getsockname()[1]), HANGS_S):
        pass
