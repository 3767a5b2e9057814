"""Each fault of the relay, seen from both ends of real connections; and what a session over gRPC makes of it."""

import dataclasses
import gc
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.tools.chaos.relay import PIECES_MAX, READ_BYTES_MAX, Relay
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.link import TransportConfig, split_address
from tests.limits import HANGS_S

pytestmark = pytest.mark.net


class Ends:
    """A client's socket and the server's end of the same connection, with a relay between them."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(HANGS_S)
        self.relay = Relay(f"127.0.0.1:{self._server.getsockname()[1]}")
        self._open: list[socket.socket] = []
        self.client, self.server = self.connect()

    def dial(self) -> socket.socket:
        client = socket.create_connection(split_address(self.relay.address), timeout=HANGS_S)
        self._open.append(client)
        return client

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = self.dial()
        server, _ = self._server.accept()
        server.settimeout(HANGS_S)
        self._open.append(server)
        client.sendall(b"!")
        # The relay has recorded the connection now.
        assert server.recv(1) == b"!"
        return client, server

    def close(self) -> None:
        self.relay.close()
        for each in [*self._open, self._server]:
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def read(end: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        part = end.recv(min(size - len(data), 1 << 20))
        assert part, f"the stream ended after {len(data)} of {size} bytes"
        data += part
    return bytes(data)


def passes(source: socket.socket, sink: socket.socket, data: bytes) -> None:
    source.sendall(data)
    assert read(sink, len(data)) == data


def silent(end: socket.socket) -> bool:
    """Tell if nothing has come by now."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        end.settimeout(HANGS_S)


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


def test_forwards_both_ways(ends: Ends) -> None:
    data = pattern(300_000)
    sender = threading.Thread(target=ends.client.sendall, args=(data,))
    sender.start()
    assert read(ends.server, len(data)) == data
    sender.join()
    passes(ends.server, ends.client, b"answer")


def test_end_of_one_stream_leaves_the_other(ends: Ends) -> None:
    ends.client.sendall(b"last")
    ends.client.shutdown(socket.SHUT_WR)
    assert read(ends.server, 4) == b"last"
    assert ends.server.recv(1) == b""
    passes(ends.server, ends.client, b"still here")


