"""Hostile learners that send wrong greetings, reports, values, anchors and texts."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attack.learner import Sent, StubLearner
from attack.site import Site, comes_true, syncer, wait_until
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.core import codec
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol import messages as m
from diloco_jax.transport.link import LinkClosed
from tests.runtime.helpers import run

COUNTER_MAX = 1 << 62
# More rounds of honest learners than a round in flight could explain.
ROUNDS = 8
ROUNDS_WITHIN_S = 25.0
# The model starts with fragments of norm 5 to 6, and honest updates have a norm of 0.02.
NORM_MAX = 20.0
# The rule against outliers needs eight values of each fragment.
USUAL_ROUNDS = 24
MAYBE_REFUSED_S = 3.0
UNHARMED = "the syncer runs, honest rounds continue, norms stay small, also after a failover"
FORGED = "2026-01-01 00:00:00,000 island-0 expelled: forged"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def rounds_go_on(site: Site, honest: list[StubLearner], seen: Findings, when: str, count: int = ROUNDS) -> bool:
    """Expect `count` more rounds that merge all honest learners."""
    before = [stub.merged for stub in honest]

    def enough() -> bool:
        return all(stub.merged >= old + count for stub, old in zip(honest, before, strict=True))

    comes_true(lambda: enough() or not site.is_running, ROUNDS_WITHIN_S)
    if not seen.expect(site.is_running, f"{when}: the syncer runs", f"{when}: the syncer ended: {site.last_line}"):
        return False
    made = min(stub.merged - old for stub, old in zip(honest, before, strict=True))
    troubles = [f"{stub.name}: {stub.trouble or stub.ended}" for stub in honest if not stub.is_running]
    return seen.expect(enough(), f"{made} honest rounds", f"{when}: {made} of {count} honest rounds {troubles}")


def norms_stay(honest: list[StubLearner], seen: Findings) -> None:
    """Expect that every fragment of the global model was always small and finite."""
    norms = [norm for stub in honest for norm in stub.norms.values()]
    largest = max(norms) if np.isfinite(norms).all() else np.inf
    seen.expect(largest < NORM_MAX, f"norms up to {largest:.1f}", f"a fragment has norm {largest:.3g}")


def log_is_clean(path: Path, seen: Findings) -> None:
    """Expect that a log has only lines of the program itself, without control characters."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if forged := [line for line in lines if line.startswith(FORGED)]:
        seen.expect(False, "", f"{path.name} has {len(forged)} forged lines")
    if raw := [line for line in lines if CONTROL.search(line)]:
        seen.expect(False, "", f"{path.name} has raw control characters: {raw[0][:80]!r}")


def aftermath(site: Site, honest: list[StubLearner], seen: Findings, *, rewind: bool = False) -> None:
    """Expect that the run continues after an attack, after a failover and, with `rewind`, from its snapshot."""
    if not rounds_go_on(site, honest, seen, "after it"):
        # A supervisor would restart the syncer; the run's folder decides whether that helps.
        if not site.is_running:
            site.start()
            rounds_go_on(site, honest, seen, "restarted")
        return
    norms_stay(honest, seen)
    log_is_clean(site.log, seen)
    site.kill()
    site.start()
    if rounds_go_on(site, honest, seen, "after a failover") and rewind:
        for stub in honest:
            stub.close()
        site.kill()
        site.start("--rewind")
        again = [site.stub(stub.name, 2) for stub in honest]
        rounds_go_on(site, again, seen, "after a rewind")


