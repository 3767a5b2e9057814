"""The release of this program, and the protocol that it speaks: on the wire, on tapes and in snapshots."""

from typing import Any

RELEASE = "0.2.0"
# Messages and what they mean, settings on which both sides must agree and their defaults, what the machines decide on a
# tape and keep in a snapshot. A change of these that an older release would misread raises PROTOCOL; what this one no
# longer understands, of islands or in files, raises OLDEST.
PROTOCOL, OLDEST = 1, 1
STAMP = (PROTOCOL, RELEASE)


class OtherRelease(Exception):
    """A file of a release that this one does not read. No ValueError, which would stand for a damaged file."""


def check_readable(what: str, stamp: Any = STAMP) -> None:
    """Refuse a file whose release speaks a protocol that this one does not read.

    Args:
        what: the file, in words.
        stamp: (protocol, release) as its writer put it there; releases before 0.2.0 put none.

    Raises:
        OtherRelease: names both releases, and the remedy.
    """
    protocol, release = stamp
    if not OLDEST <= protocol <= PROTOCOL:
        raise OtherRelease(
            f"{what} is of diloco-jax {release}, protocol {protocol}; this is {RELEASE}, which reads {OLDEST} to "
            f"{PROTOCOL}: go on with {release}, or begin a new run with the model (`diloco export --format hf` by "
            f"{release}, `diloco import` by this one)"
        )


def install_hint(extra: str) -> str:
    """Return the commands that install an extra from a clone or a wheel: no package index has this package."""
    wheel = f"diloco_jax-{RELEASE}-py3-none-any.whl"
    return (
        f"in a clone run pip install -e '.[{extra}]', elsewhere pip install 'dist/{wheel}[{extra}]' (docs/install.md)"
    )
