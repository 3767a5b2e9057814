"""One process of a run's syncer, from its config to the summary.

The driver gives messages, finished merges and the time to the machine, and executes the machine's effects. The caller's
thread owns machine, tape, model, statistics and listener, handles one input after another, and never computes. Results
of other threads (docs/architecture.md) arrive in a queue that wakes the listener, where the caller's thread waits.

Every input is on the tape before any of its effects is executed, so that a process that replaces this one makes the
same decisions (begin.py). A disk that cannot be written delays inputs, snapshots and telemetry, but does not end the
run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol import effects, messages
from diloco_jax.protocol.member import DISCONNECTED
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.subscribers import MODEL_LAYOUT, Answers, Subscribers
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.figures.table import with_figures
from diloco_jax.runtime.model.arithmetic import Arithmetic, make_setup
from diloco_jax.runtime.model.cuts import ModelVersion
from diloco_jax.runtime.model.global_model import Merged, make_model
from diloco_jax.runtime.model.layout_text import layout_of
from diloco_jax.runtime.model.offered import OfferedModel, describe_run
from diloco_jax.runtime.records.earlier import NOTHING_EARLIER, read_earlier
from diloco_jax.runtime.records.files import ISLANDS_FILE, SUMMARY_FILE, TAPE_FILE, longer_command
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import ended_at_once
from diloco_jax.runtime.records.tape_file import TapeFile, TapeStopped, last_time_s
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.runtime.syncer.band import continued_band, read_band
from diloco_jax.runtime.syncer.begin import FAILOVER, FRESH, begin, mode_of
from diloco_jax.runtime.syncer.context import Merges, Results, SyncerContext
from diloco_jax.runtime.syncer.copies import copy_files, end_copy
from diloco_jax.runtime.syncer.exposition import Exposition
from diloco_jax.runtime.syncer.island_numbers import IslandNumbers
from diloco_jax.runtime.syncer.leading import Leading, begin_to_lead, stand_by
from diloco_jax.runtime.syncer.listening import LISTEN_PATIENCE_S, SyncerStart, open_listener
from diloco_jax.runtime.syncer.machine_alarms import MachineAlarms
from diloco_jax.runtime.syncer.run_clock import RunClock
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.runtime.syncer.subtraction import Subtraction
from diloco_jax.runtime.syncer.watch import Watch
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import SUBSCRIBER, Delivery, bucket_scheme
from diloco_jax.transport.session.listener import Listener
from diloco_jax.transport.session.operator_requests import ADMIT, BAN, OperatorRequest
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.session.spares import keep_spares

# The evaluator reads data, which a syncer does not need when islands bring the model.
if TYPE_CHECKING:
    from diloco_jax.runtime.model.evaluation import Evaluator

STATUS_EVERY_S = 0.5
# Deliveries that are handled before the machine gets the time.
BACKLOG_MAX = 10_000
# Learners have so long to receive Stop and answer.
FAREWELL_S = 5.0
# Subscribers have so long at the end of a complete run to receive the last values.
SUBSCRIBERS_S = 30.0
# A learner whose link broke within this time may reconnect. Only this process can tell it that the run is over.
ADRIFT_S = 60.0
# A syncer without a supervisor waits this long at the end for learners whose link broke: a process that starts them
# again does not know that the run is over.
LATE_S = 60.0

_NOTHING_SENT: tuple[Any, Any] = (None, None)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SyncerDriver:
    """The loop around a started machine and an open listener."""

    context: SyncerContext
    listener: Listener
    # Results of other threads.
    results: Results
    merges: Merges
    snapshots: SnapshotWriter
    watch: Watch
    subscribers: Subscribers

    def __post_init__(self) -> None:
        self._taped = self.context.taped
        self._machine = self.context.machine
        self._model = self.context.model
        self._now_s = self.context.clock.now_s
        self._sent: tuple[Any, Any] = _NOTHING_SENT
        # Learner -> time when its link broke without a goodbye.
        self._adrift: dict[str, float] = {}
        # An earlier process may have failed after the last global step.
        self._finished = self._machine.over
        self.listener.on_operator = self._operate
        self.results.wake_with(self.listener.wake)

    def serve(self, requests: list[effects.Effect]) -> None:
        """Execute the effects of the machine's first input, then serve until the last global step or until stopped.

        Raises:
            TapeStopped: the run was stopped while the tape could not be written, or another process leads it.
        """
        self._execute(requests)
        status_at_s = 0.0
        while not self._finished and not self.context.stop.is_set():
            if self.listener.lost:
                # Islands go to the process that leads, so they get no farewell.
                raise TapeStopped(self.listener.lost)
            now_s = self._now_s()
            if now_s >= status_at_s:
                status_at_s = now_s + STATUS_EVERY_S
                self.watch.tell()
            deadline_s = self._machine.next_deadline_s()
            wake_s = status_at_s if deadline_s is None else min(status_at_s, deadline_s)
            self._take(max(0.0, wake_s - now_s))
            now_s = self._now_s()
            if deadline_s is not None and now_s >= deadline_s:
                # A slow disk may have delayed this thread. Messages that have arrived come before the deadline.
                for _ in range(BACKLOG_MAX):
                    if not self._take(0.0):
                        break
                self._execute(self._taped.on_tick(self._now_s()))

    def bid_farewell(self, *, lingers: bool, late_s: float = 0.0) -> None:
        """Send Stop until all learners have left, or for the whole time if some may still reconnect (`lingers`).

        Args:
            late_s: Seconds to wait at the end of a complete run for learners that left without a goodbye at any time.
        """
        # After a stop from outside, learners would train without a syncer.
        if not self._finished:
            stop = messages.Stop(self._machine.global_step, messages.SYNCER_STOPPED)
            self._execute([effects.Send(m.learner_id, stop) for m in self._machine.membership.connected()])
        self.watch.tell()
        lately_s = self._now_s() - ADRIFT_S
        late = bool(late_s) and self._machine.over and (lingers or bool(self._adrift))
        if late:
            names = ", ".join(sorted(self._adrift)[:8]) or "islands"
            told = f"waiting up to {late_s:g} s for {names} to return and learn it (Ctrl-C ends)"
            longer = longer_command(self.context.run_dir, self.context.config.limits, "syncer")
            log.info(f"the run is complete; {told}" + f"; to train longer: {longer}" * lingers)
            lately_s = -inf
        ends_s = self._now_s() + (late_s if late else FAREWELL_S)
        subscribers_until_s = self._now_s() + SUBSCRIBERS_S if self._machine.finished else 0.0
        while not (late and self.context.stop.is_set()):
            adrift = any(lost_s > lately_s for lost_s in self._adrift.values())
            learners = lingers or adrift or bool(self._machine.membership.connected())
            waits = self.subscribers and self._now_s() < subscribers_until_s and not self.context.stop.is_set()
            if not waits and not (learners and self._now_s() < ends_s):
                return
            self._take(0.1)

    def _take(self, timeout_s: float) -> bool:
        """Handle all results of other threads, and one delivery if it arrives in time; False without a delivery."""
        delivery = self.listener.receive(0.0)
        if delivery is None and timeout_s:
            # Nothing more arrives soon, so the tape is written now.
            self.context.tape.flush(safe=False)
            delivery = self.listener.receive(timeout_s)
        if delivery is not None:
            self._on_delivery(delivery, self._now_s())
        for result in self.results.take():
            self._on_merged(*result)
        self._serve_subscribers(self.subscribers.proceed())
        return delivery is not None

    def _on_delivery(self, delivery: Delivery, now_s: float) -> None:
        if delivery.peer.startswith(SUBSCRIBER):
            self._on_subscriber(delivery)
            return
        if delivery.kind == "disconnected":
            member = self._machine.membership.members.get(delivery.peer)
            if member is not None:
                if member.state != DISCONNECTED:
                    self._adrift[delivery.peer] = now_s
                self._execute(self._taped.on_disconnect(delivery.peer, member.incarnation, delivery.reason, now_s))
            return
        message: messages.LearnerMessage | messages.MetricsReport = delivery.message  # type: ignore[assignment]
        if message.learner_id != delivery.peer:
            log.info(f"{delivery.peer} spoke as {message.learner_id}; ignored")
            return
        self._adrift.pop(delivery.peer, None)
        if isinstance(message, messages.MetricsReport):
            self.watch.on_metrics(message, now_s)
            return
        if isinstance(message, messages.StepReport):
            self.watch.on_report(message, now_s)
        elif isinstance(message, messages.AnchorValue):
            fragment_id = message.fragment_id
            if not self._model.fits(fragment_id, message.digest, delivery.payload):
                log.warning(f"{delivery.peer} sent a damaged value of fragment {fragment_id}; not used")
                return
            brought = (fragment_id, message.version, delivery.payload)
            if self._machine.restoring and (problem := self._model.anchor_problem(*brought)):
                log.warning(f"{delivery.peer} brought version {message.version} of fragment {fragment_id}: {problem}")
                # The machine then asks another holder.
                message = message._replace(version=messages.NO_VERSION)
        elif isinstance(message, messages.Hello | messages.Score):
            self.watch.subtraction.on_message(message)
        requests = self._taped.on_message(message, now_s)
        dropped = any(isinstance(e, effects.Drop) and e[::2] == (delivery.peer, -1) for e in requests)
        if isinstance(message, messages.FragmentValue) and not dropped:
            self.merges.keep(message, delivery.payload)
            self.watch.on_value(message, now_s)
        self._execute(requests, delivery.payload)

    def _on_subscriber(self, delivery: Delivery) -> None:
        """Take the request of a subscriber, or its end; neither is an input of the machine."""
        name, hello = delivery.peer.removeprefix(SUBSCRIBER), delivery.message
        if not isinstance(hello, messages.Hello):
            self.subscribers.on_disconnect(name)
            log.info(f"subscriber {name} left: {delivery.reason}")
        elif hello.learner_id == name:
            self._serve_subscribers(self.subscribers.on_hello(hello))

    def _serve_subscribers(self, answers: Answers) -> None:
        for name, message in answers:
            if isinstance(message, messages.GlobalFragment):
                self.listener.send_version(f"{SUBSCRIBER}{name}", message, self._version(message))
                continue
            if isinstance(message, messages.Refuse):
                REFUSALS.tell(f"{SUBSCRIBER}{name}", message.reason)
            self.listener.send(f"{SUBSCRIBER}{name}", message)
        self._sent = _NOTHING_SENT

    def _on_merged(self, order: effects.Merge, merged: Merged) -> None:
        for learner_id, reason in sorted(merged.excluded.items()):
            log.info(f"excluded from round {order.global_step}: {learner_id}: {reason}")
        digest = merged.state.digest if merged.state is not None else self._model.digests[order.fragment_id]
        self.watch.on_merged(order.global_step, merged.excluded, self._now_s())
        self.watch.on_drift(order, merged.drift, self._now_s())
        self.watch.subtraction.on_merged(merged.subtracted)
        excluded = tuple(sorted(merged.excluded))
        requests = self._taped.on_merged(order.global_step, digest, excluded, self._now_s(), merged.evidence)
        self.context.tape.flush()
        # The decision is on the tape, and no learner has got it yet.
        self._model.publish(merged)
        self._execute(requests)

    def _operate(self, request: OperatorRequest) -> str:
        """Do what an operator wants and return the answer to it, on the caller's thread."""
        action, name, why = request
        if action == BAN:
            return self._ban(name, why)
        if action == ADMIT:
            self._execute(self._taped.on_admit(name, self._now_s()))
            self.watch.tell()
            return f"{name} is admitted: it may join again, so start its process again"
        self._execute(self._taped.on_drain(name, self._now_s()))
        log.info(f"{name} was asked to leave")
        leases = self._machine.membership.members[name].step_samples
        return f"{name} leaves after its current step" + "; others get its unfinished data" * bool(leases)

    def _ban(self, name: str, why: str) -> str:
        connected = name in [member.learner_id for member in self._machine.membership.connected()]
        self._execute(self._taped.on_ban(name, why, self._now_s()))
        # Nobody waits at the end of the run for a learner that would be refused.
        self._adrift.pop(name, None)
        # The supervisor reads there that the island's process did not fail.
        self.watch.tell()
        quorum, live = self.context.config.protocol.quorum, self._machine.membership.live
        pauses = f"; rounds pause until {quorum} learners are live (protocol.quorum), {live} are" * (live < quorum)
        how = "is banned and expelled" if connected else "is banned"
        return f"{name} {how}; `diloco admit {name} RUN` lifts the ban{pauses}"

    def _execute(self, requests: list[effects.Effect], payload: bytes | memoryview = b"") -> None:
        """Execute effects; `payload` belongs to the message that caused them."""
        if requests:
            self.context.tape.flush()
        for effect in requests:
            match effect:
                case effects.Send(peer, message):
                    self._send(peer, message, payload)
                case effects.Merge():
                    self.merges.start(effect, self.watch.subtraction.choose(effect))
                case effects.Discard(global_step):
                    self.merges.discard(global_step)
                case effects.Restore(fragment_id, version):
                    self._model.restore(fragment_id, version, payload)
                case effects.SaveSnapshot(global_step):
                    # The last step of a run has one snapshot: the final one, with the values of its last rounds.
                    if global_step != self._machine.progress.total_steps:
                        self.snapshots.save()
                case effects.Evaluated(score):
                    self.watch.on_score(score, self._now_s())
                case effects.Note():
                    self.watch.on_note(effect)
                case effects.Drop(peer, reason) if effects.Send(peer, messages.Refuse(reason)) in requests:
                    REFUSALS.tell(peer, reason)
                    self.watch.on_refused(peer, reason)
                case effects.Drop(peer, reason, global_step):
                    if global_step >= 0:
                        self.merges.drop(global_step, peer)
                    log.info(f"dropped a message of {peer}: {reason}")
                case effects.Finish():
                    self._finished = True
                case _:
                    raise AssertionError(f"the syncer has no effect {effect}")
        # The payload is released as soon as its senders do not need it.
        self._sent = _NOTHING_SENT

    def _send(self, peer: str, message: Any, payload: bytes | memoryview) -> None:
        evaluates = isinstance(message, messages.Evaluate)
        if evaluates:
            self.watch.asked_tokens = self.context.stats.tokens
            # The island evaluates the final model while this process saves it.
            asked, change = self.watch.subtraction.request(peer, message)
            if asked is not None:
                self.listener.send(peer, asked, change)
        ends = self._machine.finished and (evaluates or isinstance(message, messages.Stop))
        if ends and not self.snapshots.saved:
            # Learners hold the newest values until they leave, so the snapshot comes first.
            self.snapshots.save_last(self.watch.tell)
            self.watch.tell()
        if evaluates:
            return
        if isinstance(message, messages.GlobalFragment):
            self.listener.send_version(peer, message, self._version(message))
            return
        if not isinstance(message, messages.StateChunk):
            # Only chunks of a state are passed on with their payload.
            payload = b""
        self.listener.send(peer, message, payload)

    def _version(self, message: messages.GlobalFragment) -> ModelVersion:
        """Return a version to send; it is the same for all learners that hold the same base."""
        key = message.fragment_id, message.version, message.base, message.epoch
        if key != self._sent[0]:
            self._sent = key, self._model.version(message.fragment_id, message.base)
        version: ModelVersion = self._sent[1]
        return version


