"""Drive the syncer machine: deliveries, merges and time in; sends and merges out.

Threads
  * the caller's: owns machine, tape, statistics and the listener; takes one input after the other. Never computes.
  * "merge": one worker that merges and, between two merges, snapshots the model. The only one to change GlobalModel.
  * "eval": one worker that evaluates snapshots of the global model.
The workers put their results into a queue and wake the listener, which is where the caller's thread waits.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.outer import OuterOptimizer, make_outer
from diloco_jax.protocol.messages import (
    Discard,
    Drop,
    Effect,
    Finish,
    FragmentValue,
    GlobalFragment,
    LearnerMessage,
    Merge,
    Note,
    Send,
    StepReport,
    Stop,
)
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.protocol.tape import TapedSyncer
from diloco_jax.runtime.checkpoint import save_parameters
from diloco_jax.runtime.evaluation import Evaluator
from diloco_jax.runtime.files import ADDRESS_FILE, CHECKPOINTS, STATUS_FILE, SUMMARY_FILE, TAPE_FILE
from diloco_jax.runtime.global_model import GlobalModel
from diloco_jax.runtime.settings import RunConfig, fingerprint
from diloco_jax.runtime.stats import RunStats
from diloco_jax.runtime.telemetry import Telemetry, finite, write_json
from diloco_jax.transport.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import Delivery

STATUS_EVERY_S = 0.5
FAREWELL_S = 5.0  # how long learners have to hear Stop and say goodbye

Result = tuple[str, Any]

log = logging.getLogger(__name__)


def _write_line(file: IO[str], line: str) -> None:
    file.write(line + "\n")


class SyncerRun:
    """One run of the syncer, from the listening socket to the summary.

    Args:
        config: the run.
        run_dir: where tape, metrics, status, checkpoint and summary go.
        stop: set from outside to end the run early, in good order.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stop: threading.Event) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stop = stop
        self._evaluator = Evaluator(config)
        plan = plan_fragments(
            self._evaluator.shapes,
            config.protocol.num_fragments,
            split_axis=config.fragments.axes(self._evaluator.shapes),
        )
        self._model = GlobalModel(
            plan,
            self._evaluator.initial_parameters,
            OuterOptimizer(make_outer(config.outer)),
            merge=config.merge,
            weights=config.weights,
            wire_up=config.wire.up,
            anchor_history=config.protocol.anchor_history,
        )
        self._machine = Syncer(config.protocol, config.train.steps, fingerprint(config, plan.fingerprint))
        for fragment in plan.fragments:
            self._machine.payload_bytes[fragment.fragment_id] = len(self._model.payload(fragment.fragment_id))
        num_parameters = sum(fragment.num_elements for fragment in plan.fragments)
        self._stats = RunStats(config.islands.names, num_parameters, self._machine)
        self._values: dict[int, dict[str, bytes | memoryview]] = {}  # round -> learner -> encoded outer gradient
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._merges = ThreadPoolExecutor(1, "merge")
        self._evals = ThreadPoolExecutor(1, "eval")
        self._evaluating = False
        self._next_eval = config.train.eval_every
        self._eval_loss: float | None = None
        self._finished = ""

    def run(self) -> dict[str, Any]:
        """Serve until the last global step, or until stopped; returns the summary.

        Raises:
            ValueError: the address is in use or not allowed.
        """
        listener = listen(self._config.transport, run_id=self._config.name)
        self._wake = listener.wake
        self._telemetry = Telemetry(self._run_dir, tensorboard=self._config.tensorboard)
        self._began_s = time.monotonic()
        self._ended_s = 0.0
        (self._run_dir / ADDRESS_FILE).write_text(listener.address, encoding="utf-8")
        with (self._run_dir / TAPE_FILE).open("w", encoding="utf-8") as tape:
            self._taped = TapedSyncer(self._machine, partial(_write_line, tape))
            try:
                self._serve(listener)
                self._ended_s = self._now_s()
                self._bid_farewell(listener)
            except Exception:
                log.exception("the run ends early; the global model is saved first")
                self._merges.shutdown(wait=True)
                self._save()
                raise
            finally:
                listener.close(FAREWELL_S)
                self._merges.shutdown(wait=True)
        return self._conclude(listener)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _serve(self, listener: GrpcListener) -> None:
        status_at_s = 0.0
        while not self._finished and not self._stop.is_set():
            now_s = self._now_s()
            if now_s >= status_at_s:
                status_at_s = now_s + STATUS_EVERY_S
                self._tell(listener)
            deadline_s = self._machine.next_deadline_s()
            wake_s = status_at_s if deadline_s is None else min(status_at_s, deadline_s)
            self._take(listener, max(0.0, wake_s - now_s))
            now_s = self._now_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._execute(self._taped.on_tick(now_s), listener)

    def _bid_farewell(self, listener: GrpcListener) -> None:
        """Let learners hear Stop: until all are gone, or the time for it is over."""
        if not self._finished:  # stopped from outside: they would train on for nobody
            stop = Stop(self._machine.global_step, "the syncer was stopped")
            for member in self._machine.membership.connected():
                listener.send(member.learner_id, stop)
        ends_s = self._now_s() + FAREWELL_S
        while self._machine.membership.connected() and self._now_s() < ends_s:
            self._take(listener, 0.1)

    def _take(self, listener: GrpcListener, timeout_s: float) -> None:
        """Handle one delivery, if one comes in time, and all results of the workers."""
        delivery = listener.receive(timeout_s)
        if delivery is not None:
            self._on_delivery(delivery, self._now_s(), listener)
        while not self._results.empty():
            kind, value = self._results.get_nowait()
            now_s = self._now_s()
            if kind == "merged":
                order, payload = value
                self._model.publish(order.fragment_id, payload)
                self._execute(self._taped.on_merged(order.global_step, now_s), listener)
                self._maybe_evaluate()
            elif kind == "evaluated":
                self._evaluating = False
                self._record_eval(value, now_s)
            else:
                raise value

    def _report(self, kind: str, value: Any) -> None:
        """On a worker's thread: hand a result to the caller's thread."""
        self._results.put((kind, value))
        self._wake()

    def _on_delivery(self, delivery: Delivery, now_s: float, listener: GrpcListener) -> None:
        if delivery.kind == "disconnected":
            member = self._machine.membership.members.get(delivery.peer)
            if member is not None:
                effects = self._taped.on_disconnect(delivery.peer, member.incarnation, delivery.reason, now_s)
                self._execute(effects, listener)
            return
        message: LearnerMessage = delivery.message  # type: ignore[assignment]
        if message.learner_id != delivery.peer:
            log.info(f"{delivery.peer} spoke as {message.learner_id}; ignored")
            return
        if isinstance(message, StepReport):
            self._on_report(message, now_s)
        effects = self._taped.on_message(message, now_s)
        dropped = any(isinstance(e, Drop) and e.peer == delivery.peer for e in effects)
        if isinstance(message, FragmentValue) and not dropped:
            self._values.setdefault(message.global_step, {})[message.learner_id] = delivery.payload
        self._execute(effects, listener)

    def _on_report(self, report: StepReport, now_s: float) -> None:
        member = self._machine.membership.get(report.learner_id, report.incarnation)
        if member is None or report.local_step <= member.local_step:
            return
        self._stats.on_report(report, now_s)
        record = {"kind": "step", "t": now_s, "learner": report.learner_id, "incarnation": report.incarnation}
        record |= {"local_step": report.local_step, "tokens": member.past_tokens + report.tokens}
        record |= {"global_step": report.global_step, "loss": report.loss, "step_s": report.step_s}
        self._telemetry.write(record)

    # ---- effects --------------------------------------------------------------------------------------------------

    def _execute(self, effects: list[Effect], listener: GrpcListener) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                message: Any = effect.message
                payload = self._model.payload(message.fragment_id) if isinstance(message, GlobalFragment) else b""
                listener.send(effect.peer, message, payload)
            elif isinstance(effect, Merge):
                payloads = self._values.pop(effect.global_step)
                self._merges.submit(self._merge, effect, payloads).add_done_callback(self._report_failure)
            elif isinstance(effect, Discard):
                self._values.pop(effect.global_step, None)
            elif isinstance(effect, Note):
                self._note(effect)
            elif isinstance(effect, Drop):
                log.info(f"dropped a message of {effect.peer}: {effect.reason}")
            elif isinstance(effect, Finish):
                self._finished = effect.reason
            else:
                raise AssertionError(f"the syncer has no effect {effect}")

    def _merge(self, order: Merge, payloads: dict[str, bytes | memoryview]) -> None:
        """On the merge thread."""
        left_out, payload = self._model.merge(order, payloads)
        for reason in left_out:
            log.info(f"left out of the merge: {reason}")
        self._report("merged", (order, payload))

    def _report_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._report("failed", error)

    def _note(self, note: Note) -> None:
        now_s = self._now_s()
        record = {"kind": note.kind, "t": now_s, "global_step": note.global_step, "fragment_id": note.fragment_id}
        self._telemetry.write(record | {"members": list(note.members), "reason": note.reason})
        if note.kind == "merged":
            self._stats.on_merged(note.members, note.global_step)
        elif note.kind != "closed":
            log.info(f"{', '.join(note.members) or 'round ' + str(note.global_step)} {note.kind}: {note.reason}")

    # ---- watching -------------------------------------------------------------------------------------------------

    def _maybe_evaluate(self) -> None:
        if not self._next_eval or self._machine.global_step < self._next_eval or self._evaluating:
            return
        self._next_eval += self._config.train.eval_every
        self._evaluating = True
        at = (self._machine.global_step, self._stats.tokens)
        snapshot = self._merges.submit(self._model.parameters)
        job = self._evals.submit(lambda: self._evaluate(snapshot, *at, self._config.train.eval_batches))
        job.add_done_callback(self._report_failure)

    def _evaluate(self, snapshot: Future[dict[str, np.ndarray]], global_step: int, tokens: int, batches: int) -> None:
        """On the eval thread."""
        result = self._evaluator.evaluate(snapshot.result(), batches)
        self._report("evaluated", {**result, "global_step": global_step, "tokens": tokens})

    def _record_eval(self, result: dict[str, Any], now_s: float) -> None:
        self._eval_loss = result["loss"]
        record = {"kind": "eval", "t": now_s, "global_step": result["global_step"], "tokens": result["tokens"]}
        self._telemetry.write(record | {"loss": result["loss"], "bits_per_byte": result["bits_per_byte"]})
        log.info(f"global step {result['global_step']}: evaluation loss {result['loss']:.4f}")

    def _wire(self, listener: GrpcListener) -> dict[str, int]:
        return {"up_bytes": listener.traffic.received_bytes, "down_bytes": listener.traffic.sent_bytes}

    def status(self, listener: GrpcListener) -> dict[str, Any]:
        """What the run does now, for `diloco status` and the live view."""
        now_s = self._now_s()
        learners = self._stats.status(now_s)
        state = "starting" if not self._stats.tokens else "complete" if self._machine.finished else "running"
        return {
            "run": self._config.name,
            "state": "stopped" if self._stop.is_set() else state,
            "global_step": self._machine.global_step,
            "total_steps": self._machine.total_steps,
            "waiting_for": self._machine.waiting_for(now_s),
            "wall_s": round(now_s, 1),
            "tokens": self._stats.tokens,
            "tokens_per_s": round(sum(row["tokens_per_s"] for row in learners), 1),
            "eval_loss": self._eval_loss,
            "contributors_per_round": round(self._stats.contributors_per_round, 3),
            "wire": self._wire(listener),
            "learners": learners,
        }

    def _tell(self, listener: GrpcListener) -> None:
        status = self.status(listener)
        try:
            write_json(self._run_dir / STATUS_FILE, status)
        except OSError as error:  # a display must not end a run
            log.warning(f"status not written: {error}")
        listener.status_json = json.dumps(finite(status))
        wire = {"kind": "wire", "t": self._now_s(), "global_step": self._machine.global_step, **status["wire"]}
        self._telemetry.write(wire)
        self._telemetry.flush()

    # ---- the end --------------------------------------------------------------------------------------------------

    def _save(self) -> dict[str, np.ndarray]:
        """Write the global model to disk; returns it."""
        parameters = self._model.parameters()
        meta = {"global_step": self._machine.global_step, "tokens": self._stats.tokens, "run": self._config.name}
        save_parameters(self._run_dir / CHECKPOINTS, parameters, meta)
        return parameters

    def _conclude(self, listener: GrpcListener) -> dict[str, Any]:
        """Checkpoint, last evaluation, summary."""
        self._tell(listener)
        now_s = self._ended_s
        summary = self._stats.summary(self._wire(listener), now_s)
        parameters = self._save()
        self._evals.shutdown(wait=True)
        result = self._evaluator.evaluate(parameters, self._config.train.final_eval_batches)
        self._record_eval({**result, "global_step": self._machine.global_step, "tokens": summary["tokens"]}, now_s)
        complete = self._machine.finished
        summary = {"eval_loss": result["loss"], "eval_bits_per_byte": result["bits_per_byte"], **summary}
        summary |= {"complete": complete, "num_parameters": self._evaluator.num_parameters}
        write_json(self._run_dir / SUMMARY_FILE, summary)
        self._tell(listener)
        self._telemetry.close()
        return summary
