"""An island's part in a run, for whoever steps it.

It keeps contact with the syncer, hands copies of fragments out and global values in, and keeps states for recovery. It
never steps: whoever does (the built-in loop in run.py, or a loop of the user's own) calls `begin` before the first
step, asks `take_batch` for what to read, and calls `stepped` after each one, in which values and states are adopted;
`leave` comes last.

Its threads are in the table of docs/architecture.md. Only the caller's, which steps, touches the island, and nothing
that the network or the disk does makes a step wait, outside lockstep (docs/protocol.md).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time as unix_s
from typing import NamedTuple

from diloco_jax.protocol.effects import AdoptState, Effect, EvaluateModel
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.start import Saved
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import OWN_TIME, STALE, STOPPED_OUTSIDE, Leave, Metric, MetricsReport
from diloco_jax.runtime.island.adoptions import GlobalValues
from diloco_jax.runtime.island.evaluation import Evaluation
from diloco_jax.runtime.island.follower import Follower
from diloco_jax.runtime.island.host import Host, Ranges
from diloco_jax.runtime.island.join import Hosts, make_dialler
from diloco_jax.runtime.island.leader import LeadingHost
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import SavedStates
from diloco_jax.runtime.learner.effects import IDLE_S, Decisions, LearnerInbox, LinkKeeper, Signals
from diloco_jax.runtime.learner.metrics import IslandMetrics
from diloco_jax.runtime.learner.profiling import Profiling
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.runtime.records.files import STATES
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.transport.group.group import LEADER, GroupMember
from diloco_jax.transport.link import Rejected, check_name
from diloco_jax.transport.sharded import Dialler
from diloco_jax.transport.trust.security import Denied

log = logging.getLogger(__name__)


class Joining(NamedTuple):
    """The way in which one process of an island takes part in a run."""

    config: RunConfig  # as it was written; `host` resolves it
    learner_id: str
    incarnation: int
    address: str  # where the syncer listens
    run_dir: Path  # folder for the tape and for the learner's own saved states
    pulse: Pulse  # signs of life of this process, or of this island's thread
    hosts: Hosts | None = None  # the island's processes, if there are several

    def dialler(self, run: ResolvedRun) -> Dialler:
        return make_dialler(run, self.learner_id, self.incarnation, self.address, self.hosts)

    def saved_states(self) -> SavedStates:
        """Return this process's states on disk; ValueError if nobody here can write where checkpoints.states says."""
        name = check_name(self.learner_id)
        folders = [str(self.run_dir / STATES / name)]
        if other := self.config.checkpoints.states:
            folders.append("/".join((other.rstrip("/"), self.config.name, name)))
        return SavedStates(folders, *((0, 1) if self.hosts is None else (self.hosts.host, self.hosts.count)))

    def host(
        self,
        island: ExchangedState,
        compile_step: Callable[[], None] | None,
        evaluate: Evaluation | None,
        stop: threading.Event,
    ) -> Host:
        """Resolve the run for the model of this island, and return what exchanges it on this process."""
        run = resolve(self.config, island.shapes, island.kinds)
        if self.hosts is None or self.hosts.host != LEADER:
            return Host(run, island, compile_step, evaluate, self.saved_states())
        return LeadingHost(run, island, compile_step, evaluate, self.hosts, stop, self.saved_states())

    def follower(self, host: Host, stop: threading.Event, on_batch: Callable[[Ranges, Ranges], None]) -> Follower:
        assert self.hosts is not None and isinstance(self.hosts.group, GroupMember), "host 0 leads"
        return Follower(host, self.dialler(host.run), self.hosts.group, stop, on_batch, self.pulse)


def island_pulse(config: RunConfig, run_dir: Path, learner_id: str, host: int = 0) -> Pulse:
    name = f"{check_name(learner_id)}-h{host}" if host else check_name(learner_id)
    return Pulse(config.watchdog, f"the loop of {name}", (run_dir, name))


class StepSize(NamedTuple):
    """The data of one inner step."""

    samples: int  # of the run's global order
    tokens: int  # in all of them
    corpus: str = ""  # what they are read from, in words that others can compare; "" if nothing is known of it


