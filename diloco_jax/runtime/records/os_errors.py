"""Remedies for errors of the operating system, in words for people."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or use another file system",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EMFILE: "raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: "raise the limit of open files of the machine (sysctl fs.file-max)",
    errno.EROFS: "the file system is read-only: mount it for writing, or choose another path",
    errno.EACCES: "correct its permissions, or choose another path",
    errno.EPERM: "correct its permissions, or choose another path",
    errno.EIO: "look at the disk and at the machine's log",
    errno.ENOENT: "the folder is gone: make it again, or choose another path",
}
# Libraries that raise separate errors quote the system's message. The message of ENFILE begins with that of EMFILE.
_LONGEST_FIRST = sorted(_REMEDIES, key=lambda number: -len(os.strerror(number)))
_WORDS = {number: re.compile(re.escape(os.strerror(number)), re.IGNORECASE) for number in _LONGEST_FIRST}


def number_of(error: BaseException) -> int | None:
    """Return the errno of an error or its cause, even if a library only quotes the message; None if unknown."""
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno in _REMEDIES:
            return each.errno
    text = str(error)
    return next((number for number, words in _WORDS.items() if words.search(text)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def remedy(error: BaseException, path: Path) -> str:
    """Return the remedy for an error of the operating system at a path; a general one for an unknown error."""
    number = number_of(error)
    return f"see that {path} has free space and may be written" if number is None else _REMEDIES[number]
