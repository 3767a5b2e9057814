"""Each fault of the relay, seen from both ends of real connections; and what a session over gRPC makes of it."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.chaos.weather import BUFFER_BYTES_MAX
from diloco_jax.transport import grpc_link
from diloco_jax.transport.link import TransportConfig, split_address

pytestmark = pytest.mark.net
WAIT_S = 20.0


class Ends:
    """A client's socket and the server's end of the same connection, with a relay between them."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(WAIT_S)
        self.relay = Relay(f"127.0.0.1:{self._server.getsockname()[1]}")
        self._open: list[socket.socket] = []
        self.client, self.server = self.connect()

    def dial(self) -> socket.socket:
        client = socket.create_connection(split_address(self.relay.address), timeout=WAIT_S)
        self._open.append(client)
        return client

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = self.dial()
        server, _ = self._server.accept()
        server.settimeout(WAIT_S)
        self._open.append(server)
        client.sendall(b"!")
        assert server.recv(1) == b"!"  # the relay has it in its books
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
    """Exactly so many bytes."""
    data = bytearray()
    while len(data) < size:
        part = end.recv(min(size - len(data), 1 << 20))
        assert part, f"the stream ended after {len(data)} of {size} bytes"
        data += part
    return bytes(data)


def silent(end: socket.socket) -> bool:
    """Whether nothing has come by now."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        end.settimeout(WAIT_S)


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


def test_forwards_both_ways_and_counts(ends: Ends) -> None:
    data = pattern(300_000)
    sender = threading.Thread(target=ends.client.sendall, args=(data,))
    sender.start()
    assert read(ends.server, len(data)) == data
    sender.join()
    ends.server.sendall(b"answer")
    assert read(ends.client, 6) == b"answer"
    counts = ends.relay.counts
    assert (counts.accepted, counts.up_bytes, counts.down_bytes) == (1, 300_001, 6)  # and one of `connect`
    assert (counts.lost_bytes, counts.flipped_bytes, counts.duplicated_bytes, counts.cut) == (0, 0, 0, 0)


def test_end_of_one_stream_leaves_the_other(ends: Ends) -> None:
    ends.client.sendall(b"last")
    ends.client.shutdown(socket.SHUT_WR)
    assert read(ends.server, 4) == b"last"
    assert ends.server.recv(1) == b""
    ends.server.sendall(b"still here")
    assert read(ends.client, 10) == b"still here"


def test_cut_with_reset(ends: Ends) -> None:
    assert ends.relay.cut("rst") == 1
    for end in (ends.client, ends.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    client, server = ends.connect()
    client.sendall(b"again")
    assert read(server, 5) == b"again"


def test_cut_with_fin_throws_away_what_comes_after(ends: Ends) -> None:
    assert ends.relay.cut("fin") == 1
    ends.client.sendall(b"into the void")
    assert ends.client.recv(1) == b"" and ends.server.recv(1) == b""
    assert ends.relay.counts.up_bytes == 1  # of `connect`


def test_a_reset_of_one_side_reaches_the_other(ends: Ends) -> None:
    ends.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.client.close()
    with pytest.raises(ConnectionResetError):
        ends.server.recv(1)


def test_faults_hit_one_connection_alone(ends: Ends) -> None:
    client, server = ends.connect()
    first, second = ends.relay.open_connections
    ends.relay.flip(1, times=3, connection=second)
    assert ends.relay.cut("rst", connection=first) == 1
    with pytest.raises(ConnectionResetError):
        ends.client.recv(1)
    client.sendall(b"abc")
    assert read(server, 3) == bytes(0xFF ^ byte for byte in b"abc")
    assert ends.relay.open_connections == (second,)
    assert ends.relay.cut("rst", connection=first) == 0


def test_black_hole_keeps_everything_and_takes_little(ends: Ends) -> None:
    """While it lasts the sender feels back-pressure; after it nothing is missing."""
    ends.relay.change(hold=True)
    data = pattern(BUFFER_BYTES_MAX + (32 << 20))  # more than the relay's buffer and those of four sockets
    sender = threading.Thread(target=ends.client.sendall, args=(data,))
    sender.start()
    late = ends.dial()  # new connections are accepted, and as silent
    late.sendall(b"x")
    ends.server.sendall(b"y")
    assert silent(ends.client) and silent(ends.server)
    assert (ends.relay.counts.up_bytes, ends.relay.counts.down_bytes) == (1, 0)  # the one of `connect`
    assert sender.is_alive(), "somebody took 32 MiB"
    ends.relay.change(hold=False)
    assert read(ends.server, len(data)) == data
    assert read(ends.client, 1) == b"y"
    sender.join()


def test_black_hole_of_one_direction(ends: Ends) -> None:
    ends.relay.change("down", hold=True)
    ends.client.sendall(b"up")
    assert read(ends.server, 2) == b"up"
    ends.server.sendall(b"down")
    assert silent(ends.client)
    ends.relay.heal()
    assert read(ends.client, 4) == b"down"


def test_delay_is_a_lower_bound(ends: Ends) -> None:
    ends.relay.change("up", delay_s=0.2)
    began_s = time.monotonic()
    ends.client.sendall(b"late")
    assert read(ends.server, 4) == b"late"
    assert time.monotonic() - began_s >= 0.2


def test_rate_is_an_upper_bound(ends: Ends) -> None:
    ends.relay.change("down", bytes_per_s=100_000)
    data = pattern(40_000)
    began_s = time.monotonic()
    ends.server.sendall(data)
    assert read(ends.client, len(data)) == data
    assert time.monotonic() - began_s >= 0.3  # the last piece is not waited for


def test_flips_one_byte_in_so_many(ends: Ends) -> None:
    ends.relay.flip(1000, times=3, direction="up")
    data = pattern(10_000)
    for start in range(0, len(data), 700):  # the count goes on from one piece to the next
        ends.client.sendall(data[start : start + 700])
        assert len(read(ends.server, len(data[start : start + 700]))) > 0
        if start + 700 >= 3500:
            break
    assert ends.relay.counts.flipped_bytes == 3
    ends.client.sendall(data)
    assert read(ends.server, len(data)) == data


def test_flipped_bytes_are_where_they_should_be(ends: Ends) -> None:
    ends.relay.flip(1000, times=2, direction="up")
    data = pattern(5_000)
    ends.client.sendall(data)
    got = read(ends.server, len(data))
    assert [at for at in range(len(data)) if got[at] != data[at]] == [999, 1999]


def test_repeats_a_chunk(ends: Ends) -> None:
    ends.relay.repeat(4, direction="up")
    ends.client.sendall(b"abcdefgh")
    assert read(ends.server, 12) == b"abcdabcdefgh"
    ends.client.sendall(b"once")
    assert read(ends.server, 4) == b"once"
    ends.server.sendall(b"ok")
    assert read(ends.client, 2) == b"ok"
    assert ends.relay.counts.duplicated_bytes == 4


def test_loses_everything_for_a_while(ends: Ends) -> None:
    ends.relay.change("up", lose=True)
    ends.client.sendall(b"lost")
    while ends.relay.counts.lost_bytes < 4:
        time.sleep(0.01)
    ends.relay.heal()
    ends.client.sendall(b"found")
    assert read(ends.server, 5) == b"found"


def test_refuses_new_connections_only(ends: Ends) -> None:
    ends.relay.refuse(True)
    with pytest.raises(ConnectionResetError):  # perhaps while it dials
        ends.dial().recv(1)
    ends.client.sendall(b"old")
    assert read(ends.server, 3) == b"old"
    ends.relay.heal()
    client, server = ends.connect()
    client.sendall(b"new")
    assert read(server, 3) == b"new"
    assert ends.relay.counts.refused == 1


def test_healing_calls_damage_off(ends: Ends) -> None:
    ends.relay.flip(2, times=9)
    ends.relay.repeat(100)
    ends.relay.change(delay_s=3000.0, bytes_per_s=1.0)
    ends.relay.heal()
    for words in (b"whole", b"again"):
        ends.client.sendall(words)
        assert read(ends.server, 5) == words


def test_what_lasts_holds_for_connections_to_come(ends: Ends) -> None:
    ends.relay.change("up", lose=True)
    client = ends.dial()
    client.sendall(b"lost")
    while ends.relay.counts.lost_bytes < 4:
        time.sleep(0.01)
    ends.relay.change("up", connection=ends.relay.open_connections[0], lose=False)
    ends.client.sendall(b"found")
    assert read(ends.server, 5) == b"found"
    client.sendall(b"lost")
    while ends.relay.counts.lost_bytes < 8:
        time.sleep(0.01)


def test_target_is_asked_at_every_connection_and_may_be_away() -> None:
    addresses: list[str] = []
    with (
        Relay(lambda: addresses[-1] if addresses else "") as relay,
        socket.create_server(("127.0.0.1", 0)) as target,
    ):
        with pytest.raises(ConnectionResetError), socket.create_connection(split_address(relay.address)) as early:
            early.recv(1)
        addresses.append(f"127.0.0.1:{target.getsockname()[1]}")
        target.settimeout(WAIT_S)
        with socket.create_connection(split_address(relay.address), timeout=WAIT_S) as client:
            server, _ = target.accept()
            with server:
                client.sendall(b"hi")
                assert read(server, 2) == b"hi"
        assert relay.counts.unanswered == 1


def test_close_ends_everything(ends: Ends) -> None:
    ends.relay.cut("fin")
    client, _ = ends.connect()
    ends.relay.change(hold=True)
    ends.relay.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(OSError, match="closed"):
        ends.relay.cut()
    ends.relay.close()


def test_wrong_use_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="use an address of loopback"):
        Relay("127.0.0.1:1", "0.0.0.0:0")
    for wrong in ({"delay_s": -1.0}, {"bytes_per_s": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ends.relay.change(**wrong)
    with pytest.raises(ValueError, match="use at least 0 and 1"):
        ends.relay.flip(0)
    with pytest.raises(ValueError, match="repeat"):
        ends.relay.repeat(-1)


# ---- a session through it -------------------------------------------------------------------------------------------

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
        first = listener.receive(WAIT_S)
        assert first is not None and first.payload == payload
        if fault in ("rst", "fin"):
            assert relay.cut("rst" if fault == "rst" else "fin") == 1 + CONFIG.stripes
        elif fault == "flip":
            relay.flip(100_000, times=5, direction="up")
        else:
            relay.repeat(100, direction="up")
        if fault in ("flip", "repeat"):
            link.send(VALUE, payload)
        heard = [listener.receive(WAIT_S)]
        while heard[-1] is not None and heard[-1].kind == "message":
            assert heard[-1].payload in (b"", payload)
            heard.append(listener.receive(WAIT_S))
        assert heard[-1] is not None and heard[-1].kind == "disconnected"
        ending = link.receive(WAIT_S)
        assert ending is not None and ending.kind == "disconnected"
        link.close(1.0)
    listener.close(1.0)
