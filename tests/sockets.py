"""The listening sockets of a process, as the kernel reports them."""

import contextlib
import os
import socket
from pathlib import Path

# The kernel writes this state of a socket into /proc/PID/net/tcp.
_LISTENS = "0A"


def listening(pid: int) -> list[str]:
    """Return the addresses where a process listens, as the kernel writes them (Linux)."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # The process closed it after the listing.
        with contextlib.suppress(FileNotFoundError):
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
    """Return a port of 127.0.0.1 without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
