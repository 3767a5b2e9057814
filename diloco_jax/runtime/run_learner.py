"""Drive the learner machine: inner steps on the island, messages over the link.

Threads
  * the caller's ("steps"): the only one to touch the island. Steps, reports, and between two steps adopts what came.
  * "link": receives, answers pulls at once (the machine under its lock), decodes global fragments, reconnects.
  * "payload": waits for staged copies, encodes and sends them.

Nothing that the network does makes a step wait, outside lockstep (docs/protocol.md).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.messages import (
    Adopt,
    Drop,
    Effect,
    Finish,
    FragmentValue,
    GlobalFragment,
    PullRequest,
    Send,
    Stage,
    SyncerMessage,
    Unstage,
)
from diloco_jax.runtime.settings import RunConfig, fingerprint
from diloco_jax.training.data import load_source, train_iterator
from diloco_jax.training.island import Island
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.training.staging import StagedFragment
from diloco_jax.transport.grpc_link import connect
from diloco_jax.transport.link import Link, LinkClosed, Rejected, TransportError

Values = dict[str, np.ndarray]
RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
IDLE_S = 0.2  # longest sleep of the link thread, so that it notices the end

log = logging.getLogger(__name__)


class LearnerRun:
    """One learner from its first greeting to its last step.

    Args:
        config: the run.
        learner_id: name of the island.
        incarnation: grows with every start of this learner.
        address: where the syncer listens.
        stop: set from outside to leave politely.
    """

    def __init__(
        self, config: RunConfig, learner_id: str, incarnation: int, address: str, stop: threading.Event
    ) -> None:
        if learner_id not in config.islands.names:
            raise ValueError(
                f"--island is {learner_id!r}, but the config has {', '.join(config.islands.names[:8])}; use one of "
                "them, or raise islands.count: every learner needs a data shard of its own"
            )
        self._config = config
        self._address = address
        self._stop = stop
        self._source = load_source(config.data, config.train.seq_len)
        self._island = Island(config.model, config.optimizer, config.islands.mesh, seed=config.seed)
        shapes = self._island.shapes
        plan = plan_fragments(shapes, config.protocol.num_fragments, split_axis=config.fragments.axes(shapes))
        self._fragments = plan.fragments
        self._machine = Learner(learner_id, incarnation, config.protocol, fingerprint(config, plan.fingerprint))
        for fragment in plan.fragments:
            size = codec.encoded_size(fragment.shapes, config.wire.up)
            self._machine.payload_bytes[fragment.fragment_id] = size
        self._lock = threading.Lock()  # guards machine, _staged and _link
        self._link: Link | None = None
        self._staged: dict[tuple[int, int], StagedFragment] = {}
        self._anchors: dict[int, Values] = {}
        self._sent: dict[int, tuple[int, StagedFragment]] = {}  # rebase: fragment -> (round, what was sent)
        self._inbox: queue.SimpleQueue[SyncerMessage] = queue.SimpleQueue()
        self._arrived: dict[int, tuple[int, Values]] = {}  # fragment -> newest version that waits in the inbox
        self._payloads = ThreadPoolExecutor(1, "payload")
        self._rate = learning_rate(config.optimizer, config.train.steps)
        self._finished = ""
        self._failure: Exception | None = None

    def run(self) -> str:
        """Train until the syncer says stop, or until stopped; returns the reason.

        Raises:
            TransportError: the syncer cannot be reached at the start.
            ValueError: the syncer refused this learner.
        """
        self._connect()
        listening = threading.Thread(target=self._listen, name="link", daemon=True)
        listening.start()
        try:
            self._train()
        finally:
            if self._stop.is_set() and not self._finished:
                self._apply(lambda: self._machine.leave("stopped from outside", time.monotonic()))
            self._payloads.shutdown(wait=False, cancel_futures=True)
            if self._link is not None:
                self._link.close(2.0)
        if self._finished.startswith("refused: "):
            raise ValueError(f"the syncer at {self._address} refused this learner: {self._finished[9:]}")
        return self._finished or "stopped"

    # ---- the step thread ------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._wait_until_ready()
        if self._over():
            return
        batches = self._batches()
        batch = self._island.put_batch(next(batches))
        while True:
            began_s = time.monotonic()
            handle = self._island.step(batch, self._rate(self._machine.global_step))
            batch = self._island.put_batch(next(batches))  # while the step runs
            metrics = self._island.wait(handle)
            ended_s = time.monotonic()
            tokens, step_s, loss = self._config.island_step_tokens, ended_s - began_s, metrics["loss"]
            self._apply(lambda: self._machine.on_step(tokens, step_s, loss, ended_s))  # noqa: B023
            self._drain()
            if not self._machine.may_step():
                self._wait_until_ready()
            if self._over():
                return

    def _batches(self) -> Any:
        """This learner's shard of the global order, from where the run stands: a restart repeats no old data."""
        names = self._config.islands.names
        name = self._machine.learner_id
        batches = train_iterator(
            self._source,
            seed=self._config.data.shuffle_seed + self._config.seed,
            shard_ids=[names.index(name)],
            num_shards=len(names),
            batch_size=self._config.island_batch_size,
        )
        batches.set_state({"next_index": self._machine.global_step * self._config.island_batch_size})
        return batches

    def _over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return bool(self._finished) or self._stop.is_set()

    def _wait_until_ready(self) -> None:
        """Wait for what a step needs: all fragments at the start, in lockstep the due one."""
        while not self._over() and not self._machine.may_step():
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

    def _take(self, message: SyncerMessage) -> None:
        values = None
        if isinstance(message, GlobalFragment):
            with self._lock:
                version, values = self._arrived.get(message.fragment_id, (None, None))
                if version != message.version:
                    return  # a newer one waits behind it, or it came twice
                del self._arrived[message.fragment_id]
        self._apply(lambda: self._machine.on_message(message, time.monotonic()), values)

    # ---- effects --------------------------------------------------------------------------------------------------

    def _apply(self, decide: Any, values: Values | None = None) -> None:
        """Give the machine an input and execute what it asks for, both under the lock."""
        with self._lock:
            effects: list[Effect] = decide()
            for effect in effects:
                self._execute(effect, values)

    def _execute(self, effect: Effect, values: Values | None) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Stage):
            staged = self._island.stage(self._fragments[effect.fragment_id])
            self._staged[effect.fragment_id, effect.local_step] = staged
        elif isinstance(effect, Unstage):
            del self._staged[effect.fragment_id, effect.local_step]
        elif isinstance(effect, Adopt):
            assert values is not None, "a global fragment was adopted without its values"
            self._adopt(effect, values)
        elif isinstance(effect, Finish):
            self._finished = effect.reason
        else:
            assert isinstance(effect, Drop), f"the learner has no effect {effect}"
            log.info(f"dropped a message of {effect.peer}: {effect.reason}")

    def _send(self, effect: Send) -> None:
        message, link = effect.message, self._link
        if link is None:
            return
        if isinstance(message, FragmentValue):
            staged = self._staged[message.fragment_id, message.local_step]
            anchor = self._anchors[message.fragment_id]
            if self._config.adopt.mode == "rebase":
                self._sent[message.fragment_id] = (message.global_step, staged)
            self._payloads.submit(self._send_value, link, message, staged, anchor)
            return
        try:
            link.send(message)  # type: ignore[arg-type]
        except LinkClosed:
            return  # the link thread learns of it too, and reconnects

    def _send_value(self, link: Link, message: FragmentValue, staged: StagedFragment, anchor: Values) -> None:
        """On the payload thread: outer gradient = anchor - local, encoded."""
        try:
            local = staged.value()
            gradient = {key: anchor[key] - value for key, value in local.items()}
            link.send(message, self._encoded(gradient, message))
        except LinkClosed:
            return
        except Exception as error:  # it would be lost in the future that nobody reads
            self._failure = error

    def _encoded(self, gradient: Values, message: FragmentValue) -> bytes:
        try:
            return codec.encode(gradient, self._config.wire.up)
        except ValueError as error:  # NaN does not fit an integer format
            log.info(f"fragment {message.fragment_id} of round {message.global_step} has no value: {error}")
            return b""  # an answer all the same, so that nobody waits; the syncer leaves it out

    def _adopt(self, effect: Adopt, values: Values) -> None:
        fragment_id, adopt = effect.fragment_id, self._config.adopt
        sent = self._sent.pop(fragment_id, None)
        first = fragment_id not in self._anchors
        self._anchors[fragment_id] = values
        fragment = self._fragments[fragment_id]
        if first or adopt.mode == "overwrite" or (adopt.mode == "rebase" and self._not_ours(sent, effect.version)):
            self._island.adopt(fragment, values)
        elif adopt.mode == "blend":
            self._island.adopt(fragment, values, mode="blend", alpha=adopt.alpha)
        else:
            assert sent is not None
            self._island.adopt(fragment, values, mode="rebase", staged=sent[1].value())

    @staticmethod
    def _not_ours(sent: tuple[int, StagedFragment] | None, version: int) -> bool:
        """Whether the new version was made without a value of this learner: then nothing in flight can be kept."""
        return sent is None or sent[0] != version

    # ---- the link thread ------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        link = connect(
            replace(self._config.transport, address=self._address),
            run_id=self._config.name,
            learner_id=self._machine.learner_id,
            incarnation=self._machine.incarnation,
        )
        with self._lock:
            self._link = link
            for effect in self._machine.on_connected(time.monotonic()):
                self._execute(effect, None)

    def _listen(self) -> None:
        try:
            while not self._finished and not self._stop.is_set():
                self._listen_once()
        except Exception as error:
            self._failure = error

    def _listen_once(self) -> None:
        with self._lock:
            deadline_s, link = self._machine.next_deadline_s(), self._link
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
            return
        message: SyncerMessage = delivery.message  # type: ignore[assignment]
        if isinstance(message, PullRequest):
            self._apply(lambda: self._machine.on_pull(message, now_s))
            return
        if isinstance(message, GlobalFragment):
            values = codec.decode(delivery.payload, self._fragments[message.fragment_id].keys_shapes, "float32")
            with self._lock:  # only the newest: a long step must not pile up whole models
                self._arrived[message.fragment_id] = (message.version, values)
        self._inbox.put(message)

    def _reconnect(self, reason: str) -> None:
        """Training goes on meanwhile; so there is no limit to the attempts, only to their pace."""
        log.info(f"connection lost ({reason}); training goes on, reconnecting")
        self._apply(lambda: self._machine.on_disconnected(time.monotonic()))
        with self._lock:
            old, self._link = self._link, None
        if old is not None:
            old.close(0.0)
        attempt = 0
        while not self._finished and not self._stop.is_set():
            self._stop.wait(RECONNECT_DELAYS_S[min(attempt, len(RECONNECT_DELAYS_S) - 1)])
            attempt += 1
            try:
                self._connect()
                return
            except Rejected as error:
                self._failure = error
                return
            except TransportError as error:
                log.info(f"attempt {attempt}: {error}")
