"""An island's part in a run, for whoever steps it.

It keeps contact with the syncer, hands copies of fragments out and global values in, and keeps states for recovery. It
never steps: whoever does asks `ready` before the first step, `take_batch` for what to read, and calls `stepped` after
each one, in which values and states are adopted; `leave` comes last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import Metric, MetricsReport
from diloco_jax.runtime.island.adoptions import GlobalValues
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.join import FAILED, STOPPED
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner.decisions import IDLE_S, Decisions, Signals
from diloco_jax.runtime.learner.effects import Effects, LearnerOutbox
from diloco_jax.runtime.learner.inbox import LearnerInbox, LinkKeeper
from diloco_jax.runtime.learner.metrics import IslandMetrics
from diloco_jax.runtime.learner.states import States
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.sharded import Dialler

log = logging.getLogger(__name__)


class Joined:
    """One life of a learner that has joined its run. Only the thread that steps may call it.

    Attributes:
        inbox: takes what the syncer says.
    """

    def __init__(
        self,
        config: RunConfig,
        machine: Learner,
        host: Host,
        dialler: Dialler,
        tape: LearnerTape,
        states: States,
        payloads: PayloadSender,
        signals: Signals,
        metrics: IslandMetrics,
    ) -> None:
        self._machine = machine
        self._host = host
        self._tape = tape
        self._states = states
        self._payloads = payloads
        self._signals = signals
        self._metrics = metrics
        self._outbox = LearnerOutbox(host, tape, payloads)
        self._decisions = decisions = Decisions(machine, Effects(host, tape, self._outbox, states), signals)
        self.inbox = LearnerInbox(host, decisions, GlobalValues(host.fragments, config.wire.down), signals)
        self._link = LinkKeeper(host, decisions, self.inbox, self._outbox, dialler, signals)
        self._step_tokens = host.batch_shape[0] * config.train.seq_len

    @property
    def finished(self) -> str:
        """Return the reason that the machine gave when it ended; "" before."""
        return self._decisions.finished

    def connect(self) -> None:
        """Make the link to the syncer, and keep it from now on.

        Raises:
            TransportError: the syncer, or a host of the island, cannot be reached.
        """
        self._link.connect()
        threading.Thread(target=self._link.run, name="link", daemon=True).start()

    def ready(self) -> bool:
        """Wait for what a step needs: at first model, data, a state and the compiler; in lockstep the due fragment.

        Returns:
            False if there is no step to make any more.

        Raises:
            Exception: that of another thread.
        """
        machine, signals = self._machine, self._signals
        while not self._over() and not (machine.may_step() and signals.compiled.is_set()):
            signals.woken.clear()
            self.inbox.drain()
            if self._states.wanted is not None:
                self._adopt_state(self._states.wanted)
            elif not machine.may_step() or not signals.compiled.is_set():
                signals.woken.wait(IDLE_S)
        self._states.forget_saved()
        return not self._over()

    def take_batch(self) -> Batch:
        """Return the samples of the next step; at most one step ahead."""
        return self._decisions.ask(Learner.take_batch)

    def stepped(self, batch: Batch, clock: int, metrics: Mapping[str, float], took_s: float) -> bool:
        """Report a step that is done, adopt what came meanwhile, and wait until the next one may begin (`ready`).

        Args:
            batch: what it read.
            clock: global step when it began.
            metrics: of its training, name -> scalar; "loss" must be there.
            took_s: how long it took.
        """

        loss = float(metrics["loss"])

        def report(machine: Learner, now_s: float) -> list[Effect]:
            effects = machine.on_step(self._step_tokens, took_s, loss, now_s, samples_end=batch.end)
            self._tape.note("step", machine.local_step, clock, batch.ranges, loss)
            self._metrics.step(machine.local_step, metrics, took_s, self._step_tokens)
            return effects

        self._decisions.apply(report)
        self._decisions.ask(self._tell_metrics)
        self.inbox.drain()
        return self.ready()

    def _tell_metrics(self, machine: Learner) -> None:
        # while there is no link they wait, as one mean
        if self._outbox.link is not None and (values := self._metrics.due(time.monotonic())) is not None:
            told = tuple(Metric(name, value) for name, value in values.items())
            self._outbox.send(MetricsReport(machine.learner_id, machine.incarnation, machine.local_step, told))

    def leave(self) -> None:
        """Say goodbye, and end everything."""
        stopped = self._signals.stop.is_set()
        if stopped and not self._decisions.finished:
            self._decisions.apply(lambda machine, now_s: machine.leave("stopped from outside", now_s))
        finished = self._decisions.finished
        self._payloads.close()
        if self._outbox.link is not None:
            self._outbox.link.close(2.0)
        self._states.close()
        self._metrics.close()
        self._decisions.ask(lambda machine: self._tape.end(finished or "failed", machine.digests))
        failed = finished.partition(":")[0] in ("", "refused", "expelled")
        self._host.end(STOPPED if stopped else FAILED if failed else 0)

    def _over(self) -> bool:
        self._signals.check()
        return self._decisions.over

    def _adopt_state(self, effect: AdoptState) -> None:
        """Take a state over outside of the lock: heartbeats go on while a large one is copied to the devices."""
        whose = effect.donor or "an earlier life"
        try:
            incarnation, local_step = self._states.load(effect)
        except ValueError as error:
            log.warning(f"the state of {whose} cannot be used: {error}")
            self._decisions.apply(lambda machine, now_s: machine.on_state_adopted(False, now_s))
            return
        log.info(f"took over the state of {whose} at its step {local_step}")

        def adopted(machine: Learner, now_s: float) -> list[Effect]:
            self._tape.state(effect, incarnation, local_step)
            return machine.on_state_adopted(True, now_s)

        self._decisions.apply(adopted)
