"""Measure the best rate of a link with plain TCP sockets; one process listens, the other sends.

    socket_rate.py --listen HOST:PORT                            until it is killed
    socket_rate.py --connect HOST:PORT --stripes 8 --seconds 4   prints one JSON object, bytes per second

Each connection carries blocks for `--seconds`. The clock runs from the first sent byte until the listener has confirmed
the last one.
"""

import argparse
import json
import socket
import threading
import time

BLOCK_BYTES = 256 << 10
CONNECT_S = 10.0


def receive(connection: socket.socket) -> None:
    """Read everything from a connection, and answer with the number of bytes."""
    with connection:
        count, buffer = 0, bytearray(BLOCK_BYTES)
        while size := connection.recv_into(buffer):
            count += size
        connection.sendall(count.to_bytes(8, "big"))


def listen(address: tuple[str, int]) -> None:
    with socket.create_server(address, backlog=64) as server:
        while True:
            threading.Thread(target=receive, args=(server.accept()[0],), daemon=True).start()


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a listener, and wait if it has not started yet."""
    ends_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.05)


def send(connection: socket.socket, ends_s: float, arrived: list[int]) -> None:
    block = bytes(BLOCK_BYTES)
    while time.monotonic() < ends_s:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    arrived.append(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--listen", metavar="HOST:PORT")
    role.add_argument("--connect", metavar="HOST:PORT")
    parser.add_argument("--stripes", type=int, default=8, help="connections")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="accepted as by transport; the output is always JSON")
    arguments = parser.parse_args()
    host, port = (arguments.listen or arguments.connect).split(":")
    address = (host, int(port))
    if arguments.listen:
        listen(address)
    connections = [connect(address) for _ in range(arguments.stripes)]
    began_s, arrived = time.monotonic(), list[int]()
    ends_s = began_s + arguments.seconds
    threads = [threading.Thread(target=send, args=(connection, ends_s, arrived)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began_s
    print(json.dumps({"name": "socket_rate", "value": sum(arrived) / seconds, "unit": "bytes/s"}), flush=True)


if __name__ == "__main__":
    main()
