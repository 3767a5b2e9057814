"""Measure the rate of payloads, and its ratio to the rate of a socket.

Without a role, sender and receiver are two processes on this machine. In each run the same bytes go once over a plain
blocking socket (sendall, recv_into), with --tls over a TLS socket, and once over the transport for every number of
stripes, one after another. `value` is the median ratio of the two rates. `cpu_value` is that of the processor times of
both sides, the socket's over the transport's. With --core all processes share one core.

With `--listen` at one end of a network and `--connect` at the other, payloads go up, or down with `--down`, for
`--seconds`. The connecting end prints the rate of arrived payload bytes. The system limits the bytes in flight of a
connection; set net.ipv4.tcp_wmem and tcp_rmem.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from diloco_jax.protocol.messages import SYNCER, Advance, FragmentValue, GlobalFragment, StateRequest
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, connect, listen
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.spares import keep_spares
from diloco_jax.transport.trust import certificates
from diloco_jax.transport.trust.security import bulk_context, dial

RUN, LEARNER = "transport-bench", "sender"
IN_FLIGHT = 3
WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stripes", type=int, nargs="+", default=[1, 4], help="with --connect: the first one counts")
    parser.add_argument("--payload-mb", type=float, default=64.0, help="megabytes (10^6) of one payload")
    parser.add_argument("--payloads", type=int, default=8, help="payloads in each measurement of a run")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--chunk-bytes", type=int, default=TransportConfig().chunk_bytes)
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve at this end of a network until killed")
    parser.add_argument("--connect", metavar="HOST:PORT", help="measure from this end")
    parser.add_argument("--down", action="store_true", help="with --connect: payloads come from the listening end")
    parser.add_argument("--seconds", type=float, default=10.0, help="with --connect: length of the measurement")
    parser.add_argument("--tls", action="store_true", help="compare encrypted connections")
    parser.add_argument("--core", type=int, help="the core for all processes of a comparison")
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    keep_spares(in_flight_bytes(arguments.payload_mb))
    if arguments.listen:
        serve(config_of(arguments.listen, arguments.chunk_bytes), None)
    elif arguments.connect:
        say(measure_network(arguments), arguments.json)
    else:
        for result in compare(arguments):
            say(result, arguments.json)


def say(result: dict[str, object], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write("{name}: {value:.3g} {unit} ({low:.3g} to {high:.3g}, {runs} runs)".format(**result))
        if "cpu_value" in result:
            sys.stdout.write("; processor time {cpu_value:.3g} ({cpu_low:.3g} to {cpu_high:.3g})".format(**result))
        sys.stdout.write("\n")
    sys.stdout.flush()


def config_of(address: str, chunk_bytes: int, stripes: int = 1, files: dict[str, str] | None = None) -> TransportConfig:
    plain = TransportConfig(address=address, allow_plaintext=True, chunk_bytes=chunk_bytes, stripes=stripes)
    return replace(plain, **(files or {}))  # type: ignore[arg-type]


def in_flight_bytes(payload_mb: float) -> int:
    # The reader still has one more.
    return (IN_FLIGHT + 1) * round(payload_mb * 1e6)


def serve(config: TransportConfig, pipe: Connection | None, payload_mb: float = 0.0) -> None:
    """Answer every payload, and every request with a payload of as many bytes as its `part` says."""
    keep_spares(in_flight_bytes(payload_mb))
    listener = listen(config, run_id=RUN)
    if pipe is not None:
        pipe.send(listener.address)
    payload = b""
    # The pipe becomes readable when the other process ends.
    while pipe is None or not pipe.poll():
        delivery = listener.receive(1.0)
        if delivery is None:
            continue
        if isinstance(delivery.message, FragmentValue):
            listener.send(delivery.peer, Advance(delivery.message.global_step))
        elif isinstance(delivery.message, StateRequest):
            if len(payload) != delivery.message.part:
                payload = os.urandom(delivery.message.part)
            listener.send(delivery.peer, GlobalFragment(1, 0, 1, len(payload), 1, 0), payload)


def serve_plain(config: TransportConfig, pipe: Connection, payload_bytes: int) -> None:
    """Read payloads from a socket into one buffer, and answer each with a byte."""
    buffer = memoryview(bytearray(payload_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send("{}:{}".format(*server.getsockname()))
        connection, _ = server.accept()
        context = bulk_context(config, SYNCER, serves=True)
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        while True:
            filled = 0
            while filled < payload_bytes:
                size = connection.recv_into(buffer[filled:])
                if not size:
                    return
                filled += size
            connection.sendall(b"!")


def exchange(link: GrpcLink, payload: bytes, *, down: bool, in_flight: int, until: tuple[int, float]) -> float:
    """Move payloads until a number or a time is reached, and return the arrived bytes per second."""
    number_max, seconds_max = until
    asked = arrived = 0
    began_s = ended_s = time.perf_counter()

    def ask() -> None:
        if down:
            # A report would not do: a newer one replaces one that waits.
            link.send(StateRequest(LEARNER, 0, asked, LEARNER, 0, len(payload)))
        else:
            link.send(FragmentValue(LEARNER, 0, asked, 0, 1, 1, 1, 0, len(payload), 1), payload)

    while arrived < number_max and ended_s - began_s < seconds_max:
        while asked < min(arrived + in_flight, number_max):
            ask()
            asked += 1
        delivery = link.receive(WAIT_S)
        if delivery is None or delivery.kind != "message":
            raise ConnectionError(f"no message arrived within {WAIT_S:g} s" if delivery is None else delivery.reason)
        arrived += 1
        ended_s = time.perf_counter()
    return arrived * len(payload) / (ended_s - began_s)


def exchange_plain(connection: socket.socket, payload: bytes, number: int) -> float:
    """Move payloads over a plain socket, and return the bytes per second."""
    began_s = time.perf_counter()
    for _ in range(number):
        connection.sendall(payload)
    missing = number
    while missing:
        missing -= len(connection.recv(missing))
    return number * len(payload) / (time.perf_counter() - began_s)


def measure_network(arguments: argparse.Namespace) -> dict[str, object]:
    config = config_of(arguments.connect, arguments.chunk_bytes, arguments.stripes[0])
    link = connect(config, run_id=RUN, learner_id=LEARNER, incarnation=0)
    payload = os.urandom(round(arguments.payload_mb * 1e6))
    until = (sys.maxsize, arguments.seconds)
    rate = exchange(link, payload, down=arguments.down, in_flight=IN_FLIGHT, until=until)
    link.close(0.0)
    return {
        "name": "transport_rate_down" if arguments.down else "transport_rate_up",
        "value": rate,
        "unit": "B/s",
        "low": rate,
        "high": rate,
        "runs": 1,
        "stripes": config.stripes,
        "chunk_bytes": config.chunk_bytes,
        "payload_bytes": len(payload),
    }


def compare(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Make all measurements on this machine."""
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    payload = os.urandom(round(arguments.payload_mb * 1e6))
    processes = multiprocessing.get_context("forkserver")
    # All processes share these imports.
    processes.set_forkserver_preload([GrpcLink.__module__])
    with tempfile.TemporaryDirectory() as folder:
        files = dict[str, str]()
        if arguments.tls:
            certificates.make(Path(folder), [LEARNER])
            files = certificates.settings(Path(folder))
        config = config_of("127.0.0.1:0", arguments.chunk_bytes, files=files)
        here, there = processes.Pipe()
        child = processes.Process(target=serve_plain, args=(config, there, len(payload)), daemon=True)
        child.start()
        plain_child = child.pid
        plain = dial(here.recv(), bulk_context(config, LEARNER), WAIT_S)
        # The pipes stay open as long as the measurements.
        pipes = [processes.Pipe() for _ in arguments.stripes]
        links: dict[int, GrpcLink] = {}
        children: dict[int, int | None] = {}
        for stripes, (ours, theirs) in zip(arguments.stripes, pipes, strict=True):
            child = processes.Process(target=serve, args=(config, theirs, arguments.payload_mb), daemon=True)
            child.start()
            children[stripes] = child.pid
            striped = replace(config, address=ours.recv(), stripes=stripes)
            links[stripes] = connect(striped, run_id=RUN, learner_id=LEARNER, incarnation=0)
        number = arguments.payloads
        plain_costs: list[Cost] = []
        costs: dict[int, list[Cost]] = {stripes: [] for stripes in links}
        # The first run warms up.
        for run in range(-1, arguments.runs):
            began = processor_s(plain_child)
            rate = exchange_plain(plain, payload, number)
            plain_costs += [Cost(rate, processor_s(plain_child) - began)] * (run >= 0)
            for stripes, link in links.items():
                began = processor_s(children[stripes])
                rate = exchange(link, payload, down=arguments.down, in_flight=IN_FLIGHT, until=(number, WAIT_S))
                costs[stripes] += [Cost(rate, processor_s(children[stripes]) - began)] * (run >= 0)
    way = f"{'down' if arguments.down else 'up'}"
    kind = "tls" if arguments.tls else "plain"
    return [
        ratio(f"transport_{way}_{stripes}_stripes_vs_{kind}_socket", theirs, plain_costs, number * len(payload))
        | {"chunk_bytes": arguments.chunk_bytes, "payload_bytes": len(payload), "core": arguments.core}
        for stripes, theirs in costs.items()
    ]


