"""Plain TCP sockets as a measure of what a link can carry at best: one process listens, the other sends.

    _wan_socket.py listen HOST:PORT                              prints "ready", then one JSON object per transfer
    _wan_socket.py connect HOST:PORT --streams 8 --mib 64        prints one JSON object

The clock runs from the first byte sent until the listener has said that it has the last one.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time

BLOCK_BYTES = 1 << 20
SIZE_BYTES = 8  # each stream begins with its length


def receive(connection: socket.socket) -> None:
    """One stream: a length, as many bytes, and a byte back."""
    with connection:
        left = int.from_bytes(connection.recv(SIZE_BYTES, socket.MSG_WAITALL), "big")
        buffer = bytearray(BLOCK_BYTES)
        while left:
            count = connection.recv_into(buffer, min(left, BLOCK_BYTES))
            if not count:
                return
            left -= count
        connection.sendall(b"!")


def send(connection: socket.socket, num_bytes: int) -> None:
    block, left = memoryview(bytes(BLOCK_BYTES)), num_bytes
    connection.sendall(num_bytes.to_bytes(SIZE_BYTES, "big"))
    while left:
        left -= connection.send(block[: min(left, BLOCK_BYTES)])
    if connection.recv(1) != b"!":
        raise SystemExit("the other end has closed the connection too early")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("listen", "connect"))
    parser.add_argument("address", help="host:port")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64, help="MiB over all streams together")
    arguments = parser.parse_args()
    host, port = arguments.address.split(":")
    if arguments.role == "listen":
        server = socket.create_server((host, int(port)))
        print("ready", flush=True)
        while True:
            threading.Thread(target=receive, args=(server.accept()[0],), daemon=True).start()
    connections = [socket.create_connection((host, int(port))) for _ in range(arguments.streams)]
    share = (arguments.mib << 20) // arguments.streams
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=send, args=(connection, share)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began_s
    result = {"bytes": share * arguments.streams, "seconds": seconds, "cpu_s": time.process_time() - began_cpu_s}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