def changing(kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Callable[[Any, bytes], Sent]:
    """Return a tamper that changes all messages of some classes."""

    def tamper(message: Any, payload: bytes) -> Sent:
        return [(change(message) if isinstance(message, kinds) else message, payload)]

    return tamper


def outcome(evil: StubLearner) -> str:
    """Describe the end of a hostile learner."""
    return f"it was stopped: {evil.ended[:120]}" if evil.ended else "it stayed in the run"


def _greeting(name: str, **fields: int) -> None:
    what = ", ".join(f"{field} 2^{number.bit_length() - 1}" for field, number in fields.items())

    def greet(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site") as site:
            honest = site.honest()
            evil = site.stub("evil", tamper=changing(m.Hello, lambda hello: hello._replace(**fields)))
            comes_true(lambda: evil.ended, MAYBE_REFUSED_S)
            seen.expect(True, outcome(evil))
            aftermath(site, honest, seen, rewind=True)

    greet.__doc__ = f"A newcomer greets with {what}."
    CATALOGUE.add(name, f"{UNHARMED} and a rewind")(greet)


_greeting("greet-samples-62", step_samples=COUNTER_MAX)
_greeting("greet-samples-31", step_samples=1 << 31)


@CATALOGUE.add("greet-incarnation", "refused, or replaced by the next one of that name")
def greet_incarnation(ground: Ground, seen: Findings) -> None:
    """A learner greets with incarnation 2^62 and leaves; then its owner joins with the time as incarnation."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        evil = site.stub("spare", COUNTER_MAX)
        comes_true(lambda: evil.ended or evil.merged, MAYBE_REFUSED_S)
        seen.expect(True, outcome(evil))
        evil.close()
        owner = site.stub("spare", int(time.time() * 1000))
        comes_true(lambda: owner.merged >= 2 or owner.ended)
        seen.expect(owner.merged >= 2, "its owner trains", f"its owner is locked out: {owner.ended[:160]}")
        rounds_go_on(site, honest, seen, "after it")


def merged_once(site: Site, name: str, **how: Any) -> StubLearner:
    """Start a learner, and wait until a round has merged it."""
    evil = site.stub(name, **how)
    wait_until(lambda: evil.merged, f"a round that merges {name}")
    return evil


def try_to_say(evil: StubLearner, message: Any, payload: bytes = b"") -> None:
    """Send a message if the link is open."""
    with contextlib.suppress(LinkClosed):
        evil.say(message, payload)


def _granted(name: str, about: str, *, greets: bool) -> None:
    def claim(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site") as site:
            honest, evil = site.honest(), merged_once(site, "evil")
            told, first = evil.sent[m.StepReport], COUNTER_MAX - 300
            if greets:
                try_to_say(evil, evil.sent[m.Hello]._replace(granted=first))
            # The first claim is close to the limit, and the second one is at the limit.
            for number, claimed in enumerate((first, COUNTER_MAX)):
                step = told.local_step + 1000 + number
                try_to_say(evil, told._replace(local_step=step, tokens=64 * step, granted=claimed, samples=claimed))
            comes_true(lambda: not site.is_running, MAYBE_REFUSED_S)
            evil.end()
            aftermath(site, honest, seen, rewind=True)

    claim.__doc__ = f"A learner claims in {about} that it holds leases near 2^62."
    CATALOGUE.add(name, f"{UNHARMED} and a rewind")(claim)


_granted("greet-granted", "a greeting and reports", greets=True)
_granted("report-granted", "reports", greets=False)


@CATALOGUE.add("report-tokens", UNHARMED + "; the run is not complete")
def report_tokens(ground: Ground, seen: Findings) -> None:
    """In a run of 10^12 tokens a learner reports 2^50 tokens, and sends a value with as many."""
    with syncer(ground.folder / "site", train={"steps": 0, "tokens": 10**12}) as site:
        honest = site.honest()
        lie = changing((m.StepReport, m.FragmentValue), lambda told: told._replace(tokens=1 << 50))
        evil = site.stub("evil", tamper=lie)
        comes_true(lambda: evil.ended or not site.is_running, 2 * MAYBE_REFUSED_S)
        state = site.status()["state"]
        seen.expect(state == "running", "the run is running", f"the run is {state}")
        aftermath(site, honest, seen)


@CATALOGUE.add("report-steps-back", UNHARMED)
def report_steps_back(ground: Ground, seen: Findings) -> None:
    """A learner's reports count backwards, in steps, tokens and samples, and name versions that never existed."""
    random = ground.random

    def back(told: m.StepReport) -> m.StepReport:
        adopted = tuple(m.Adopted(random.randrange(-1, 1 << 40), random.randrange(1 << 40), 0) for _ in told.adopted)
        step = max(1, 1000 - told.local_step)
        arrived = (m.Arrived(0, random.randrange(1 << 40), 1e9),)
        return told._replace(local_step=step, tokens=step, samples=0, adopted=adopted, arrived=arrived, step_s=1e9)

    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        site.stub("evil", tamper=changing(m.StepReport, back))
        aftermath(site, honest, seen)


@CATALOGUE.add("value-counters", UNHARMED)
def value_counters(ground: Ground, seen: Findings) -> None:
    """A learner's values are 10^7 times too large, and their counters of steps and tokens hide that."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        wait_until(lambda: honest[0].merged > USUAL_ROUNDS, "rounds that show usual values")

        def grow(message: Any, payload: bytes) -> Sent:
            if isinstance(message, m.FragmentValue):
                message = message._replace(steps=1 << 60, tokens=COUNTER_MAX)
                payload = evil.value(message.fragment_id, 1e4)
            return [(message, payload)]

        evil = site.stub("evil", tamper=grow)
        comes_true(lambda: evil.ended or evil.merged >= ROUNDS, 2 * MAYBE_REFUSED_S)
        seen.expect(not evil.merged, "none was merged", f"{evil.merged} were merged")
        aftermath(site, honest, seen)


@CATALOGUE.add("value-weight", "a value with more tokens than its learner reported is not merged")
def value_weight(ground: Ground, seen: Findings) -> None:
    """A learner's values claim 10^9 tokens per step, but its reports do not."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        evil = site.stub(
            "evil", tamper=changing(m.FragmentValue, lambda value: value._replace(tokens=10**9 * value.steps))
        )
        comes_true(lambda: evil.ended or evil.merged >= ROUNDS, 2 * MAYBE_REFUSED_S)
        seen.expect(not evil.merged, "none was merged", f"{evil.merged} were merged")
        aftermath(site, honest, seen)


def _payloads(name: str, about: str, make: Callable[[bytes], bytes]) -> None:
    def send(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site") as site:
            honest = site.honest()

            def spoil(message: Any, payload: bytes) -> Sent:
                if isinstance(message, m.FragmentValue):
                    payload = make(payload)
                    message = message._replace(payload_bytes=len(payload))
                return [(message, payload)]

            evil = site.stub("evil", tamper=spoil)
            comes_true(lambda: evil.ended, 4 * MAYBE_REFUSED_S)
            seen.expect(evil.ended.startswith("expelled"), "it was expelled", outcome(evil))
            aftermath(site, honest, seen)

    send.__doc__ = f"A learner answers pulls with {about}."
    CATALOGUE.add(name, f"expelled; {UNHARMED}")(send)


_payloads("value-nan", "NaN", lambda payload: b"\xff" * len(payload))
_payloads("value-short", "half a payload", lambda payload: payload[: len(payload) // 2])
_payloads("value-empty", "empty payloads", lambda _: b"")


def _comes_back_first(site: Site, honest: list[StubLearner], evil: StubLearner) -> None:
    """Restart the syncer, and let a hostile learner connect before the honest ones, as may happen by chance."""
    for stub in honest:
        stub.held.set()
    epoch = evil.machine.epoch
    site.kill()
    site.start()
    wait_until(lambda: evil.machine.epoch > epoch or evil.ended or not site.is_running, "the restarted syncer")
    comes_true(lambda: evil.ended or not site.is_running, MAYBE_REFUSED_S / 3)
    for stub in honest:
        stub.held.clear()


def _anchors(name: str, about: str, ahead: int, *, answers: bool) -> None:
    def claim(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site") as site:
            honest, armed = site.honest(), [False]

            def lie(message: Any, payload: bytes) -> Sent:
                if armed[0] and isinstance(message, m.Hello):
                    message = message._replace(versions=tuple(version + ahead for version in message.versions))
                return [(message, payload)]

            def answer(message: Any) -> None:
                if armed[0] and answers and isinstance(message, m.AnchorRequest):
                    shapes = evil.way.run.fragments[message.fragment_id].keys_shapes
                    huge = {key: np.full(shape, 1e30, np.float32) for key, shape in shapes}
                    told = ("evil", 1, message.fragment_id, message.version, value_digest(huge))
                    payload = codec.encode(huge, "float32")
                    try_to_say(evil, m.AnchorValue(*told, len(payload)), payload)

            evil = merged_once(site, "evil", tamper=lie, on_message=answer)
            armed[0] = True
            _comes_back_first(site, honest, evil)
            before = max(stub.machine.global_step for stub in honest)
            aftermath(site, honest, seen)
            step = site.status()["global_step"]
            seen.expect(step < before + 1000, f"global step {step}", f"from global step {before} to {step}")
            lost = "nobody holds it" in site.log.read_text(errors="replace")
            seen.expect(not lost, "no version was lost", "versions that honest learners hold were lost")

    claim.__doc__ = f"After a failover a learner claims {about}."
    CATALOGUE.add(name, f"{UNHARMED}; only versions that the syncer made are taken, and none of them is lost")(claim)


_anchors("anchor-future", "versions a million ahead, and sends 1e30 as their value", 1_000_000, answers=True)
_anchors("anchor-next", "the next versions, and sends 1e30 as their value", 2, answers=True)
_anchors("anchor-silent", "the next versions, and never sends them", 2, answers=False)


@CATALOGUE.add("scores", f"{UNHARMED}; no loss that it states under another name counts")
def scores(ground: Ground, seen: Findings) -> None:
    """A learner evaluates, and states losses near the largest float, also such as only the syncer computes."""
    huge, asked, made = 1.7e308, list[Any](), list[StubLearner]()
    others = [(m.WITHOUT, -huge), ("x loss", -huge), (f"x {m.WITHOUT}", huge), ("gain of island-0", huge)]

    def answer(message: Any) -> None:
        if isinstance(message, m.Evaluate | m.EvaluateWithout):
            asked.append(message)
            stated = tuple(m.Metric(*each) for each in others)
            # It may be asked before it is known here.
            wait_until(lambda: made, "the learner itself")
            try_to_say(made[0], m.Score("evil", 1, message.number, 1, (0, 0), huge, huge, 1, stated, 0.1, ""))

    with syncer(ground.folder / "site", train={"eval_every": 5}, evaluation={"subtract": True}) as site:
        honest = site.honest()
        joins = changing(m.Hello, lambda hello: hello._replace(evaluates=True, judges=True))
        made.append(site.stub("evil", tamper=joins, on_message=answer))
        judged = comes_true(lambda: sum(isinstance(each, m.EvaluateWithout) for each in asked) > 3, ROUNDS_WITHIN_S)
        seen.expect(judged, f"it was asked {len(asked)} times")
        aftermath(site, honest, seen)
        alarms = [alarm["who"] for alarm in site.status()["alarms"] if alarm["kind"] == "harm"]
        seen.expect(not alarms, "nobody else looks bad", f"the alarm `harm` is about {alarms}")


@CATALOGUE.add("texts", "log, status, its page and the report have no control characters, and no forged line")
def texts(ground: Ground, seen: Findings) -> None:
    """Reasons and names of metrics carry line breaks and escape sequences."""
    dirty = f"bye\n{FORGED}\x1b[31m\x1b]0;owned\x07\r\x9b2J"
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        evil = merged_once(site, "evil")
        values = tuple(m.Metric(f"{name}\n\x1b[2J{FORGED}"[:64], 1.0) for name in ("loss", "other"))
        evil.say(m.MetricsReport("evil", 1, 1, values))  # type: ignore[arg-type]
        evil.say(m.StateRefused("evil", 1, "island-0", dirty))
        scores = (m.Metric(f"a\n\x1b[2J{FORGED}"[:128], 1.0),)
        evil.say(m.Score("evil", 1, 1, 1, (0, 0), 2.0, 1.0, 1, scores, 0.1, dirty))
        time.sleep(1.0)
        evil.say(m.Leave("evil", 1, dirty))
        wait_until(lambda: "evil disconnected" in site.log.read_text(errors="replace"), "its goodbye in the log")
        time.sleep(1.5)
        log_is_clean(site.log, seen)
        told = [text for text in _strings(site.status()) if CONTROL.search(text)]
        seen.expect(not told, "the status is clean", f"status.json has {told[:1]!r}")
        for words in (("status", str(site.run_dir)), ("report", str(site.run_dir))):
            done = run(*words)
            found = CONTROL.search(done.stdout + done.stderr)
            seen.expect(not found, f"`{words[0]}` prints no control characters")
        page = (site.run_dir / "report.html").read_text(encoding="utf-8")
        seen.expect(not CONTROL.search(page), "the report has none", "report.html has control characters")
        rounds_go_on(site, honest, seen, "after it")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [text for each in value for text in _strings(each)] if isinstance(value, list) else []