class Cost(NamedTuple):
    """One measurement."""

    bytes_per_s: float
    processor_s: float  # both sides


def processor_s(other: int | None) -> float:
    """Return the processor time of this process and of another one so far."""
    lines = [file.read_text() for pid in ("self", str(other)) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(line.split()[0]) for line in lines) / 1e9


def ratio(name: str, ours: list[Cost], plain: list[Cost], moved_bytes: int) -> dict[str, object]:
    """Return the result for the costs of the transport and of the socket in each run."""
    rates = [mine.bytes_per_s / raw.bytes_per_s for mine, raw in zip(ours, plain, strict=True)]
    shares = [raw.processor_s / mine.processor_s for mine, raw in zip(ours, plain, strict=True)]
    return {
        "name": name,
        "value": statistics.median(rates),
        "unit": "ratio",
        "low": min(rates),
        "high": max(rates),
        "cpu_value": statistics.median(shares),
        "cpu_low": min(shares),
        "cpu_high": max(shares),
        "runs": len(rates),
        "bytes_per_s": statistics.median(each.bytes_per_s for each in ours),
        "socket_bytes_per_s": statistics.median(each.bytes_per_s for each in plain),
        "processor_s_per_gb": statistics.median(each.processor_s for each in ours) / moved_bytes * 1e9,
        "socket_processor_s_per_gb": statistics.median(each.processor_s for each in plain) / moved_bytes * 1e9,
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
