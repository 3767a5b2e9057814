"""A check that a path is a regular file: opening a named pipe would wait forever."""

import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> None:
    """Raise ValueError if the path is a pipe, a socket or a device; OSError if it cannot be examined."""
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise ValueError(f"it is {kind}, and not a regular file")