def test_cut_with_reset(ends: Ends) -> None:
    assert ends.relay.cut("rst") == 1
    for end in (ends.client, ends.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert ends.relay.cut("rst") == 0
    client, server = ends.connect()
    passes(client, server, b"again")


def test_cut_with_fin_throws_away_what_comes_after(ends: Ends) -> None:
    assert ends.relay.cut("fin") == 1
    ends.client.sendall(b"into the void")
    assert ends.client.recv(1) == b"" and ends.server.recv(1) == b""


def test_a_reset_of_one_side_reaches_the_other(ends: Ends) -> None:
    ends.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.client.close()
    with pytest.raises(ConnectionResetError):
        ends.server.recv(1)


def test_black_hole_keeps_everything_and_takes_little(ends: Ends) -> None:
    """While it lasts the sender feels back-pressure; after it nothing is missing."""
    ends.relay.change(hold=True)
    # The relay's queue and the buffers of four sockets hold less than this.
    data = pattern(PIECES_MAX * READ_BYTES_MAX + (32 << 20))
    sender = threading.Thread(target=ends.client.sendall, args=(data,))
    sender.start()
    # The relay accepts new connections and holds them, too.
    late = ends.dial()
    late.sendall(b"x")
    ends.server.sendall(b"y")
    assert silent(ends.client) and silent(ends.server)
    assert sender.is_alive(), "somebody took 32 MiB"
    ends.relay.change()
    assert read(ends.server, len(data)) == data
    assert read(ends.client, 1) == b"y"
    sender.join()


def test_black_hole_of_one_direction(ends: Ends) -> None:
    ends.relay.change("down", hold=True)
    passes(ends.client, ends.server, b"up")
    ends.server.sendall(b"down")
    assert silent(ends.client)
    ends.relay.heal()
    assert read(ends.client, 4) == b"down"


def test_delay_is_a_lower_bound(ends: Ends) -> None:
    ends.relay.change("up", delay_s=0.2)
    began_s = time.monotonic()
    passes(ends.client, ends.server, b"late")
    assert time.monotonic() - began_s >= 0.2


def test_rate_is_an_upper_bound_also_for_connections_to_come(ends: Ends) -> None:
    ends.relay.change("down", bytes_per_s=100_000)
    data = pattern(40_000)
    for client, server in ((ends.client, ends.server), ends.connect()):
        began_s = time.monotonic()
        server.sendall(data)
        assert read(client, len(data)) == data
        # The client does not wait for the last piece.
        assert time.monotonic() - began_s >= 0.3


def test_flips_one_byte_after_so_many(ends: Ends) -> None:
    ends.relay.damage("up", flip_after=1000)
    data = pattern(2_100)
    # The count of bytes continues from one piece to the next.
    for start in range(0, len(data), 700):
        part = data[start : start + 700]
        ends.client.sendall(part)
        got = read(ends.server, len(part))
        assert [start + at for at in range(len(part)) if got[at] != part[at]] == ([999] if start == 700 else [])


def test_repeats_a_chunk(ends: Ends) -> None:
    ends.relay.damage("up", repeat=4)
    ends.client.sendall(b"abcdefgh")
    assert read(ends.server, 12) == b"abcdabcdefgh"
    passes(ends.client, ends.server, b"once")
    passes(ends.server, ends.client, b"ok")


def test_healing_calls_damage_off(ends: Ends) -> None:
    ends.relay.damage(flip_after=2, repeat=100)
    ends.relay.change(delay_s=3000.0, bytes_per_s=1.0)
    ends.relay.heal()
    for words in (b"whole", b"again"):
        passes(ends.client, ends.server, words)


def test_target_is_asked_at_every_connection_and_may_be_away() -> None:
    addresses: list[str] = []
    with Relay(lambda: addresses[-1] if addresses else "") as relay, socket.create_server(("127.0.0.1", 0)) as target:
        with pytest.raises(ConnectionResetError), socket.create_connection(split_address(relay.address)) as early:
            early.recv(1)
        addresses.append(f"127.0.0.1:{target.getsockname()[1]}")
        target.settimeout(HANGS_S)
        with socket.create_connection(split_address(relay.address), timeout=HANGS_S) as client:
            server, _ = target.accept()
            with server:
                passes(client, server, b"hi")


def test_close_ends_everything(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ends.relay.cut("fin")
    client, _ = ends.connect()
    ends.relay.change(hold=True)
    ends.relay.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(OSError, match="closed"):
        ends.relay.cut()
    ends.relay.close()
    gc.collect()
    assert not caplog.records, "a task was left behind, or its error"


def test_only_loopback_is_listened_on() -> None:
    with pytest.raises(ValueError, match="use an address on loopback"):
        Relay("127.0.0.1:1", "0.0.0.0:0")


CONFIG = TransportConfig(payload_bytes_max=1 << 24, chunk_bytes=1 << 16)
VALUE = FragmentValue("a", 0, 1, 0, 1, 1, 1, 0, 1, 1 << 20)


@pytest.mark.parametrize("fault", ["rst", "fin", "flip", "repeat"])
def test_no_damaged_payload_arrives_and_the_session_ends_on_both_sides(fault: str) -> None:
    """Nothing between a whole message and the end of the session."""
    listener = grpc_link.listen(CONFIG, run_id="run")
    with Relay(listener.address) as relay:
        config = dataclasses.replace(CONFIG, address=relay.address)
        link = grpc_link.connect(config, run_id="run", learner_id="a", incarnation=0)
        payload = pattern(1 << 20)
        link.send(VALUE, payload)
        first = listener.receive(HANGS_S)
        assert first is not None and first.payload == payload
        if fault in ("rst", "fin"):
            assert relay.cut("rst" if fault == "rst" else "fin") == 1 + CONFIG.stripes
        elif fault == "flip":
            relay.damage("up", flip_after=100_000)
        else:
            relay.damage("up", repeat=100)
        if fault in ("flip", "repeat"):
            link.send(VALUE, payload)
        heard = [listener.receive(HANGS_S)]
        while heard[-1] is not None and heard[-1].kind == "message":
            assert heard[-1].payload in (b"", payload)
            heard.append(listener.receive(HANGS_S))
        assert heard[-1] is not None and heard[-1].kind == "disconnected"
        ending = link.receive(HANGS_S)
        assert ending is not None and ending.kind == "disconnected"
        link.close(1.0)
    listener.close(1.0)
