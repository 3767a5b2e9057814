"""The driver of the learner machine: inner steps on the island, and its part in the run.

Threads
  * the caller's ("steps"): the only one to touch the island. Steps, and between two steps adopts what came.
  * "link": receives, checks and decodes what came, gives the machine (under its lock) at once what its mailbox says,
    reconnects (inbox.py).
  * "payload": waits for staged copies, encodes and sends them (island/payloads.py).
  * "compile": compiles what the island runs while the model and, after a restart, a healthy learner's state arrive.
  * "save": reads and writes this learner's own states on disk (island/whole_state.py).

Nothing that the network or the disk does makes a step wait, outside lockstep (docs/protocol.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from diloco_jax.core import codec
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.join import Hosts, make_dialler
from diloco_jax.runtime.island.leader import LeadingHost
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.whole_state import SavedStates
from diloco_jax.runtime.learner.decisions import Signals
from diloco_jax.runtime.learner.joined import Joined
from diloco_jax.runtime.learner.metrics import metrics_of
from diloco_jax.runtime.learner.states import States
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.settings.run import RunConfig, fingerprint
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.transport.link import check_name

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
        make_host: makes the island of one process.
        make_sender: makes the thread that sends payloads, of the host and of a function that takes its errors.

    Attributes:
        host: trains; has the island, and how its model is cut.
        joined: its part in the run.
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
        make_host: Callable[[RunConfig, str, Sequence[jax.Device] | None], Host] = Host,
        make_sender: Callable[[Host, Callable[[Exception], None]], PayloadSender] = lambda _, fail: PayloadSender(fail),
    ) -> None:
        self._address = address
        self._signals = signals = Signals(stop)
        self._rate = learning_rate(config.optimizer, config.train.steps)
        disk = SavedStates(run_dir, check_name(learner_id), 1 if hosts is None else hosts.count)
        finding = disk.find()  # while the island is built
        self.host = host = (
            make_host(config, learner_id, devices) if hosts is None else LeadingHost(config, learner_id, hosts, stop)
        )
        saved = finding.result()
        self._machine = Learner(
            learner_id,
            incarnation,
            config.protocol,
            fingerprint(config, host.plan.fingerprint, host.corpus),
            step_samples=host.batch_shape[0],
            saved=None if saved is None else saved.described,
            adopt_mode=config.adopt.mode,
            payload_bytes={p.fragment_id: codec.encoded_size(p.shapes, config.wire.up) for p in host.fragments},
        )
        tape = LearnerTape(run_dir, learner_id, incarnation, host.batch_shape[0])
        states = States(self._machine, host, tape, disk, saved)
        dialler = make_dialler(config, host.plan, learner_id, incarnation, address, hosts)
        payloads = make_sender(host, signals.fail)
        metrics = metrics_of(config, learner_id, host.island)
        self.joined = Joined(config, self._machine, host, dialler, tape, states, payloads, signals, metrics)

    def run(self) -> str:
        """Train until the syncer says stop, or until stopped; returns the reason.

        Raises:
            TransportError: the syncer cannot be reached at the start.
            ValueError: the syncer refused this learner.
            ConnectionError: it expelled this incarnation; a new one may join.
        """
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        try:
            self.joined.connect()
            if self.joined.ready():
                self._train()
        finally:
            self.joined.leave()
        finished = self.joined.finished
        kind, _, reason = finished.partition(": ")
        if kind == "refused" and not self._machine.epoch:
            raise ValueError(f"the syncer at {self._address} refused this learner: {reason}")
        if kind in ("refused", "expelled"):
            raise ConnectionAbortedError(f"the syncer at {self._address} {kind} this incarnation: {reason}")
        return finished

    def _train(self) -> None:
        """Make inner steps until the learner ends; what one reads is put on the devices while the one before runs."""
        host, joined = self.host, self.joined
        log.info(f"the first step begins at global step {self._machine.global_step}")
        batch, going = joined.take_batch(), True
        host.put_batch(batch.ranges)
        while going:
            began_s, clock = time.monotonic(), self._machine.global_step
            rate = self._rate(clock)
            handle = host.step(rate)
            following = joined.take_batch()
            host.put_batch(following.ranges)
            metrics = {**host.wait(handle), "learning_rate": rate}
            going = joined.stepped(batch, clock, metrics, time.monotonic() - began_s)
            batch = following

    def _compile(self) -> None:
        """Run as the body of the thread "compile"."""
        began_s = time.monotonic()
        try:
            self.host.warm_up()
            log.info(f"compiled the inner step, staging and adoption in {time.monotonic() - began_s:.1f} s")
        except Exception as error:
            self._signals.fail(error)
        finally:
            self._signals.compiled.set()
            self._signals.woken.set()