class SyncerRun:
    """One process of a run's syncer, from the listening socket to the summary.

    In a folder with a tape it resumes where the process before it ended.

    Args:
        model: the run's model: `Evaluator(config)`, or the model that an island brought.
        rewind: no learner is alive; resume from the newest snapshot, so that later rounds are void.
        late_s: seconds to wait at the end of a complete run for learners that may return.
        standby: whether this process waits until the run's syncer is lost, with the merge compiled and the model drawn.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        stop: threading.Event,
        model: Evaluator | OfferedModel,
        *,
        rewind: bool = False,
        late_s: float = 0.0,
        standby: bool = False,
    ) -> None:
        self._late_s = late_s
        self._standby = standby
        self._pulse = Pulse(config.watchdog, "the syncer's loop", (run_dir, "syncer"))
        self._pulse.phase("compiling or loading the merge (up to a minute at the first start after an installation)")
        resolved = resolve(config, model.shapes, model.kinds)
        if fewer := resolved.fewer_fragments(config.protocol.num_fragments):
            log.info(fewer)
        keep_spares(resolved.contribution_bytes)
        self._config = config = resolved.config
        self._run_dir = run_dir
        self._stop = stop
        self._rewind = rewind
        self._results = Results()
        arithmetic = Arithmetic(make_setup(resolved), config.syncer.merge_threads or os.cpu_count() or 1)
        self._initial = model.initial_parameters
        # The listener that took the model answers islands until this process listens itself.
        self._free_port = model.close_desk if isinstance(model, OfferedModel) else lambda: None
        self._arrived_s = model.arrived_s if isinstance(model, OfferedModel) else None
        own = isinstance(model, OfferedModel)
        self._pulse.phase("loading the initial model" if own else "drawing the initial model")
        self._model = make_model(resolved, self._initial(), arithmetic)
        # Only islands download remote data, or have separate corpora.
        corpus = model.corpus if config.shares_corpus and not config.data.remote else ""
        self._fingerprint = resolved.fingerprint(corpus)
        numbers = range(len(resolved.fragments))
        self._machine = Syncer(
            config.protocol,
            config.train.steps,
            self._fingerprint,
            payload_bytes={number: self._model.value_bytes(number) for number in numbers},
            delta_bytes={number: size for number in numbers if (size := self._model.delta_bytes(number))},
            budget=config.budget,
            plan=config.evaluations,
        )
        self._num_parameters = resolved.num_parameters
        self._description = describe_run(config, layout_of(model.shapes, model.kinds))
        self._stats = RunStats(config.islands.names, self._num_parameters, self._machine, config.islands.least)

    def run(self, last_act: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Serve until the last global step or until stopped, and return the summary.

        Args:
            last_act: is called if a signal ends this process before it has begun or resumed the run.

        Returns:
            The summary; an empty one if it was stopped before it led the run in its bucket, or the run of a standby
            ended before it took over.

        Raises:
            ValueError: the address is in use or not allowed, the tape belongs to another process, or the folder has
                nothing to resume from.
        """
        # The caller may keep this object, or the error with its frames. An open pulse would then end the process later.
        with closing(self._pulse):
            return self._run(last_act)

    def _run(self, last_act: Callable[[], object]) -> dict[str, Any]:
        config, run_dir, stop, machine = self._config, self._run_dir, self._stop, self._machine
        leading = self._lead()
        if leading is None and bucket_scheme(config.transport.address):
            return {}
        mode = mode_of(run_dir, rewind=self._rewind)
        copy = None if leading is None else leading.copy
        tape = TapeFile(run_dir / TAPE_FILE, stop, lambda: watch.tell(), copy=copy)
        clock, taped = RunClock(run_dir, last_time_s(run_dir / TAPE_FILE) or 0.0), TapedSyncer(machine, tape.put)
        context = SyncerContext(config, run_dir, stop, clock, tape, machine, taped, self._model, self._stats)
        writer = SnapshotWriter(context, lambda path: None if copy is None else copy.copy_snapshot(path))
        exposed, earlier = Exposition(context, writer), NOTHING_EARLIER if mode == FRESH else read_earlier(run_dir)
        band = read_band(config.evaluation) if mode == FRESH else continued_band(config.evaluation, run_dir)
        subtraction = Subtraction(config.evaluation.subtract, machine)
        watch = Watch(context, earlier, MachineAlarms(context, writer), self._pulse, exposed, subtraction, band)
        merges = Merges(self._model, self._results.put, Pulse(config.watchdog, "a merge", None))
        listener, ended_s = None, 0.0
        preparing = ExitStack()
        try:
            preparing.enter_context(ended_at_once(last_act))
            self._pulse.phase("opening its port" if mode == FRESH else "recovering from its folder")
            exposed.open(LISTEN_PATIENCE_S if mode == FAILOVER else 0.0, stop)
            # A folder with a tape and without a snapshot could not be resumed.
            if mode == FRESH:
                preparing.close()
            copy_files(copy, run_dir)
            requests = begin(context, self._initial, mode, clock.now_s())
            tape.flush()
            watch.begins(mode)
            lingers = mode == FAILOVER and machine.over
            # A standby that takes over must give every island the number that it has.
            numbers = IslandNumbers(run_dir / ISLANDS_FILE, config.islands.names, lambda: copy_files(copy, run_dir))
            description = self._description._replace(began_unix_s=clock.began_unix_s)
            about = (lambda: machine.membership.expected), description, numbers.number_of, machine.run
            start = SyncerStart(mode, machine.epoch, stop, *about, leading)
            self._free_port()
            listener = open_listener(config, run_dir, start)
            watch.listens(listener)
            preparing.close()
            if self._arrived_s is not None:
                log.info(f"the model is loaded after {time.monotonic() - self._arrived_s:.1f} s; islands can join")
            subscribers = Subscribers(machine, dict(self._fingerprint)[MODEL_LAYOUT])
            watch.subscribers = subscribers.state
            driver = SyncerDriver(context, listener, self._results, merges, writer, watch, subscribers)
            driver.serve(requests)
            ended_s = clock.now_s()
            driver.bid_farewell(lingers=lingers, late_s=self._late_s)
        except TapeStopped as error:
            log.warning(str(error))
            ended_s = ended_s or clock.now_s()
        except Exception:
            # Before it listens, no training could have started.
            if listener is not None:
                log.exception("the run ends early")
                self._pulse.patient()
                listener.abandon()
                writer.rescue()
            raise
        finally:
            preparing.close()
            self._pulse.patient()
            self._free_port()
            if listener is not None:
                listener.close(FAREWELL_S)
            merges.close()
        summary = self._conclude(watch, writer, tape, ended_s)
        writer.close()
        tape.close()
        end_copy(copy)
        return summary

    def _lead(self) -> Leading | None:
        """Claim the run's bucket, as a standby once its syncer is lost; None without a bucket, or if that is over."""
        if not self._standby:
            return begin_to_lead(self._config, self._run_dir, self._stop)
        self._pulse.phase("standing by")
        self._pulse.rest()
        return stand_by(self._config, self._run_dir, self._stop)

    def _conclude(self, watch: Watch, writer: SnapshotWriter, tape: TapeFile, ended_s: float) -> dict[str, Any]:
        watch.tell()
        self._pulse.patient()
        summary = self._stats.summary(watch.wire(), ended_s)
        if not writer.saved:
            writer.save_last(watch.tell)
            if writer.condition:
                # The summary then has the alarm.
                watch.tell()
        found = {"eval_loss": watch.eval_loss, "eval_bits_per_byte": watch.eval_bits, "eval_scores": watch.eval_scores}
        alarms = watch.alarms()
        final = self._machine.evaluations
        if self._machine.finished and (reason := "stopped before it was" if final.open else final.reason):
            found = dict.fromkeys(found, None) | {"eval_scores": {}}
            alarms.append(Alarm("evaluation", "", f"the final model is not evaluated ({reason})").as_dict())
        if warning := self._stats.unmerged:
            alarms.append(Alarm("unmerged-fragments", "", warning).as_dict())
        summary = {**found, **summary, "alarms": alarms}
        summary |= {"evaluated": watch.eval_loss is not None and found["eval_loss"] is not None}
        summary |= {
            "requests": watch.requests(),
            "complete": self._machine.finished,
            "num_parameters": self._num_parameters,
        }
        summary |= {"tape_bytes": tape.position, "tape_head": tape.head}
        summary = with_figures("summary", summary)
        write_json(self._run_dir / SUMMARY_FILE, summary)
        if warning:
            log.warning(warning)
        watch.tell()
        watch.close()
        return summary
