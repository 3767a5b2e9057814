"""Hostile learners that send too much, or random data: floods, unrequested answers, and random fields."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from attack.hostile import UNHARMED, aftermath, merged_once
from attack.learner import Sent, StubLearner
from attack.site import Site, comes_true, syncer
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.protocol import messages as m
from diloco_jax.sim.hostile import Hostile
from diloco_jax.transport import wire
from diloco_jax.transport.link import BULK_TYPES, LinkClosed

FLOOD = 20_000
REPORTS = 3_000
# A flood may add this to the tape, which rounds extend in the meantime.
TAPE_BYTES_MAX = 4 << 20
RANDOM_S = 20.0


def send_many(evil: StubLearner, message: Any, count: int) -> int:
    """Send a message many times, and return how often the link accepted it."""
    for number in range(count):
        try:
            evil.say(message)
        except LinkClosed:
            return number
    return count


@CATALOGUE.add("flood-heartbeats", UNHARMED)
def flood_heartbeats(ground: Ground, seen: Findings) -> None:
    """A learner sends 20,000 heartbeats as fast as it can, whenever it is connected."""
    with syncer(ground.folder / "site") as site:
        honest, evil = site.honest(), merged_once(site, "evil")
        size = _tape_bytes(site)
        sent = send_many(evil, m.Heartbeat("evil", 1), FLOOD)
        time.sleep(0.5)
        sent += send_many(evil, m.Heartbeat("evil", 1), FLOOD)
        grown = _tape_bytes(site) - size
        seen.expect(grown < TAPE_BYTES_MAX, f"{sent} sent, tape + {grown / 1e6:.1f} MB")
        evil.end()
        aftermath(site, honest, seen)


@CATALOGUE.add("flood-reports", UNHARMED)
def flood_reports(ground: Ground, seen: Findings) -> None:
    """A learner sends 3,000 reports of steps that took no time."""
    with syncer(ground.folder / "site") as site:
        honest, evil = site.honest(), merged_once(site, "evil")
        size, report = _tape_bytes(site), evil.machine.contact.report
        assert report is not None
        sent = 0
        for number in range(REPORTS):
            step = report.local_step + 1000 + number
            with contextlib.suppress(LinkClosed):
                evil.say(report._replace(local_step=step, tokens=64 * step, step_s=0.0))
                sent += 1
        grown = _tape_bytes(site) - size
        seen.expect(grown < TAPE_BYTES_MAX, f"{sent} sent, tape + {grown / 1e6:.1f} MB")
        aftermath(site, honest, seen)


def _tape_bytes(site: Site) -> int:
    return (site.run_dir / "tape.jsonl").stat().st_size


@CATALOGUE.add("nonsense", UNHARMED)
def nonsense(ground: Ground, seen: Findings) -> None:
    """A learner sends scores, parts of states, requests and refusals without a reason, with absurd numbers."""
    huge = 1 << 62
    with syncer(ground.folder / "site", protocol={"recover_from_peers": True}) as site:
        honest, evil = site.honest(), merged_once(site, "evil")
        me = ("evil", 1)
        for message in (
            m.Score(
                *me, huge, huge, (huge, -1, 5), 1e308, float("nan"), huge, (m.Metric("a", float("inf")),), 1e308, ""
            ),
            m.Score(*me, 0, 0, (), float("-inf"), -1e308, 0, (), 0.0, "because"),
            m.StateRequest(*me, huge, "nobody", huge, huge),
            m.StateRequest(*me, 0, "island-0", 0, 1 << 40),
            m.StateRequest(*me, 0, "evil", 0, 0),
            m.StateRequest(*me, huge, "", 0, 0),
            m.StateChunk(*me, "island-0", huge, 0, 1 << 22, huge, 16, huge),
            m.StateChunk(*me, "nobody", 0, 0, 1, 0, huge),
            m.StateRefused(*me, "island-0", "no"),
            m.StateRefused(*me, "evil", "no"),
            m.StateDone(*me, "island-0"),
            m.StateDone(*me, "evil"),
            m.AnchorValue(*me, 0, huge, 1, 16),
            m.FragmentValue(*me, huge, 0, huge, huge, huge, huge, huge, huge, huge),
        ):
            evil.say(message, bytes(16) if isinstance(message, BULK_TYPES) else b"")
        time.sleep(1.0)
        aftermath(site, honest, seen)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turn off this process's checks of messages, so that only the syncer's checks remain."""
    with mock.patch.object(wire, "check_body", lambda body: None):
        yield


def _while_alive(evil: StubLearner, site: Site, within_s: float) -> None:
    """Wait until a learner or the syncer ends, but at most this many seconds."""
    comes_true(lambda: not (evil.is_running and site.is_running), within_s)


@CATALOGUE.add("random-fields", UNHARMED + " and a rewind")
def random_fields(ground: Ground, seen: Findings) -> None:
    """For 20 s a learner sends messages with random fields of any size, and restarts as often as necessary."""
    with syncer(ground.folder / "site") as site, unchecked():
        honest, incarnation, sent, until_s = site.honest(), 0, 0, time.monotonic() + RANDOM_S
        way, liar = honest[0].way, Hostile(ground.seed)

        def tamper(message: Any, payload: bytes) -> Sent:
            nonlocal sent
            changed = list(liar.sent(message))
            sent += len(changed)
            return [(each, payload if isinstance(each, BULK_TYPES) else b"") for each in changed]

        while site.is_running and time.monotonic() < until_s:
            incarnation += 1
            evil = StubLearner(way, "evil", incarnation, step_s=0.01, tamper=tamper)
            _while_alive(evil, site, min(5.0, until_s - time.monotonic()))
            evil.close()
        seen.expect(incarnation, f"{sent} messages in {incarnation} incarnations")
        aftermath(site, honest, seen, rewind=True)
