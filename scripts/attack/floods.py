"""Hostile learners that say too much, or anything: floods, answers that nobody asked for, and random fields."""

import contextlib
import time
import typing
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

from attack.hostile import LIVES, aftermath, merged_once
from attack.learner import Sent, StubLearner, Tamper, Way
from attack.site import Site, comes_true, syncer
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.protocol import messages as m
from diloco_jax.transport import wire
from diloco_jax.transport.link import BULK_TYPES, LinkClosed

FLOOD = 20_000
REPORTS = 3_000
# What a flood may add to the tape, beside the rounds that go on meanwhile.
TAPE_BYTES_MAX = 4 << 20
RANDOM_S = 20.0
KINDS: tuple[Any, ...] = (*typing.get_args(m.LearnerMessage), m.MetricsReport)
COUNTERS = (0, 1, 2, 3, 1 << 20, 1 << 31, 1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62)
BEYOND = ((1 << 62) + 1, (1 << 63) - 1, -1, -(1 << 63))


def shout(evil: StubLearner, message: Any, count: int) -> int:
    """Send a message many times; return how often the link took it."""
    for number in range(count):
        try:
            evil.say(message)
        except LinkClosed:
            return number
    return count


@CATALOGUE.add("flood-heartbeats", LIVES)
def flood_heartbeats(ground: Ground, seen: Findings) -> None:
    """A learner sends 20,000 heartbeats as fast as it can, whenever it is connected."""
    with syncer(ground.folder / "site") as site:
        honest, evil = site.honest(), merged_once(site, "evil")
        size = _tape_bytes(site)
        sent = shout(evil, m.Heartbeat("evil", 1), FLOOD)
        time.sleep(0.5)
        sent += shout(evil, m.Heartbeat("evil", 1), FLOOD)
        grown = _tape_bytes(site) - size
        seen.expect(grown < TAPE_BYTES_MAX, f"{sent} sent, tape + {grown / 1e6:.1f} MB")
        evil.end()
        aftermath(site, honest, seen)


@CATALOGUE.add("flood-reports", LIVES)
def flood_reports(ground: Ground, seen: Findings) -> None:
    """A learner sends 3,000 reports of steps that took no time."""
    with syncer(ground.folder / "site") as site:
        honest, evil = site.honest(), merged_once(site, "evil")
        size, told = _tape_bytes(site), evil.machine.contact.report
        assert told is not None
        sent = 0
        for number in range(REPORTS):
            step = told.local_step + 1000 + number
            with contextlib.suppress(LinkClosed):
                evil.say(told._replace(local_step=step, tokens=64 * step, step_s=0.0))
                sent += 1
        grown = _tape_bytes(site) - size
        seen.expect(grown < TAPE_BYTES_MAX, f"{sent} sent, tape + {grown / 1e6:.1f} MB")
        aftermath(site, honest, seen)


def _tape_bytes(site: Site) -> int:
    return (site.run_dir / "tape.jsonl").stat().st_size


@CATALOGUE.add("nonsense", LIVES)
def nonsense(ground: Ground, seen: Findings) -> None:
    """A learner sends scores, parts of states, requests and refusals that nobody asked for, with absurd numbers."""
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
            m.StatePart(*me, "island-0", huge, 0, 1 << 22, huge, 16, huge),
            m.StatePart(*me, "nobody", 0, 0, 1, 0, huge),
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


class Liar:
    """Random fields for the messages of a learner: some of what it sends, or all."""

    def __init__(self, random: Random, way: Way, name: str, incarnation: int) -> None:
        self._random, self._count = random, len(way.plan.fragments)
        fingerprint = way.machine(name, incarnation).contact.fingerprint
        number, real, rows = self._number, self._real, self._rows
        self._by_name: dict[str, Any] = {
            "learner_id": lambda: name,
            "incarnation": lambda: incarnation,
            "fingerprint": lambda: fingerprint,
            "versions": lambda: rows(number),
            "digests": lambda: rows(lambda: random.getrandbits(64)),
            "adopted": lambda: rows(lambda: m.Adopted(number(), number(), number())),
            "arrived": lambda: rows(lambda: m.Arrived(number(), number(), real())),
            "scores": lambda: (m.Metric("x", real()),),
            "values": lambda: (m.Metric("x", real()),),
            "evaluates": lambda: random.random() < 0.5,
        }
        texts = ("", "island-0", "evil", "\x1b[2J\n")
        self._by_type: dict[type, Any] = {int: number, float: real, str: lambda: random.choice(texts)}

    def _number(self) -> int:
        return self._random.choice(COUNTERS) if self._random.random() < 0.95 else self._random.choice(BEYOND)

    def _real(self) -> float:
        return self._random.choice((0.0, 1.0, 1e-300, 1e308, 0.5, -1.0, float("nan"), float("inf")))

    def _rows(self, make: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(make() for _ in range(self._count if self._random.random() < 0.8 else self._random.randrange(4)))

    def field(self, kind: type, name: str) -> Any:
        """Draw a field of a class of messages."""
        return (self._by_name.get(name) or self._by_type[typing.get_type_hints(kind)[name]])()

    def invented(self) -> tuple[Any, bytes]:
        """Draw a message of any class, and a payload."""
        kind = self._random.choice(KINDS)
        message = kind(**{name: self.field(kind, name) for name in kind._fields})
        return message, self._random.randbytes(self._random.choice((0, 16, 1024))) if kind in BULK_TYPES else b""

    def tamper(self, message: Any, payload: bytes) -> Sent:
        """Change a field or two in one of three messages, and invent another one now and then."""
        sent = [(message, payload)]
        if self._random.random() < 1 / 3:
            names = self._random.sample(message._fields, min(2, len(message._fields)))
            sent = [(message._replace(**{name: self.field(type(message), name) for name in names}), payload)]
        return [*sent, self.invented()] if self._random.random() < 0.1 else sent


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let this process send what its own checks would not: the syncer's have to do."""
    with mock.patch.object(wire, "check_body", lambda body: None):
        yield


@CATALOGUE.add("random-fields", LIVES + " and a rewind")
def random_fields(ground: Ground, seen: Findings) -> None:
    """For 20 seconds a learner sends messages with random fields up to 2^63, in as many lives as it needs."""
    with syncer(ground.folder / "site") as site, unchecked():
        honest, life, sent, until_s = site.honest(), 0, 0, time.monotonic() + RANDOM_S
        way = honest[0].way

        def counted(liar: Liar) -> Tamper:
            def tamper(message: Any, payload: bytes) -> Sent:
                nonlocal sent
                changed = liar.tamper(message, payload)
                sent += len(changed)
                return changed

            return tamper

        while site.lives and time.monotonic() < until_s:
            life += 1
            evil = StubLearner(way, "evil", life, step_s=0.01, tamper=counted(Liar(ground.random, way, "evil", life)))
            comes_true(lambda evil=evil: not evil.lives or not site.lives, min(5.0, until_s - time.monotonic()))
            evil.close()
        seen.expect(life, f"{sent} messages in {life} lives")
        aftermath(site, honest, seen, rewind=True)
