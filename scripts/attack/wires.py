"""Attacks below the protocol: flipped bits, connections of strangers, and replayed sessions."""

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from attack.hostile import aftermath, merged_once, rounds_go_on
from attack.site import Site, comes_true, syncer, wait_until
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.tools.chaos import relay
from diloco_jax.transport.link import split_address
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.front import UNSORTED_MAX
from diloco_jax.transport.session.stripe import GREETING

PATCHING = threading.Lock()
# This number is rare among bytes, so a counter with these tokens is found in a stream.
ODD_TOKENS = 9_000_027
VARINT_BYTES_MAX = 10
STRANGERS = 500
# A stranger may hold a descriptor for this time; the syncer's limits in docs/timeouts.md are shorter.
GREETING_WITHIN_S, CALL_WITHIN_S = 30.0, 90.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# The preface is followed by an empty SETTINGS frame.
HTTP2 = PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
DESCRIPTORS = 64


class Edited(relay.Way):
    """One direction of a connection that passes all bytes through `edit`; set it before the relay is used."""

    edit: Any = staticmethod(lambda way, data: data)

    def _damaged(self, data: bytes) -> bytes:
        return type(self).edit(self, data)


@contextlib.contextmanager
def relayed(site: Site, edit: Any) -> Iterator[relay.Relay]:
    """Yield a relay to the syncer that passes all bytes, with their direction, through `edit`."""
    kind = type("Edited", (Edited,), {"edit": staticmethod(edit)})
    # Another attack of this process must not use these relays or undo the patch.
    with PATCHING, mock.patch.object(relay, "Way", kind), relay.Relay(site.address) as made:
        try:
            yield made
        finally:
            site.end_stubs()


def flip_tokens(data: bytes) -> tuple[bytes, int]:
    """Set a bit in the first counter of odd tokens, and return the bytes and the new counter (0: not found)."""
    tag = pb.StepReport(tokens=1).SerializeToString()[0]
    for at in range(len(data) - 5):
        if data[at] != tag:
            continue
        value, size = 0, 0
        for shift, byte in enumerate(data[at + 1 : at + 1 + VARINT_BYTES_MAX]):
            value |= (byte & 0x7F) << 7 * shift
            size += 1
            if byte < 0x80:
                break
        if value and value % ODD_TOKENS == 0 and size >= 4 and not data[at + 4] & 0x40:
            flipped = bytearray(data)
            flipped[at + 4] |= 0x40
            return bytes(flipped), value + (1 << 27)
    return data, 0


@CATALOGUE.add("wire-flip", "the changed report is not accepted; its learner trains on")
def wire_flip(ground: Ground, seen: Findings) -> None:
    """A TCP relay flips one bit of a counter in a report, on plaintext."""
    flipped: list[int] = []

    def edit(way: Any, data: bytes) -> bytes:
        if flipped:
            return data
        changed, value = flip_tokens(data)
        flipped.extend([value] * bool(value))
        return changed

    with syncer(ground.folder / "site") as site, relayed(site, edit) as made:
        honest = site.honest()
        victim = site.stub("victim", way=site.way(made.address), step_tokens=ODD_TOKENS)
        wait_until(lambda: flipped or not victim.is_running, "a report whose bit was flipped")
        comes_true(lambda: not victim.is_running, 1.0)
        before = victim.merged
        again = comes_true(lambda: victim.merged >= before + 3 or not victim.is_running)
        text = (site.run_dir / "tape.jsonl").read_text(encoding="utf-8")
        seen.expect(f",{flipped[0]}," not in text, "not accepted", f"{flipped[0]:,} tokens are on the tape")
        ended = victim.sessions > 1
        seen.expect(ended, "its session was ended", "its session continued")
        seen.expect(
            again and victim.is_running, "its learner trains on", f"it is out: {victim.ended or victim.trouble}"
        )
        rounds_go_on(site, honest, seen, "after it")


@CATALOGUE.add("wire-replay", "nothing of it reaches the machine")
def wire_replay(ground: Ground, seen: Findings) -> None:
    """A recorded plaintext session is sent again, byte for byte, after its end."""
    recorded: dict[Any, bytearray] = {}

    def edit(way: Any, data: bytes) -> bytes:
        recorded.setdefault(way, bytearray()).extend(data)
        return data

    with syncer(ground.folder / "site") as site, relayed(site, edit) as made:
        honest = site.honest()
        victim = site.stub("victim", way=site.way(made.address))
        wait_until(lambda: victim.merged, "a round that merges the victim")
        victim.close()
        wait_until(lambda: any(line[:3:2] == ["disconnect", "victim"] for line in site.tape()), "its end on the tape")
        before, open_s = _lines_of(site, "victim"), 3.0
        ways = [bytes(data) for data in recorded.values() if data.startswith((b"PRI ", GREETING))]
        with strangers(site, len(ways), ways) as connected:
            time.sleep(open_s)
        after = _lines_of(site, "victim")
        seen.expect(len(connected) == len(ways) >= 2, f"{len(ways)} connections sent again")
        seen.expect(after == before, "nothing on the tape", f"{after - before} lines of the dead learner on the tape")
        rounds_go_on(site, honest, seen, "after it")


