"""The release of this program, and the protocol that it speaks: on the wire, on tapes and in snapshots."""

from collections.abc import Iterable
from typing import Any

RELEASE = "0.4.0"
# The protocol has the messages and their meaning, the settings that both sides must agree on with their defaults, and
# what the machines decide from a tape and keep in a snapshot. PROTOCOL grows with a change that an older release would
# misread. OLDEST grows when this release stops understanding the islands or files of a protocol.
PROTOCOL, OLDEST = 2, 1
# RULES grows if the machines decide otherwise from the same inputs. A tape of other rules can be read, but this
# release may decide otherwise from it.
RULES = 3
# Since these rules a syncer that restarts knows the rates of the rounds after its snapshot.
RECALLS_ROUNDS = 3
STAMP = (PROTOCOL, RELEASE, RULES)


class OtherRelease(Exception):
    """A file of a release that this one does not read. It is not a ValueError, which means a damaged file."""


def check_readable(what: str, stamp: Any = STAMP) -> None:
    """Refuse a file whose release speaks a protocol that this one does not read.

    Args:
        what: name of the file for people.
        stamp: (protocol, release, rules) of its writer; releases before 0.2.0 wrote none, and some no rules.

    Raises:
        OtherRelease: the release does not read the file; the message names both releases and the remedy.
    """
    protocol, release, *_ = stamp
    if not OLDEST <= protocol <= PROTOCOL:
        raise OtherRelease(
            f"{what} is of diloco-jax {release}, protocol {protocol}; this is {RELEASE}, which reads {OLDEST} to "
            f"{PROTOCOL}: continue with {release}, or start a new run with the model (`diloco export --format hf` by "
            f"{release}, `diloco import` by this one)"
        )


def decided_elsewhere(stamps: Iterable[Any]) -> str:
    """Return what to do if this release decides otherwise than a tape with these stamps; "" if its rules are these."""
    for _, release, *rules in stamps:
        if (number := rules[0] if rules else 1) != RULES:
            return (
                f"diloco-jax {release} decided it by the rules {number}, and this release has the rules {RULES}: use "
                "that release, or let the run continue from its newest snapshot (`diloco syncer CONFIG --rewind`)"
            )
    return ""


def recalls_rounds(stamp: Any) -> bool:
    """Return whether a syncer with this stamp restarted with what the rounds after its snapshot had shown."""
    _, _, *rules = stamp
    return bool(rules) and int(rules[0]) >= RECALLS_ROUNDS


def install_hint(extra: str) -> str:
    """Return the commands that install an extra from a clone or a wheel: no package index has this package."""
    wheel = f"diloco_jax-{RELEASE}-py3-none-any.whl"
    return (
        f"in a clone run pip install -e '.[{extra}]', elsewhere pip install 'dist/{wheel}[{extra}]' (docs/install.md)"
    )
