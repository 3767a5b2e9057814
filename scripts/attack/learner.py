"""A learner without a model: the real machine, a real link, and small random updates.

It requests the run's config and the layout of its model from the syncer, cuts the model into the same fragments, and
checks the digest of every global value. A `tamper` function may change every message that it sends. This makes it a
hostile learner, which otherwise follows the protocol.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core import codec
from diloco_jax.protocol import effects
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.runtime.island.adoptions import GlobalValues, Values
from diloco_jax.runtime.model.layout_text import read_layout
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.text import parse_text
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.link import Link, LinkClosed, Rejected, TransportConfig, TransportError
from tests.limits import HANGS_S

SHORT_S = 1.0
STEP_S = 0.05
STEP_SAMPLES, STEP_TOKENS = 8, 64
UPDATE = 1e-3

# A tamper receives a message with its payload, and returns the messages that are sent instead.
Sent = list[tuple[m.LearnerMessage, bytes]]
Tamper = Callable[[m.LearnerMessage, bytes], Sent]


class Way(NamedTuple):
    """The facts of a run that a learner needs before it connects."""

    run: ResolvedRun
    transport: TransportConfig

    def machine(self, name: str, incarnation: int) -> Learner:
        """Make the machine of a learner that is about to join."""
        config = self.run.config
        return Learner(
            name,
            incarnation,
            config.protocol,
            self.run.fingerprint(""),
            step_samples=STEP_SAMPLES,
            payload_bytes=dict(enumerate(self.run.payload_bytes(config.wire.up))),
            evaluates=False,
        )

    def dialler(self, name: str, incarnation: int) -> Dialler:
        """Make the dialler, which connects and reconnects a learner."""
        config = self.run.config
        return Dialler(
            self.transport,
            run_id=config.name,
            learner_id=name,
            incarnation=incarnation,
        )


def find_way(transport: TransportConfig, name: str = "scout") -> Way:
    """Request the description of a run until its syncer answers."""
    until_s = time.monotonic() + HANGS_S
    while True:
        with contextlib.suppress(TransportError):
            found = ask_description(replace(transport, connect_timeout_s=SHORT_S), name)
            if found.layout:
                break
        if time.monotonic() > until_s:
            raise TimeoutError(f"the syncer at {transport.address} did not describe its run within {HANGS_S:g} s")
        time.sleep(SHORT_S / 10)
    config = parse_text(found.config, "the syncer's config")
    return Way(resolve(config, *read_layout(found.layout)), transport)


class StubLearner:
    """A learner in a separate thread that steps by the clock; `close` ends it without a goodbye.

    Args:
        on_message: called with every message of the syncer, before the machine receives it.

    Attributes:
        sent: last message of each class.
        sessions: number of links so far.
        merged: number of received global values whose round had merged this learner.
        norms: largest norm of the global value so far, by fragment.
        ended: reason for the machine's end, such as a refusal; "" while it runs.
        trouble: unexpected error of the thread; None if there is none.
        held: while it is set, the learner does not connect.
    """

    def __init__(
        self,
        way: Way,
        name: str,
        incarnation: int = 1,
        *,
        step_s: float = STEP_S,
        step_tokens: int = STEP_TOKENS,
        tamper: Tamper | None = None,
        on_message: Callable[[m.SyncerMessage], None] = lambda message: None,
    ) -> None:
        self.name, self.way = name, way
        self.machine = way.machine(name, incarnation)
        self.merged, self.ended = 0, ""
        self.norms: dict[int, float] = {}
        self.trouble: Exception | None = None
        self.link: Link | None = None
        self._dialler = way.dialler(name, incarnation)
        self.sent: dict[type, Any] = {}
        self.sessions = 0
        self._tamper, self._on_message = tamper, on_message
        self._step_s, self._step_tokens = step_s, step_tokens
        self._heads = GlobalValues(way.run.fragments, way.run.config.wire.down)
        self._values: dict[int, Values] = {}
        self._random = np.random.default_rng(sum(name.encode()) + incarnation)
        self.held = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stub-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._over.set()

    def close(self) -> None:
        """End the thread and the link."""
        self.end()
        self._thread.join(HANGS_S)

    @property
    def connected(self) -> bool:
        """Return whether the link is open."""
        return self.link is not None

    @property
    def is_running(self) -> bool:
        """Return whether the learner's thread still runs."""
        return self._thread.is_alive()

    def say(self, message: m.LearnerMessage, payload: bytes = b"") -> None:
        """Send a further message that is not the machine's; LinkClosed without a link."""
        if (link := self.link) is None:
            raise LinkClosed("not connected")
        link.send(message, payload)

    def value(self, fragment_id: int, scale: float = UPDATE) -> bytes:
        """Return a random outer gradient of a fragment, encoded."""
        layout = self.way.run.fragments[fragment_id].keys_shapes
        drawn: Mapping[str, np.ndarray] = {
            key: self._random.normal(0, scale, shape).astype(np.float32) for key, shape in layout
        }
        return codec.encode(drawn, self.way.run.config.wire.up)

    def _run(self) -> None:
        try:
            while not (self._over.is_set() or self.machine.state == STOPPED):
                if self.held.is_set():
                    self._over.wait(SHORT_S / 10)
                elif self._connect():
                    self._serve()
        except Rejected as error:
            self.ended = str(error)
        except Exception as error:
            self.trouble = error
        finally:
            self._hang_up()

    def _connect(self) -> bool:
        try:
            link = self._dialler.connect(self.machine.epoch)
        except Rejected:
            raise
        except TransportError:
            self._over.wait(SHORT_S / 5)
            return False
        self.link = link
        self.sessions += 1
        self._execute(self.machine.on_connected(time.monotonic()))
        return True

    def _hang_up(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close(0.0)

    def _serve(self) -> None:
        """Step and listen until the link or the learner ends."""
        next_s = time.monotonic()
        while not (self._over.is_set() or self.machine.state == STOPPED):
            now_s = time.monotonic()
            if self.machine.may_step() and now_s >= next_s:
                next_s = now_s + self._step_s
                end = self.machine.take_batch().end
                self._execute(self.machine.on_step(self._step_tokens, self._step_s, 2.0, now_s, samples_end=end))
            deadline_s = self.machine.next_deadline_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._execute(self.machine.on_tick(now_s))
            wake_s = next_s if self.machine.may_step() else now_s + SHORT_S / 10
            link = self.link
            delivery = None if link is None else link.receive(max(0.0, min(wake_s - now_s, SHORT_S)))
            if delivery is None:
                continue
            if delivery.kind == "disconnected":
                self._execute(self.machine.on_disconnected(time.monotonic()))
                self._hang_up()
                return
            self._receive(delivery.message, delivery.payload)  # type: ignore[arg-type]

    def _receive(self, message: m.SyncerMessage, payload: bytes | memoryview) -> None:
        now_s = time.monotonic()
        self._on_message(message)
        # It has no model to evaluate; `on_message` may answer.
        if isinstance(message, m.Evaluate | m.EvaluateWithout):
            return
        if isinstance(message, m.GlobalFragment):
            if not self.machine.wants(message, now_s):
                return
            arrived = self._heads.read(message, payload)
            self._heads.keep(message, arrived)
            self._values[message.fragment_id] = values = arrived.values
            self.machine.on_read(message, now_s)
            norm = float(np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in values.values())))
            self.norms[message.fragment_id] = max(norm, self.norms.get(message.fragment_id, 0.0))
            self.merged += message.merged_round == message.version
        self._execute(self.machine.on_message(message, now_s))

    def _execute(self, requests: list[effects.Effect]) -> None:
        for effect in requests:
            if isinstance(effect, effects.Send):
                self._send(effect.message)  # type: ignore[arg-type]
            elif isinstance(effect, effects.Finish):
                self.ended = effect.reason

    def _send(self, message: m.LearnerMessage) -> None:
        payload = b""
        if isinstance(message, m.FragmentValue):
            payload = self.value(message.fragment_id)
        elif isinstance(message, m.AnchorValue):
            payload = codec.encode(self._values[message.fragment_id], "float32")
            message = message._replace(payload_bytes=len(payload))
        elif isinstance(message, m.StateChunk):
            return
        sent = [(message, payload)] if self._tamper is None else self._tamper(message, payload)
        # The checks on this side refuse some of the changed messages.
        refusals = (LinkClosed,) if self._tamper is None else (LinkClosed, ValueError)
        for each, data in sent:
            self.sent[type(each)] = each
            with contextlib.suppress(*refusals):
                self.say(each, data)