def _lines_of(site: Site, name: str) -> int:
    return sum(name in line[2:4] for line in site.tape())


@contextlib.contextmanager
def strangers(site: Site, count: int, says: list[bytes] | None = None) -> Iterator[list[socket.socket]]:
    """Yield connections to the syncer that send one text each, or nothing."""
    host, port = split_address(site.address)
    with contextlib.ExitStack() as stack:
        made: list[socket.socket] = []
        for number in range(count):
            with contextlib.suppress(OSError):
                each = stack.enter_context(socket.create_connection((host, port), timeout=1.0))
                made.append(each)
                if says:
                    each.sendall(says[number % len(says)])
        yield made


def descriptors(site: Site) -> int:
    """Return the number of open descriptors of the syncer."""
    assert site.process is not None
    return len(os.listdir(Path("/proc") / str(site.process.pid) / "fd"))


def _idle(name: str, about: str, says: bytes, within_s: float, *, long: bool = False) -> None:
    def idle(ground: Ground, seen: Findings) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
        with syncer(ground.folder / "site") as site:
            honest = site.honest()
            before = descriptors(site)
            with strangers(site, STRANGERS, [says] if says else None) as made:
                # The front keeps few of those that say nothing.
                least = len(made) if says else UNSORTED_MAX
                wait_until(lambda: descriptors(site) >= before + least / 2, "the connections")
                began_s = time.monotonic()
                newcomer = site.stub("newcomer")
                seen.expect(comes_true(lambda: newcomer.merged), "a newcomer is merged")
                comes_true(lambda: descriptors(site) < before + 20, within_s - (time.monotonic() - began_s))
                left, waited_s = max(0, descriptors(site) - before), time.monotonic() - began_s
                seen.expect(left < 20, f"dropped after {waited_s:.0f} s", f"{left} are open after {waited_s:.0f} s")
                rounds_go_on(site, honest, seen, "beside them")

    idle.__doc__ = about
    CATALOGUE.add(name, f"dropped within {within_s:g} s; a newcomer is admitted beside them", long=long)(idle)


_idle("wire-half-open", "500 connections are opened, and send nothing.", b"", GREETING_WITHIN_S)
_idle("wire-idle", "500 connections greet as HTTP/2 does, and call nothing.", HTTP2, CALL_WITHIN_S, long=True)


@CATALOGUE.add("wire-garbage", "the syncer runs, honest rounds continue, also after a failover")
def wire_garbage(ground: Ground, seen: Findings) -> None:
    """300 connections send random bytes, some of them after the preface of HTTP/2."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        texts = [PREFACE * (number % 2) + ground.random.randbytes(1 << number % 12) for number in range(48)]
        with strangers(site, 300, texts) as made:
            seen.expect(len(made) >= 250, f"{len(made)} connections")
            newcomer = merged_once(site, "newcomer")
            newcomer.end()
        aftermath(site, honest, seen)


@CATALOGUE.add("wire-descriptors", "honest rounds continue; the log names the limit; a newcomer joins after they left")
def wire_descriptors(ground: Ground, seen: Findings) -> None:
    """Strangers use all 64 descriptors of the syncer."""
    with syncer(ground.folder / "site") as site:
        site.kill()
        site.log.unlink()
        site.start(before=["bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "bash"])
        honest = site.honest()
        with strangers(site, 2 * DESCRIPTORS) as made:
            wait_until(lambda: descriptors(site) >= DESCRIPTORS - 8, "a syncer without descriptors")
            seen.expect(len(made) > DESCRIPTORS, f"{len(made)} strangers, {descriptors(site)} descriptors")
            rounds_go_on(site, honest, seen, "beside them", 30)
        text = site.log.read_text(encoding="utf-8", errors="replace")
        right = "ulimit -n" in text and "has free space" not in text
        seen.expect(right, "the log names the limit of open files", "the log blames free space on the disk")
        newcomer = site.stub("newcomer")
        seen.expect(comes_true(lambda: newcomer.merged), "a newcomer is merged")
        aftermath(site, honest, seen)