class Joined:
    """One life of a learner that has joined its run. Only the thread that steps may call it."""

    def __init__(
        self,
        joining: Joining,
        host: Host,
        size: StepSize,
        signals: Signals,
        payloads: PayloadSender,
        metrics: IslandMetrics,
    ) -> None:
        run, saved = host.run, host.find_saved()
        wire = run.config.wire
        self.machine = machine = Learner(
            joining.learner_id,
            joining.incarnation,
            run.config.protocol,
            run.fingerprint(size.corpus),
            step_samples=size.samples,
            saved=None if saved is None else Saved(saved.global_step, saved.digests),
            adopt_mode=run.config.adopt.mode,
            payload_bytes=dict(enumerate(run.payload_bytes(wire.up))),
            evaluates=host.evaluates,
        )
        self._host = host
        self._address = joining.address
        self._tape = tape = LearnerTape(joining.run_dir, joining.learner_id, joining.incarnation, size.samples)
        self._payloads = payloads
        self._signals = signals
        self._profiling = Profiling(joining.run_dir, joining.learner_id)
        self._metrics = metrics
        self._decisions = decisions = Decisions(machine, host, tape, payloads, saved, signals)
        self.inbox = LearnerInbox(decisions, GlobalValues(run.fragments, wire.down))
        self._link = LinkKeeper(decisions, self.inbox, joining.dialler(run))
        self._step_tokens = size.tokens
        self._pulse = joining.pulse
        self._pulse.last_word = self._say_last

    @property
    def finished(self) -> str:
        """Return the reason that the machine gave when it ended; "" before."""
        return self._decisions.finished

    def begin(self) -> bool:
        """Compile, make the link to the syncer and keep it from now on; then wait for what a step needs (`ready`).

        Raises:
            TransportError: the syncer, or a host of the island, cannot be reached.
            ConnectionError: a newer incarnation is known, as when a clock was set back; a later start may be newer.
            ValueError: the syncer refuses what this process is: its run, token or certificate.
        """
        # No daemon: an interpreter that ends while XLA compiles aborts, and the reason why it ends is lost.
        threading.Thread(target=self._compile, name="compile").start()
        try:
            self._link.connect()
        except (Rejected, Denied) as error:  # another attempt would end like this one
            raise (ConnectionAbortedError if STALE in str(error) else ValueError)(str(error)) from None
        threading.Thread(target=self._link.run, name="link", daemon=True).start()
        return self.ready()

    def _compile(self) -> None:
        began_s = time.monotonic()
        try:
            self._host.warm_up(self._pulse.phase)
            self._pulse.phase("joining: waits for the model and its share of the data")
            log.info(f"compiled what a step, staging and adoption need in {time.monotonic() - began_s:.1f} s")
        except Exception as error:
            self._signals.fail(error)
        finally:
            self._signals.compiled.set()
            self._signals.woken.set()
        self._host.warm_up_evaluation()  # while steps run: the first evaluation need not wait for it

    def ready(self) -> bool:
        """Wait for what a step needs: at first model, data, a state and the compiler; in lockstep the due fragment.

        It raises the error of another thread, and returns False if there is no step to make any more.
        """
        machine, signals = self.machine, self._signals
        while not self._over() and not (machine.may_step() and signals.compiled.is_set()):
            if signals.compiled.is_set():  # the compiler may hang, and nobody else waits for it
                self._pulse.beat()
            signals.woken.clear()
            self.inbox.drain()
            if self._decisions.state is not None:
                self._adopt_state(self._decisions.state)
            elif self._decisions.examination is not None and signals.compiled.is_set():
                self._evaluate(self._decisions.examination)
            elif not machine.may_step() or not signals.compiled.is_set():
                signals.woken.wait(IDLE_S)
        self._decisions.forget_saved()
        self._pulse.beat()
        return not self._over()

    def take_batch(self) -> Batch:
        """Return the samples of the next step; at most one step ahead."""
        return self._decisions.ask(Learner.take_batch)

    def upcoming(self, steps: int) -> Ranges:
        """Return what the steps after that will read, as far as it is known: positions of so many steps at most."""
        return self._decisions.ask(lambda machine: machine.allotment.upcoming(steps))

    def stepped(self, batch: Batch, clock: int, metrics: Mapping[str, float], took_s: float) -> bool:
        """Report a step that began at this step of the schedule, adopt what came, and wait for the next (`ready`)."""
        loss = float(metrics["loss"])
        # The syncer's tape keeps every report: it has the digits that are measured, and no more.
        told_s, told_loss = round(took_s, 6), float(f"{loss:.7g}")

        def report(machine: Learner, now_s: float) -> list[Effect]:
            effects = machine.on_step(self._step_tokens, told_s, told_loss, now_s, samples_end=batch.end)
            self._tape.step(machine.local_step, clock, batch.ranges, loss)
            self._metrics.step(machine.local_step, metrics, took_s, self._step_tokens)
            return effects

        self._pulse.beat(took_s)
        self._pulse.ready(self._decisions.link is not None)
        self._decisions.apply(report)
        self._decisions.ask(self._tell_metrics)
        self.inbox.drain()
        self._profiling.step_done(self.machine.local_step)
        return self.ready()

    def _tell_metrics(self, machine: Learner) -> None:
        # while there is no link they wait, as one mean
        if self._decisions.link is not None and (values := self._metrics.due(time.monotonic())) is not None:
            told = (*(Metric(name, value) for name, value in values.items()), Metric(OWN_TIME, unix_s()))
            self._decisions.send(MetricsReport(machine.learner_id, machine.incarnation, machine.local_step, told))

    def leave(self, reason: str = STOPPED_OUTSIDE) -> None:
        """End this life; `reason` is what the syncer hears if it was stopped before the run was complete."""
        self._pulse.patient()
        self._profiling.close()
        stopped = self._signals.stop.is_set()
        if stopped and not self.finished:
            self._decisions.apply(lambda machine, now_s: machine.leave(reason, now_s))
        finished = self.finished
        self._payloads.close()
        self._decisions.close_link(2.0)
        self._host.close()
        self._metrics.close()
        self._decisions.ask(lambda machine: self._tape.end(finished or "failed", machine.digests))
        failed = finished.partition(":")[0] in ("", "refused", "expelled")
        self._host.end(INTERRUPTED if stopped else FAILED if failed else 0)
        self._pulse.close()

    def _say_last(self, reason: str) -> None:
        """Tell the syncer why this process ends, past the machine, whose lock the thread that hangs may have."""
        link = self._decisions.link
        if link is not None:
            link.send(Leave(self.machine.learner_id, self.machine.incarnation, reason))
            link.close(2.0)

    def check_end(self) -> None:
        """Raise ValueError if the syncer refused this learner, ConnectionError if it refused this incarnation only."""
        kind, _, reason = self.finished.partition(": ")
        if kind == "refused" and not self.machine.epoch and STALE not in reason:
            raise ValueError(f"the syncer at {self._address} refused this learner: {reason}")
        if kind in ("refused", "expelled"):
            raise ConnectionAbortedError(f"the syncer at {self._address} {kind} this incarnation: {reason}")

    def _over(self) -> bool:
        self._signals.check()
        return self._decisions.over

    def _evaluate(self, effect: EvaluateModel) -> None:
        """Evaluate the global model outside of the lock: pulls are answered meanwhile."""
        self._decisions.examination = None
        self._pulse.patient()
        score = self._host.evaluate(effect.global_step, final=effect.final)
        log.info(f"evaluated the {'final' if effect.final else 'global'} model in {score.took_s:.1f} s")
        self._decisions.apply(lambda machine, now_s: machine.on_evaluated(score, now_s))

    def _adopt_state(self, effect: AdoptState) -> None:
        """Take a state over outside of the lock: heartbeats go on while a large one is copied to the devices."""
        whose = effect.donor or "an earlier life"
        self._pulse.patient()
        self._pulse.phase(f"recovering: takes over the state of {whose}")
        try:
            incarnation, local_step = self._decisions.load_state(effect)
        except ValueError as error:
            log.warning(f"the state of {whose} cannot be used: {error}")
            self._decisions.apply(lambda machine, now_s: machine.on_state_adopted(False, now_s))
            return
        log.info(f"took over the state of {whose} at its step {local_step}")

        def adopted(machine: Learner, now_s: float) -> list[Effect]:
            self._tape.state(effect, incarnation, local_step)
            return machine.on_state_adopted(True, now_s)

        self._decisions.apply(adopted)
