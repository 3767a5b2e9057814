"""Drive the learner machine: inner steps on the island, messages over the link.

Threads
  * the caller's ("steps"): the only one to touch the island. Steps, reports, and between two steps adopts what came.
  * "link": receives, checks and decodes what came, answers pulls and keeps parts of a state at once
    (the machine under its lock), reconnects.
  * "payload": waits for staged copies, encodes and sends them (learner_payloads.py).
  * "compile": compiles what the island runs while the model and, after a restart, a healthy learner's state arrive.
  * "save": reads and writes this learner's own states on disk (learner_state.py).

Nothing that the network or the disk does makes a step wait, outside lockstep (docs/protocol.md).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from diloco_jax.core import codec
from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.messages import (
    AnchorRequest,
    GlobalFragment,
    PullRequest,
    StatePart,
    StatePull,
    SyncerMessage,
)
from diloco_jax.runtime.global_values import GlobalValues
from diloco_jax.runtime.host import Host
from diloco_jax.runtime.host_leader import LeadingHost
from diloco_jax.runtime.hosts import FAILED, STOPPED, Hosts, make_dialler
from diloco_jax.runtime.learner_effects import Arrived, Effects
from diloco_jax.runtime.learner_payloads import PayloadSender
from diloco_jax.runtime.learner_state import SavedStates
from diloco_jax.runtime.learner_tape import LearnerTape
from diloco_jax.runtime.settings import RunConfig, fingerprint
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.transport.link import Rejected, TransportError, check_name

RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 1.0, 2.0)
IDLE_S = 0.2  # longest sleep of a thread that waits for messages, so that it notices the end

log = logging.getLogger(__name__)


class LearnerRun:
    """One learner from its first greeting to its last step.

    Args:
        config: the run.
        learner_id: name of the island.
        incarnation: grows with every start of this learner.
        address: where the syncer listens.
        run_dir: folder for the tape and for the learner's own saved states.
        stop: set from outside to leave politely.
        hosts: the island's other processes, if there are any; this one leads.
        devices: of the island; all that JAX sees if not given.
    """

    def __init__(
        self,
        config: RunConfig,
        learner_id: str,
        incarnation: int,
        address: str,
        run_dir: Path,
        stop: threading.Event,
        hosts: Hosts | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self._config = config
        self._address = address
        self._stop = stop
        saves = SavedStates(run_dir, check_name(learner_id), 1 if hosts is None else hosts.count)
        finding = saves.find()  # while the island is built
        host = Host(config, learner_id, devices) if hosts is None else LeadingHost(config, learner_id, hosts, stop)
        self._host = host
        self._island = host.island
        plan = host.plan
        self._fragments = plan.fragments
        self._saved = finding.result()
        self._saves = saves
        samples = host.batch_shape[0]
        self._machine = Learner(
            learner_id,
            incarnation,
            config.protocol,
            fingerprint(config, plan.fingerprint),
            step_samples=samples,
            saved=None if self._saved is None else self._saved.described,
        )
        for fragment in plan.fragments:
            size = codec.encoded_size(fragment.shapes, config.wire.up)
            self._machine.payload_bytes[fragment.fragment_id] = size
        self._tape = LearnerTape(run_dir, learner_id, incarnation, samples)
        self._payloads = PayloadSender(self._fail)
        self._effects = Effects(self._machine, host, self._tape, self._payloads, saves)
        self._dialler = make_dialler(config, plan, learner_id, incarnation, address, hosts)
        self._lock = threading.Lock()  # guards machine, tape, effects, and what waits in the inbox
        self._inbox: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()  # None only wakes
        self._heads = GlobalValues(plan.fragments, config.wire.down)  # the link thread's
        self._newest: dict[int, GlobalFragment] = {}  # fragment -> newest of its values that waits in the inbox
        self._compiled = threading.Event()
        self._rate = learning_rate(config.optimizer, config.train.steps)
        self._failure: Exception | None = None

    def run(self) -> str:
        """Train until the syncer says stop, or until stopped; returns the reason.

        Raises:
            TransportError: the syncer cannot be reached at the start.
            ValueError: the syncer refused this learner.
            ConnectionError: it expelled this incarnation; a new one may join.
        """
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        try:
            self._connect()
            threading.Thread(target=self._listen, name="link", daemon=True).start()
            self._train()
        finally:
            self._conclude()
        finished = self._effects.finished
        kind, _, reason = finished.partition(": ")
        if kind == "refused" and not self._machine.epoch:
            raise ValueError(f"the syncer at {self._address} refused this learner: {reason}")
        if kind in ("refused", "expelled"):
            raise ConnectionAbortedError(f"the syncer at {self._address} {kind} this incarnation: {reason}")
        return finished

    def _conclude(self) -> None:
        if self._stop.is_set() and not self._effects.finished:
            self._apply(lambda: self._machine.leave("stopped from outside", time.monotonic()))
        self._payloads.close()
        if self._effects.link is not None:
            self._effects.link.close(2.0)
        self._saves.close(wait=True)
        with self._lock:
            self._tape.end(self._effects.finished or "failed", self._machine.digests)
        failed = self._effects.finished.partition(":")[0] in ("", "refused", "expelled")
        self._host.end(STOPPED if self._stop.is_set() else FAILED if failed else 0)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._inbox.put(None)

    def _compile(self) -> None:
        """The body of the thread "compile"."""
        began_s = time.monotonic()
        try:
            self._host.warm_up()
            log.info(f"compiled the inner step, staging and adoption in {time.monotonic() - began_s:.1f} s")
        except Exception as error:
            self._fail(error)
        finally:
            self._compiled.set()
            self._inbox.put(None)

    # ---- the step thread ------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._wait_until_ready()
        if self._over():
            return
        self._saved = None  # if nobody took it
        log.info(f"the first step begins at global step {self._machine.global_step}")
        taken = self._machine.take_batch()
        self._host.put_batch(taken.ranges)
        tokens = self._host.batch_shape[0] * self._config.train.seq_len
        while True:
            began_s, clock, read = time.monotonic(), self._machine.global_step, taken
            handle = self._host.step(self._rate(clock))
            with self._lock:
                taken = self._machine.take_batch()
            self._host.put_batch(taken.ranges)  # while the step runs
            loss = self._island.wait(handle)["loss"]
            ended_s = time.monotonic()
            with self._lock:
                effects = self._machine.on_step(tokens, ended_s - began_s, loss, ended_s, samples_end=read.end)
                self._tape.step(self._machine.local_step, clock, read.ranges, loss)
                self._effects.execute(effects)
            self._drain()
            if not self._machine.may_step():
                self._wait_until_ready()
            if self._over():
                return

    def _over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return bool(self._effects.finished) or self._stop.is_set()

    def _wait_until_ready(self) -> None:
        """Wait for what a step needs: at first model, data, a state and the compiler; in lockstep the due fragment."""
        while not self._over() and not (self._machine.may_step() and self._compiled.is_set()):
            if self._effects.state_to_adopt is not None:
                self._adopt_state(self._effects.state_to_adopt)
                continue
            try:
                self._take(self._inbox.get(timeout=IDLE_S))
            except queue.Empty:
                continue

    def _drain(self) -> None:
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _take(self, arrived: Arrived | None) -> None:
        if arrived is None:
            return
        message = arrived.message
        with self._lock:
            if isinstance(message, GlobalFragment):
                if self._newest.get(message.fragment_id) is not message:
                    return  # a newer one waits behind it
                del self._newest[message.fragment_id]
            self._effects.execute(self._machine.on_message(message, time.monotonic()), arrived)

    def _adopt_state(self, effect: AdoptState) -> None:
        """Outside of the lock: heartbeats go on while a large state is copied to the devices."""
        self._effects.state_to_adopt = None
        try:
            if effect.donor:
                told = (self._effects.received.donor_incarnation, effect.donor_step)
                self._host.load_state(self._effects.received.take(), effect.fragments)
            else:
                assert self._saved is not None, "an own state was adopted without one"
                told = (self._saved.incarnation, self._saved.local_step)
                self._host.load_state(self._saved.values, effect.fragments)
        except ValueError as error:
            log.warning(f"the state of {effect.donor or 'an earlier life'} cannot be used: {error}")
            self._apply(lambda: self._machine.on_state_adopted(False, time.monotonic()))
            return
        finally:
            self._saved = None
        log.info(f"took over the state of {effect.donor or 'an earlier life'} at its step {told[1]}")
        with self._lock:
            self._tape.state(effect, *told)
            self._effects.execute(self._machine.on_state_adopted(True, time.monotonic()))

    def _apply(self, decide: Callable[[], list[Effect]]) -> None:
        """Give the machine an input and execute what it asks for, both under the lock."""
        with self._lock:
            self._effects.execute(decide())

    # ---- the link thread ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        epoch = self._machine.epoch
        link = self._dialler.connect(epoch)
        try:
            self._host.connect(epoch, link.number)
        except TransportError:
            link.close(0.0)
            raise
        with self._lock:
            self._effects.link = link
            self._effects.execute(self._machine.on_connected(time.monotonic()))

    def _listen(self) -> None:
        try:
            while not self._effects.finished and not self._stop.is_set():
                self._listen_once()
        except Exception as error:
            self._fail(error)

    def _listen_once(self) -> None:
        with self._lock:
            deadline_s, link = self._machine.next_deadline_s(), self._effects.link
        assert link is not None
        now_s = time.monotonic()
        timeout_s = IDLE_S if deadline_s is None else min(IDLE_S, max(0.0, deadline_s - now_s))
        delivery = link.receive(timeout_s)
        now_s = time.monotonic()
        if deadline_s is not None and now_s >= deadline_s:
            self._apply(lambda: self._machine.on_tick(now_s))
        if delivery is None:
            return
        if delivery.kind == "disconnected":
            self._reconnect(delivery.reason)
        else:
            self._on_message(delivery.message, delivery.payload, now_s)  # type: ignore[arg-type]

    def _on_message(self, message: SyncerMessage, payload: bytes | memoryview, now_s: float) -> None:
        machine = self._machine
        if isinstance(message, PullRequest):
            self._apply(lambda: machine.on_pull(message, now_s))
        elif isinstance(message, AnchorRequest):
            self._apply(lambda: machine.on_anchor_request(message, now_s))
        elif isinstance(message, StatePull):
            self._apply(lambda: machine.on_state_pull(message, now_s))
        elif isinstance(message, GlobalFragment):
            self._on_global(message, payload, now_s)
        elif isinstance(message, StatePart):
            self._on_part(message, payload)
        else:
            self._inbox.put(Arrived(message))

    def _on_global(self, message: GlobalFragment, payload: bytes | memoryview, now_s: float) -> None:
        with self._lock:
            if not self._machine.wants(message, now_s):
                return
        try:
            others = self._host.arrived(message, payload)
            values = self._heads.read(message, payload)
            others()
        except ValueError as error:
            log.warning(f"version {message.version} of fragment {message.fragment_id} {error}; asking again")
            with self._lock:
                self._machine.on_corrupt(now_s)
            return
        with self._lock:
            self._machine.on_read(message)
            self._heads.keep(message, values)
            self._host.supersede(message)
            self._newest[message.fragment_id] = message  # only the newest: a long step must not pile up whole models
        self._inbox.put(Arrived(message, values))

    def _on_part(self, message: StatePart, payload: bytes | memoryview) -> None:
        if codec.digest(payload) != message.digest:
            log.warning(
                f"part {message.part} of the state of {message.learner_id} arrived damaged; it is asked for again"
            )
            return
        with self._lock:  # here, not behind the fragments that wait for the step thread: an attempt has H global steps
            if self._machine.may_step():
                return
            effects = self._machine.on_message(message, time.monotonic())
            self._effects.execute(effects, Arrived(message, payload=payload))
        self._inbox.put(None)

    def _reconnect(self, reason: str) -> None:
        """Training goes on meanwhile; so there is no limit to the attempts, only to their pace."""
        log.info(f"connection lost ({reason}); training goes on, reconnecting")
        self._apply(lambda: self._machine.on_disconnected(time.monotonic()))
        with self._lock:
            old, self._effects.link = self._effects.link, None
        if old is not None:
            old.close(0.0)
        attempt = 0
        while not self._effects.finished and not self._stop.is_set():
            self._stop.wait(RECONNECT_DELAYS_S[min(attempt, len(RECONNECT_DELAYS_S) - 1)])
            attempt += 1
            try:
                self._connect()
                return
            except Rejected as error:
                self._fail(error)
                return
            except (TransportError, ValueError) as error:  # ValueError: a certificate that has expired may be renewed
                log.info(f"attempt {attempt}: {error}")
