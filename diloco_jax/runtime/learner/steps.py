"""The step thread of a learner: inner steps, and between two of them everything that has waited for the gap."""

from __future__ import annotations

import logging
import time

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.leases import Batch
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.learner.decisions import IDLE_S, Decisions, Signals
from diloco_jax.runtime.learner.inbox import LearnerInbox
from diloco_jax.runtime.learner.states import States
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.optimizers import learning_rate

log = logging.getLogger(__name__)


class Steps:
    """The loop of inner steps. Only the thread that calls `run` steps, adopts and loads on the island."""

    def __init__(
        self,
        config: RunConfig,
        host: Host,
        decisions: Decisions,
        inbox: LearnerInbox,
        states: States,
        tape: LearnerTape,
        signals: Signals,
    ) -> None:
        self._host = host
        self._decisions = decisions
        self._inbox = inbox
        self._states = states
        self._tape = tape
        self._signals = signals
        self._rate = learning_rate(config.optimizer, config.train.steps)
        self._step_tokens = host.batch_shape[0] * config.train.seq_len

    def run(self) -> None:
        """Train until the learner ends.

        Raises:
            Exception: that of another thread.
        """
        self._wait_until_ready()
        if self._over():
            return
        self._states.forget_saved()
        machine = self._decisions.machine
        log.info(f"the first step begins at global step {machine.global_step}")
        batch = machine.take_batch()
        self._host.put_batch(batch.ranges)
        while not self._over():
            batch = self._step(batch)
            self._inbox.drain()
            if not machine.may_step():
                self._wait_until_ready()

    def _step(self, batch: Batch) -> Batch:
        """Make an inner step on a batch that is on the devices; return the next one, which is there then."""
        began_s, clock = time.monotonic(), self._decisions.machine.global_step
        handle = self._host.step(self._rate(clock))
        following = self._decisions.ask(lambda machine: machine.take_batch())
        self._host.put_batch(following.ranges)  # while the step runs
        loss = self._host.wait(handle)["loss"]
        took_s = time.monotonic() - began_s

        def stepped(machine: Learner, now_s: float) -> list[Effect]:
            effects = machine.on_step(self._step_tokens, took_s, loss, now_s, samples_end=batch.end)
            self._tape.step(machine.local_step, clock, batch.ranges, loss)
            return effects

        self._decisions.apply(stepped)
        return following

    def _over(self) -> bool:
        self._signals.check()
        return self._decisions.over

    def _wait_until_ready(self) -> None:
        """Wait for what a step needs: at first model, data, a state and the compiler; in lockstep the due fragment."""
        machine, signals = self._decisions.machine, self._signals
        while not self._over() and not (machine.may_step() and signals.compiled.is_set()):
            signals.woken.clear()
            self._inbox.drain()
            if self._states.wanted is not None:
                self._adopt_state(self._states.wanted)
            elif not machine.may_step() or not signals.compiled.is_set():
                signals.woken.wait(IDLE_S)

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
