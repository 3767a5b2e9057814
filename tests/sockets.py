"""What a process does with the network, as the kernel tells it."""

import contextlib
import os
import socket
from pathlib import Path

_LISTENS = "0A"  # a socket's state in /proc/PID/net/tcp


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens, as the kernel writes them (Linux)."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            target = os.readlink(link)
            if target.startswith("socket:["):
                own.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        found += [row[1] for row in rows if row[3] == _LISTENS and row[9] in own]
    return found


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
