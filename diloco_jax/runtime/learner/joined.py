"""Everything that a learner does besides stepping: link, payloads, adoption, recovery.

The loop that steps (the built-in one in run.py, or a user's own) calls `begin` before the first step, `take_batch` for
the samples of a step, and `stepped` after each step. `stepped` adopts values and states. The loop calls `leave` last.

docs/architecture.md lists the threads. Only the caller's thread, which steps, uses the island. A step never waits for
the network or the disk, except in lockstep and for at most `protocol.wait_steps` (docs/protocol.md).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time as unix_s
from typing import NamedTuple

from diloco_jax.protocol.bans import BANNED
from diloco_jax.protocol.effects import AdoptState, Effect, EvaluateModel
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import (
    FULL,
    OTHER_RUN,
    OWN_MACHINE,
    OWN_PROCESS,
    OWN_TIME,
    STALE,
    STOPPED_OUTSIDE,
    Leave,
    Metric,
    MetricsReport,
)
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.runtime.island.evaluation import Evaluation
from diloco_jax.runtime.island.follower import Follower
from diloco_jax.runtime.island.host import Host, Ranges
from diloco_jax.runtime.island.join import Hosts, make_dialler
from diloco_jax.runtime.island.kept_state import KeptState, StatesWithKept
from diloco_jax.runtime.island.leader import LeadingHost
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import OwnStates, SavedStates
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.learner.effects import IDLE_S, Decisions, LearnerInbox, LinkKeeper, Signals
from diloco_jax.runtime.learner.metrics import IslandMetrics
from diloco_jax.runtime.learner.profiling import Profiling
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.runtime.records.files import STATES, states_elsewhere
from diloco_jax.runtime.records.liveness import loop_name, machine_number
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, WRONG_INPUT, RefusedForGood
from diloco_jax.settings.fingerprint import own_corpus
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.island_state import IslandState
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.group.group import LEADER, GroupMember
from diloco_jax.transport.link import Rejected, check_name
from diloco_jax.transport.session.spares import keep_spares
from diloco_jax.transport.store.counts import calls, requests_text
from diloco_jax.transport.trust.security import Denied

# The epoch of a syncer that has not restarted.
FIRST_EPOCH = 1

log = logging.getLogger(__name__)

# Steps in a row without leased data that are worth a line; a late lease costs a few.
EARLIER_STEPS = 16


def is_final(reason: str) -> bool:
    """Return whether another start of the learner would be refused for the same reason."""
    # The reason of a ban is an operator's text, which may contain any words.
    return BANNED in reason or (STALE not in reason and FULL not in reason)


class Joining(NamedTuple):
    """The settings of one process of an island in a run."""

    # The config before it is resolved; `host` resolves it.
    config: RunConfig
    learner_id: str
    incarnation: int
    address: str  # syncer
    # Folder for the tape and for the learner's own saved states.
    run_dir: Path
    # Signs of life of this process, or of this island's thread.
    pulse: Pulse
    hosts: Hosts | None = None  # several hosts
    # The state that an earlier incarnation left in the memory of this process.
    kept: KeptState | None = None

    def dialler(self, host: Host) -> Dialler:
        """Return the connector of this process to the syncer."""
        statement = b"" if host.blocks is None else host.blocks.statement
        return make_dialler(host.run, self.learner_id, self.incarnation, self.address, self.hosts, statement)

    def saved_states(self) -> OwnStates:
        """Return this process's states on disk; ValueError if it cannot write to checkpoints.states."""
        name = check_name(self.learner_id)
        folders = [str(self.run_dir / STATES / name)]
        if other := states_elsewhere(self.config.checkpoints.states, self.config.name):
            folders.append(f"{other}/{name}")
        on_disk = SavedStates(folders, *((0, 1) if self.hosts is None else (self.hosts.host, self.hosts.count)))
        return on_disk if self.kept is None else StatesWithKept(on_disk, self.kept)

    def host(
        self,
        island: IslandState,
        compile_step: Callable[[], None] | None,
        evaluate: Evaluation | None,
        stop: threading.Event,
    ) -> Host:
        """Resolve the run for the model of this island; return its host: the leader of several, or any other."""
        run, saves = resolve(self.config, island.shapes, island.kinds), self.saved_states()
        keep_spares(run.version_bytes)
        if self.hosts is None:
            return Host(run, island, compile_step, evaluate, saves)
        # A slice that leads has the state of one behind its own.
        assert hasattr(island, "exchange"), "several hosts share an island of JAX arrays"
        blocks = IslandBlocks(run.fragments, island.exchange.boxes, self.hosts.host, self.hosts.count)
        if self.hosts.host != LEADER:
            return Host(run, island, compile_step, evaluate, saves, blocks)
        return LeadingHost(run, island, compile_step, evaluate, self.hosts, stop, saves, blocks)

    def follower(self, host: Host, stop: threading.Event, on_batch: Callable[[Ranges, Ranges], None]) -> Follower:
        """Return a host that follows the leader."""
        hosts = self.hosts
        assert hosts is not None and isinstance(hosts.group, GroupMember), "host 0 leads"
        return Follower(host, self.dialler(host), hosts.group, hosts.direct, stop, on_batch, self.pulse, hosts.commands)


