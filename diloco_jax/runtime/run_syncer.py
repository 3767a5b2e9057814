"""Drive the syncer machine: deliveries, merges and time in; sends and merges out.

Threads
  * the caller's: owns machine, tape, model, statistics and listener; takes one input after the other. Never computes.
  * "merge": one worker that computes what the model becomes; the caller's thread puts it in place.
  * "snapshot": one worker that writes captures of the whole run to disk.
  * "eval": one worker that evaluates captures of the global model.
The workers put their results into a queue and wake the listener, which is where the caller's thread waits.

Every input is on the tape before it is executed, so a process that takes this one's place does the same and goes on
(recover_syncer.py). A disk that takes nothing delays inputs, snapshots and telemetry; it does not end the run.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.effects import Discard, Drop, Effect, Finish, Merge, Note, Restore, SaveSnapshot, Send
from diloco_jax.protocol.messages import (
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    LearnerMessage,
    StatePart,
    StepReport,
    Stop,
)
from diloco_jax.protocol.stats import RunStats
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.protocol.tape import TapedSyncer
from diloco_jax.runtime.evaluation import Evaluations, Evaluator
from diloco_jax.runtime.files import CHECKPOINTS, CONFIG_FILE, STATUS_FILE, SUMMARY_FILE, TAPE_FILE
from diloco_jax.runtime.global_model import Merged, make_model, make_setup
from diloco_jax.runtime.recover_syncer import FAILOVER, FRESH, Parts, RunClock, begin, mode_of
from diloco_jax.runtime.remote_shares import make_arithmetic
from diloco_jax.runtime.settings import RunConfig, fingerprint
from diloco_jax.runtime.sharded_listener import Life, ShardedListener, open_listeners
from diloco_jax.runtime.snapshots import Snapshot, SnapshotWriter
from diloco_jax.runtime.status import compose_status, read_earlier
from diloco_jax.runtime.tape_file import RETRY_S, TapeFile, TapeStopped, last_time_s
from diloco_jax.runtime.telemetry import Telemetry, finite, write_json
from diloco_jax.transport.grpc_link import GrpcListener
from diloco_jax.transport.link import Delivery

STATUS_EVERY_S = 0.5
FAREWELL_S = 5.0  # how long learners have to hear Stop and say goodbye

log = logging.getLogger(__name__)


class SyncerRun:
    """One process of a run's syncer, from the listening socket to the summary.

    In a folder with a tape it goes on where the process before it died.

    Args:
        config: the run.
        run_dir: where tape, metrics, status, snapshots and summary go.
        stop: set from outside to end the run early, in good order.
        rewind: nobody is alive; go on from the newest snapshot and let what came after it be void.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stop: threading.Event, *, rewind: bool = False) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stop = stop
        self._rewind = rewind
        self._evaluator = Evaluator(config)
        plan = plan_fragments(
            self._evaluator.shapes,
            config.protocol.num_fragments,
            split_axis=config.fragments.axes(self._evaluator.shapes),
        )
        self._results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._listener: GrpcListener | ShardedListener | None = None
        threads = config.syncer.merge_threads or os.cpu_count() or 1
        config_path, setup = run_dir / CONFIG_FILE, make_setup(config, plan)
        self._arithmetic = make_arithmetic(setup, plan, config_path, threads, lambda e: self._report("shard", e))
        self._model = make_model(config, plan, self._evaluator.initial_parameters, self._arithmetic)
        self._fingerprint = fingerprint(config, plan.fingerprint)
        self._machine = Syncer(config.protocol, config.train.steps, self._fingerprint)
        for number in range(config.protocol.num_fragments):
            self._machine.payload_bytes[number] = self._model.value_bytes(number)
            if step_bytes := self._model.step_bytes(number):
                self._machine.step_bytes[number] = step_bytes
        num_parameters = sum(fragment.num_elements for fragment in plan.fragments)
        self._stats = RunStats(config.islands.names, num_parameters, self._machine)
        self._values: dict[
            int, dict[str, Any]
        ] = {}  # round -> learner -> encoded outer gradient, or shards' names of it
        self._merges = ThreadPoolExecutor(1, "merge")
        self._evaluations = Evaluations(config, self._evaluator, lambda result: self._report("evaluated", result))
        self._snapshots = SnapshotWriter(run_dir / CHECKPOINTS, config.name, self._model, config.checkpoints.keep)
        self._eval_loss: float | None = None
        self._wire_before = {"up_bytes": 0, "down_bytes": 0}  # moved by earlier processes
        self._finished = ""
        self._saved = False  # the last snapshot of the run
        self._ended_s = 0.0

    def run(self) -> dict[str, Any]:
        """Serve until the last global step, or until stopped; returns the summary.

        Raises:
            ValueError: the address is in use or not allowed, the tape belongs to another process, or there is nothing
                from which the run could go on.
        """
        mode = mode_of(self._run_dir, rewind=self._rewind)
        self._tape = TapeFile(self._run_dir / TAPE_FILE, self._stop, self._tell)
        self._clock = RunClock(self._run_dir, last_time_s(self._run_dir / TAPE_FILE) or 0.0)
        self._taped = TapedSyncer(self._machine, self._tape.write)
        self._telemetry = Telemetry(self._run_dir, tensorboard=self._config.tensorboard)
        try:
            effects = self._begin(mode)
            lingers = mode == FAILOVER and bool(self._finished)
            life = Life(mode, self._machine.epoch, self._stop)
            self._listener = open_listeners(self._config, self._run_dir, life, self._arithmetic, self._fingerprint)
            self._listener.on_drain = self._drain
            self._execute(effects)
            self._serve()
            self._ended_s = self._now_s()
            self._bid_farewell(lingers=lingers)
        except TapeStopped as error:
            log.warning(str(error))
            self._ended_s = self._ended_s or self._now_s()
        except Exception:
            if self._listener is not None:  # before it listens, nothing has begun that could end early
                log.exception("the run ends early")
                self._snapshots.rescue(self._machine.global_step, self._stats.tokens)
            raise
        finally:
            if self._listener is not None:
                self._listener.close(FAREWELL_S)
            self._merges.shutdown(wait=True)
            self._snapshots.close()
        return self._conclude()

    def _begin(self, mode: str) -> list[Effect]:
        if mode != FRESH:
            before = read_earlier(self._run_dir)
            self._wire_before, self._eval_loss = before.wire, before.eval_loss
        parts = Parts(self._run_dir, self._machine, self._taped, self._model, self._stats)
        effects = begin(parts, mode, self._now_s())
        self._evaluations.skip_to(self._machine.global_step)
        if self._machine.finished and not self._machine.restoring:  # the process before died at the very end
            self._finished = "run complete"
        return effects

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock.now_s()

    def _serve(self) -> None:
        status_at_s = 0.0
        while not self._finished and not self._stop.is_set():
            now_s = self._now_s()
            if now_s >= status_at_s:
                status_at_s = now_s + STATUS_EVERY_S
                self._tell()
            deadline_s = self._machine.next_deadline_s()
            wake_s = status_at_s if deadline_s is None else min(status_at_s, deadline_s)
            self._take(max(0.0, wake_s - now_s))
            now_s = self._now_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._execute(self._taped.on_tick(now_s))

    def _bid_farewell(self, *, lingers: bool) -> None:
        """Let learners hear Stop: until all are gone, or the time for it is over.

        Args:
            lingers: some may still be on their way back from a process that died, so take the whole time.
        """
        if not self._finished:  # stopped from outside: they would train on for nobody
            stop = Stop(self._machine.global_step, "the syncer was stopped")
            self._execute([Send(m.learner_id, stop) for m in self._machine.membership.connected()])
        self._tell()
        ends_s = self._now_s() + FAREWELL_S
        while (lingers or self._machine.membership.connected()) and self._now_s() < ends_s:
            self._take(0.1)

    def _take(self, timeout_s: float) -> None:
        """Handle one delivery, if one comes in time, and all results of the workers."""
        assert self._listener is not None
        delivery = self._listener.receive(timeout_s)
        if delivery is not None:
            self._on_delivery(delivery, self._now_s())
        while not self._results.empty():
            kind, value = self._results.get_nowait()
            if isinstance(value, Exception):
                raise value
            if kind == "merged":
                self._on_merged(*value)
            else:
                self._record_eval(value, self._now_s())

    def _report(self, kind: str, value: Any) -> None:
        """On a worker's thread: hand a result, or an exception, to the caller's thread."""
        self._results.put((kind, value))
        if self._listener is not None:
            self._listener.wake()

    def _on_delivery(self, delivery: Delivery, now_s: float) -> None:
        if delivery.kind == "disconnected":
            member = self._machine.membership.members.get(delivery.peer)
            if member is not None:
                self._execute(self._taped.on_disconnect(delivery.peer, member.incarnation, delivery.reason, now_s))
            return
        message: LearnerMessage = delivery.message  # type: ignore[assignment]
        if message.learner_id != delivery.peer:
            log.info(f"{delivery.peer} spoke as {message.learner_id}; ignored")
            return
        if isinstance(message, StepReport):
            self._on_report(message, now_s)
        elif isinstance(message, AnchorValue) and not self._model.fits(
            message.fragment_id, message.digest, delivery.payload
        ):
            log.warning(f"{delivery.peer} sent a damaged value of fragment {message.fragment_id}; not used")
            return
        effects = self._taped.on_message(message, now_s)
        dropped = any(isinstance(e, Drop) and e.peer == delivery.peer for e in effects)
        if isinstance(message, FragmentValue) and not dropped:
            self._values.setdefault(message.global_step, {})[message.learner_id] = delivery.payload
        self._execute(effects, delivery.payload)

    def _on_report(self, report: StepReport, now_s: float) -> None:
        if not self._stats.on_report(report, now_s):
            return
        member = self._machine.membership.members[report.learner_id]
        record = {"kind": "step", "t": now_s, "learner": report.learner_id, "incarnation": report.incarnation}
        record |= {"local_step": report.local_step, "tokens": member.past_tokens + report.tokens}
        record |= {"global_step": report.global_step, "loss": report.loss, "step_s": report.step_s}
        self._telemetry.write(record)

    def _on_merged(self, order: Merge, merged: Merged) -> None:
        for learner_id, reason in sorted(merged.left_out.items()):
            log.info(f"left out of round {order.global_step}: {learner_id}: {reason}")
        digest = merged.state.digest if merged.state is not None else self._model.digests[order.fragment_id]
        effects = self._taped.on_merged(order.global_step, digest, tuple(sorted(merged.left_out)), self._now_s())
        if merged.state is not None:
            self._model.publish(merged)  # when the decision is on the tape, and before it is told to anybody
        self._execute(effects)
        self._evaluations.maybe(self._machine.global_step, self._stats.tokens, self._captured)

    def _captured(self) -> Callable[[], Mapping[str, np.ndarray]]:
        capture, model = self._model.capture(), self._model
        return lambda: model.parameters(capture)

    def _drain(self, learner_id: str) -> str:
        """`diloco drain`, on the caller's thread."""
        self._execute(self._taped.on_drain(learner_id, self._now_s()))
        log.info(f"{learner_id} was asked to leave")
        return f"{learner_id} leaves after its current step; others get its unfinished data"

    # ---- effects --------------------------------------------------------------------------------------------------

    def _execute(self, effects: list[Effect], payload: bytes | memoryview = b"") -> None:
        """Do what the machine asks for; `payload` is that of the message that it was given."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect, payload)
            elif isinstance(effect, Merge):
                payloads = self._values.pop(effect.global_step)
                self._merges.submit(self._merge, effect, payloads).add_done_callback(self._report_failure)
            elif isinstance(effect, Discard):
                self._values.pop(effect.global_step, None)
            elif isinstance(effect, Restore):
                self._model.restore(effect.fragment_id, effect.version, payload)
            elif isinstance(effect, SaveSnapshot):
                self._snapshots.submit(self._capture())
            elif isinstance(effect, Note):
                self._note(effect)
            elif isinstance(effect, Drop):
                log.info(f"dropped a message of {effect.peer}: {effect.reason}")
            elif isinstance(effect, Finish):
                self._finished = effect.reason
            else:
                raise AssertionError(f"the syncer has no effect {effect}")

    def _send(self, effect: Send, payload: bytes | memoryview) -> None:
        message: Any = effect.message
        if isinstance(message, Stop) and self._machine.finished and not self._saved:
            self._save_last()  # before anybody hears of the end: until then learners hold what this process may lose
            self._tell()
        if isinstance(message, GlobalFragment):
            payload = self._model.payload(message.fragment_id, message.base)
        elif not isinstance(message, StatePart):  # which is passed on as it came
            payload = b""
        if self._listener is not None:
            self._listener.send(effect.peer, message, payload)

    def _merge(self, order: Merge, payloads: Mapping[str, Any]) -> None:
        """On the merge thread."""
        self._report("merged", (order, self._model.merge(order, payloads)))

    def _report_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._report("merged", error)

    def _note(self, note: Note) -> None:
        now_s = self._now_s()
        record = {"kind": note.kind, "t": now_s, "global_step": note.global_step, "fragment_id": note.fragment_id}
        self._telemetry.write(record | {"members": list(note.members), "reason": note.reason})
        if note.kind == "merged":
            self._stats.on_merged(note.members, note.global_step)
        elif note.kind != "closed":
            log.info(f"{', '.join(note.members) or 'round ' + str(note.global_step)} {note.kind}: {note.reason}")

    # ---- watching -------------------------------------------------------------------------------------------------

    def _record_eval(self, result: dict[str, Any], now_s: float) -> None:
        self._eval_loss = result["loss"]
        record = {"kind": "eval", "t": now_s, "global_step": result["global_step"], "tokens": result["tokens"]}
        self._telemetry.write(record | {"loss": result["loss"], "bits_per_byte": result["bits_per_byte"]})
        log.info(f"global step {result['global_step']}: evaluation loss {result['loss']:.4f}")

    def _wire(self) -> dict[str, int]:
        received, sent = self._listener.traffic if self._listener is not None else (0, 0)
        before = self._wire_before
        return {"up_bytes": before["up_bytes"] + received, "down_bytes": before["down_bytes"] + sent}

    def _tell(self) -> None:
        """Say how the run is doing, to whoever looks. What cannot be written is written the next time."""
        now_s = self._now_s()
        status = compose_status(
            self._config.name,
            self._machine,
            self._stats,
            now_s,
            stopped=self._stop.is_set() and not self._machine.finished,
            alarms=[text for text in (self._tape.condition, self._snapshots.condition) if text],
            eval_loss=self._eval_loss,
            wire=self._wire(),
        )
        if self._listener is not None:
            self._listener.status_json = json.dumps(finite(status))
        try:
            write_json(self._run_dir / STATUS_FILE, status)
        except OSError as error:
            log.warning(f"status not written: {error}")
        self._telemetry.write({"kind": "wire", "t": now_s, "global_step": self._machine.global_step, **status["wire"]})
        self._telemetry.flush()

    # ---- keeping --------------------------------------------------------------------------------------------------

    def _capture(self) -> Snapshot:
        return Snapshot(
            self._machine.global_step,
            self._model.capture(),
            json.dumps(self._machine.state()),
            self._tape.position,
            self._stats.tokens,
            self._stats.state(),
            self._now_s(),
        )

    def _save_last(self) -> None:
        """Snapshot of the end of the run, or of where it was stopped; written before this returns, if that can be."""
        if self._machine.restoring:
            log.warning("no snapshot of this moment: newer values were still on their way from learners")
            return
        self._snapshots.wait()
        snapshot = self._capture()
        self._snapshots.write(snapshot)
        while self._snapshots.condition and not self._stop.wait(RETRY_S):
            self._tell()
            self._snapshots.write(snapshot)
        self._saved = not self._snapshots.condition

    def _conclude(self) -> dict[str, Any]:
        """Snapshot, last evaluation, summary."""
        self._tell()
        summary = self._stats.summary(self._wire(), self._ended_s)
        if not self._saved:
            self._save_last()
        self._evaluations.close()
        result = self._evaluator.evaluate(self._model.parameters(), self._config.train.final_eval_batches)
        result |= {"global_step": self._machine.global_step, "tokens": summary["tokens"]}
        self._record_eval(result, self._ended_s)
        summary = {"eval_loss": result["loss"], "eval_bits_per_byte": result["bits_per_byte"], **summary}
        summary |= {"complete": self._machine.finished, "num_parameters": self._evaluator.num_parameters}
        write_json(self._run_dir / SUMMARY_FILE, summary)
        self._tell()
        self._telemetry.close()
        self._tape.close()
        self._arithmetic.close()
        return summary
