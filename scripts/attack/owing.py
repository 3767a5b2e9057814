"""Learners that report steps and answer never, late or ahead of their reports; and a learner of an old run."""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from attack.hostile import MAYBE_REFUSED_S, UNHARMED, USUAL_ROUNDS, aftermath, outcome, rounds_go_on
from attack.learner import Sent, StubLearner
from attack.site import Site, comes_true, syncer, wait_until
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.transport.link import LinkClosed

# The others keep this share of their rounds (decision 0103).
KEPT_MIN = 0.9
LATE_S = 4.0
# Windows of time without and with the fault, in turn; the first waits of a fault take seconds.
WINDOW_S, WINDOWS = 40.0, 2
LEARNERS = 3
# The defaults of a run, where other attacks have shorter times.
DEFAULTS = {
    name: getattr(ProtocolConfig(), name) for name in ("silence_s", "heartbeat_s", "resend_s", "pull_timeout_s")
}


def _keeps_rounds(name: str, about: str, answer: Callable[[StubLearner, Any, bytes], None]) -> None:
    """Add an attack: while a fault is on, `answer` gets the values of one learner instead of the syncer."""

    def attack(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site", islands={"count": LEARNERS}, protocol=DEFAULTS) as site:
            honest, faulty = site.honest(LEARNERS - 1), threading.Event()

            def tamper(message: Any, payload: bytes) -> Sent:
                if not (faulty.is_set() and isinstance(message, m.FragmentValue)):
                    return [(message, payload)]
                answer(stub, message, payload)
                return []

            stub = site.stub("slow", tamper=tamper)
            wait_until(lambda: stub.merged > USUAL_ROUNDS, "rounds that merge all learners")
            healthy, disturbed = [], []
            for _ in range(WINDOWS):
                healthy.append(rounds_per_s(honest, WINDOW_S))
                faulty.set()
                disturbed.append(rounds_per_s(honest, WINDOW_S))
                faulty.clear()
                # One answer in time ends the rest that it is given.
                before = stub.merged
                wait_until(lambda before=before: stub.merged > before + 2, "its return")
            kept = statistics.median(disturbed) / statistics.median(healthy)
            words = f"the others keep {kept:.2f} of {statistics.median(healthy):.1f} rounds/s"
            seen.expect(kept >= KEPT_MIN, words)
            rounds_go_on(site, honest, seen, "after it")

    attack.__doc__ = f"A learner reports every step, and {about}."
    CATALOGUE.add(name, f"the others keep {KEPT_MIN:g} of their rounds, and it returns", long=True)(attack)


def rounds_per_s(honest: list[StubLearner], window_s: float) -> float:
    """Return the rate of rounds that merge all of these learners, measured for some seconds."""
    before, began_s = [stub.merged for stub in honest], time.monotonic()
    time.sleep(window_s)
    made = [stub.merged - old for stub, old in zip(honest, before, strict=True)]
    return min(made) / (time.monotonic() - began_s)


def _say_late(stub: StubLearner, message: Any, payload: bytes) -> None:
    def say() -> None:
        with contextlib.suppress(LinkClosed):
            stub.say(message, payload)

    timer = threading.Timer(LATE_S, say)
    timer.daemon = True
    timer.start()


_keeps_rounds("owes-mute", "answers no pull", lambda stub, message, payload: None)
_keeps_rounds("owes-late", f"answers pulls {LATE_S:g} s late", _say_late)


@CATALOGUE.add("value-ahead", f"no value 10^7 times too large is merged; {UNHARMED}")
def value_ahead(ground: Ground, seen: Findings) -> None:
    """A learner's values are 10^7 times too large, and of steps that it has not reported."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        wait_until(lambda: honest[0].merged > USUAL_ROUNDS, "rounds that show usual values")

        def grow(message: Any, payload: bytes) -> Sent:
            if isinstance(message, m.FragmentValue):
                message = message._replace(local_step=message.local_step + 1000, steps=message.steps + 1000)
                payload = evil.value(message.fragment_id, 1e4)
            return [(message, payload)]

        evil = site.stub("evil", tamper=grow)
        comes_true(lambda: evil.ended or evil.merged, 4 * MAYBE_REFUSED_S)
        seen.expect(not evil.merged, f"none was merged, {outcome(evil)}", f"{evil.merged} were merged")
        aftermath(site, honest, seen)


@CATALOGUE.add("two-runs", "the island ends with both ids; rounds of the new run continue")
def two_runs(ground: Ground, seen: Findings) -> None:
    """An island of an ended run trains on while a new run of the same name starts at the same address."""
    with syncer(ground.folder / "old") as old:
        old_island = old.honest()[0]
        old.kill()
        new = Site(ground.folder / "new", transport={"address": old.address})
        new.address = old.address
        try:
            new.start()
            honest = [new.stub(f"new-{number}") for number in range(2)]
            comes_true(lambda: old_island.ended, 20.0)
            seen.expect(
                "run" in old_island.ended, f"the old island ended: {old_island.ended[:160]}", outcome(old_island)
            )
            rounds_go_on(new, honest, seen, "beside the old island")
        finally:
            new.close()