def island_pulse(config: RunConfig, run_dir: Path, learner_id: str, host: int = 0) -> Pulse:
    """Return the signs of life of one host's loop, with files in the run's folder."""
    name = loop_name(check_name(learner_id), host)
    return Pulse(config.watchdog, f"the loop of {name}", (run_dir, name))


class StepSize(NamedTuple):
    """The data of one inner step."""

    # Leased samples per step, 0 if the loop reads its own data.
    samples: int
    tokens: int  # per step
    # Description of the data, so that islands can compare what they read; "" if unknown.
    corpus: str = ""
    # Training samples in one epoch of the data, 0 if unknown.
    epoch_samples: int = 0
    # Digest of the tokenizer that made its token ids, "" if unknown.
    tokenizer: str = ""
    # Digest of the weights below the model's adapters; "" without adapters.
    base: str = ""


class Joined:
    """One incarnation of a learner that has joined its run; only the thread that steps may call it."""

    def __init__(
        self,
        joining: Joining,
        host: Host,
        size: StepSize,
        signals: Signals,
        payloads: PayloadSender,
        metrics: IslandMetrics,
    ) -> None:
        run, self._saved = host.run, host.find_saved()
        saved = self._saved
        # Where the moments come from, as a text.
        self.moments = "new"
        wire = run.config.wire
        self.machine = machine = Learner(
            joining.learner_id,
            joining.incarnation,
            run.config.protocol,
            run.fingerprint(size.corpus, size.base),
            step_samples=size.samples,
            saved=None if saved is None else Saved(saved.global_step, saved.digests, saved.run),
            adopt_mode=run.config.adopt.mode,
            payload_bytes=dict(enumerate(run.payload_bytes(wire.up))),
            evaluates=host.evaluates,
            judges=host.judges,
            corpus=own_corpus(run.config, size.corpus, size.epoch_samples, size.tokenizer),
        )
        self._host = host
        self._states = joining.run_dir / STATES / joining.learner_id
        self._address = joining.address
        self._tape = tape = LearnerTape(joining.run_dir, joining.learner_id, joining.incarnation, size.samples)
        self._payloads = payloads
        self._signals = signals
        self._profiling = Profiling(joining.run_dir, joining.learner_id, joining.config)
        self._metrics = metrics
        self._decisions = decisions = Decisions(machine, host, tape, payloads, saved, signals)
        self.inbox = LearnerInbox(decisions, host.global_values())
        self._dialler = joining.dialler(host)
        self._link = LinkKeeper(decisions, self.inbox, self._dialler)
        self._size = size
        self._pulse = joining.pulse
        self._pulse.last_word = self._say_last

    @property
    def finished(self) -> str:
        """Return the reason that the machine gave when it ended; "" before."""
        return self._decisions.finished

    def begin(self) -> bool:
        """Open the link to the syncer and keep it from now on, compile, then wait until a step can start (`ready`).

        Nothing is compiled before the syncer's answer, because the run may be complete.

        Raises:
            TransportError: The syncer, or a host of the island, cannot be reached.
            ConnectionError: The syncer knows a newer incarnation, as when a clock was set back; a later start may be
                newer.
            RefusedForGood: The syncer refuses this process's run, token or certificate.
        """
        try:
            self._link.connect()
        # Another attempt would fail like this one.
        except (Rejected, Denied) as error:
            raise (RefusedForGood if is_final(str(error)) else ConnectionAbortedError)(str(error)) from None
        start_thread(self._link.run, "link", daemon=True)
        start_thread(self._link.beat, "heartbeat", daemon=True)
        while not self._over() and not self.machine.epoch:
            self._signals.woken.clear()
            self.inbox.drain()
            if not self._over() and not self.machine.epoch:
                self._idle()
        if self._over():
            return False
        # Not a daemon: an interpreter that ends while XLA compiles aborts, and the reason of the end is lost.
        start_thread(self._compile, "compile", daemon=False)
        log.info(f"{self.machine.learner_id}: waiting for the run's model and for the compiler")
        going = self.ready()
        self._disregard_other_run()
        return going

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
        # It compiles while steps run, so that the first evaluation need not wait.
        self._host.warm_up_evaluation()

    def ready(self) -> bool:
        """Wait until a step can start: for model, data, a state, the compiler, and perhaps for the due fragment.

        Returns:
            False if there is no further step.

        Raises:
            Exception: The first error of another thread.
        """
        machine, signals = self.machine, self._signals
        while not self._over() and not (machine.may_step() and signals.compiled.is_set()):
            # The compiler may hang, and nothing else waits for it.
            if signals.compiled.is_set():
                self._pulse.beat()
            signals.woken.clear()
            self.inbox.drain()
            if self._decisions.state is not None:
                self._adopt_state(self._decisions.state)
            elif self._decisions.examination is not None and signals.compiled.is_set():
                self._evaluate(self._decisions.examination)
            elif not machine.may_step() or not signals.compiled.is_set():
                self._idle()
        self._decisions.forget_saved()
        self._pulse.beat()
        if self._over():
            return False
        if machine.local_step == 0:
            # A user's loop compiles its own step now, and may wait for its first batch.
            self._pulse.phase("makes its first step or compiles it")
        return True

    def _idle(self) -> None:
        """Wait for a message, or for the end of the machine's wait for a fragment.

        The link thread may notice that end late, because it listens for longer than such a wait may last.
        """
        left_s = self.machine.wait.deadline_s - time.monotonic()
        if left_s <= 0:
            self._decisions.apply(Learner.on_tick)
        else:
            self._signals.woken.wait(min(IDLE_S, left_s))

    def reads(self, guarantee: str) -> None:
        """Record on the tape that the loop reads its own data, and what is known of it: "resumed" or "own"."""
        self._tape.note("data", guarantee)

    def resume_loader(self) -> None:
        """Continue the loader of own data from this island's newest save, whichever moments were loaded.

        Raises:
            ValueError: the loader refuses its state, or has none that can be saved.
        """
        saved, moments = self._saved, self.moments
        if self._host.resume_loader(saved) and saved is not None:
            self._tape.note("loader", saved.incarnation, saved.local_step)
            log.info(
                f"the loader continues after step {saved.local_step} of this island's incarnation "
                f"{saved.incarnation} (saved at global step {saved.global_step}); moments: {moments}"
            )
        else:
            log.info(f"the loader starts at its beginning: this island has no saved state of it; moments: {moments}")

    def _disregard_other_run(self) -> None:
        """Forget this island's newest save if it is of another run in the same folder; its moments are not loaded.

        Saves of older releases have no id. The clock of a run goes back only in a later epoch of its syncer.
        """
        saved, machine = self._saved, self.machine
        if saved is None or self.finished:
            return
        if saved.run and machine.run:
            other, which = saved.run != machine.run, f"have its id {saved.run}, and this run has the id {machine.run}"
            left = "Neither moments nor the position of a loader are taken from them"
        else:
            other = saved.global_step > machine.global_step and machine.epoch <= FIRST_EPOCH
            which = f"are of global step {saved.global_step}, and this run is at {machine.global_step}"
            left = "The loader starts at its beginning"
        if other:
            self._saved = None
            self._host.disregard_saved()
            what = f"the saved states in {self._states} are of another run: they {which}"
            log.warning(f"{what}. {left}; give each run its own run_dir")

    def take_batch(self, samples: int = 0) -> Batch:
        """Return the data of the next step, at most one step ahead; `samples` of it if given."""

        def take(machine: Learner) -> Batch:
            if samples:
                machine.allotment.resize(samples)
            before = machine.allotment.earlier_steps
            batch = machine.take_batch()
            self._say_data(before, machine.allotment.earlier_steps)
            return batch

        return self._decisions.ask(take)

    def _say_data(self, before: int, now: int) -> None:
        """Log once that steps have no leased data for a while, and once that they have it again."""
        if now == EARLIER_STEPS:
            log.info(
                f"{self.machine.learner_id}: the leased data is used up; until the syncer leases more, steps read "
                "earlier samples of the run in another order, and count for no lease"
            )
        elif before >= EARLIER_STEPS and not now:
            log.info(f"{self.machine.learner_id}: new data is leased, after {before:,} steps on earlier samples")

    def _tokens_of(self, batch: Batch) -> int:
        """Return the tokens of a step; a loop that reads its own data has equal steps."""
        size = self._size
        if not size.samples:
            return size.tokens
        return size.tokens * sum(stop - start for start, stop in batch.ranges) // size.samples

    def upcoming(self, steps: int) -> Ranges:
        """Return the known sample ranges of later steps, for at most `steps` steps."""
        return self._decisions.ask(lambda machine: machine.allotment.upcoming(steps))

    def due(self) -> set[int]:
        """Return the fragments that the end of the next step will stage or adopt, as far as known now."""
        return self._decisions.ask(lambda machine: set(machine.stages_next())) | self.inbox.waiting()

    def stepped(self, batch: Batch, clock: int, metrics: Mapping[str, float], took_s: float) -> bool:
        """Report a step that started at the schedule's step `clock`, adopt arrived values, then wait as `ready`."""
        loss = float(metrics["loss"])
        # The syncer's tape keeps every report, so numbers have only as many digits as were measured.
        told_s, told_loss = round(took_s, 6), float(f"{loss:.7g}")
        tokens = self._tokens_of(batch)

        def report(machine: Learner, now_s: float) -> list[Effect]:
            effects = machine.on_step(tokens, told_s, told_loss, now_s, samples_end=batch.end)
            self._tape.step(machine.local_step, clock, batch.ranges, loss)
            self._metrics.step(machine.local_step, metrics, took_s, tokens)
            return effects

        self._pulse.beat(took_s)
        self._pulse.ready(self._decisions.link is not None)
        self._decisions.apply(report)
        self._decisions.ask(self._tell_metrics)
        self.inbox.drain()
        self._profiling.step_done(self.machine.local_step)
        return self.ready()

    def _tell_metrics(self, machine: Learner) -> None:
        # Without a link the metrics wait, and become one mean.
        if self._decisions.link is not None and (values := self._metrics.due(time.monotonic())) is not None:
            if requests := self._dialler.requests:
                values["bucket_requests"] = calls(requests)
            if damaged := self.inbox.damaged:
                values["damaged_payloads"] = damaged
            values |= {OWN_TIME: unix_s(), OWN_PROCESS: os.getpid(), OWN_MACHINE: machine_number()}
            told = tuple(Metric(name, float(value)) for name, value in values.items())
            self._decisions.send(MetricsReport(machine.learner_id, machine.incarnation, machine.local_step, told))

    def leave(self, reason: str = STOPPED_OUTSIDE) -> None:
        """End this incarnation; the syncer gets `reason` if the learner was stopped before the run was complete."""
        self._pulse.patient()
        self._profiling.close()
        stopped = self._signals.stop.is_set()
        if stopped and not self.finished:
            self._decisions.apply(lambda machine, now_s: machine.leave(reason, now_s))
        finished = self.finished
        self._payloads.close()
        self._decisions.close_link(2.0)
        if requests := self._dialler.requests:
            log.info(f"{self.machine.learner_id}: {requests_text(requests)}")
        self._host.close()
        self._metrics.close()
        self._decisions.ask(lambda machine: self._tape.end(finished or "failed", machine.digests))
        failed = finished.partition(":")[0] in ("", "refused", "expelled")
        # A supervisor must not restart the other hosts of a banned island.
        ended = WRONG_INPUT if BANNED in finished else FAILED
        self._host.end(INTERRUPTED if stopped else ended if failed else 0)
        self._pulse.close()

    def _say_last(self, reason: str) -> None:
        """Send the syncer the reason why this process ends.

        It bypasses the machine, because the thread that hangs may hold its lock.
        """
        link = self._decisions.link
        if link is not None:
            link.send(Leave(self.machine.learner_id, self.machine.incarnation, reason))
            link.close(2.0)

    def check_end(self) -> None:
        """Raise RefusedForGood if the syncer refuses this learner for good, ConnectionError if not for good."""
        kind, _, reason = self.finished.partition(": ")
        # A learner that has trained may join this run as a new process, unless it belongs to another run.
        for_good = kind == "refused" and is_final(reason) and (not self.machine.epoch or OTHER_RUN in reason)
        # A new process of a banned learner would be refused.
        if for_good or (kind in ("refused", "expelled") and BANNED in reason):
            raise RefusedForGood(f"the syncer at {self._address} refused this learner: {reason}")
        if kind in ("refused", "expelled"):
            raise ConnectionAbortedError(f"the syncer at {self._address} {kind} this incarnation: {reason}")

    def _over(self) -> bool:
        self._signals.check()
        return self._decisions.over

    def _evaluate(self, effect: EvaluateModel) -> None:
        """Evaluate the global model outside of the lock, so that pulls are answered meanwhile."""
        self._decisions.examination = None
        self._pulse.patient()
        change = self._decisions.take_change(effect.number)
        score = self._host.evaluate(effect.global_step, final=effect.final, change=change)
        log.info(f"evaluated the {'final' if effect.final else 'global'} model in {score.took_s:.1f} s")
        self._decisions.apply(lambda machine, now_s: machine.on_evaluated(score, now_s))

    def _adopt_state(self, effect: AdoptState) -> None:
        """Load a state outside of the lock, so that heartbeats continue while it is copied to the devices."""
        whose = effect.donor or "an earlier incarnation"
        self._pulse.patient()
        self._pulse.phase(f"recovering: loads the state of {whose}")
        try:
            incarnation, local_step = self._decisions.load_state(effect)
        except ValueError as error:
            log.warning(f"the state of {whose} cannot be used: {error}")
            self._decisions.apply(lambda machine, now_s: machine.on_state_adopted(False, now_s))
            return
        log.info(f"loaded the state of {whose} at its step {local_step}")
        own = "" if self._saved is None else f"own save of global step {self._saved.global_step}"
        self.moments = f"of peer {effect.donor}" if effect.donor else own

        def adopted(machine: Learner, now_s: float) -> list[Effect]:
            self._tape.state(effect, incarnation, local_step)
            return machine.on_state_adopted(True, now_s)

        self._decisions.apply(adopted)
