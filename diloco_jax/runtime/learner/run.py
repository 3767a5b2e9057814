"""The driver of the learner machine: inner steps on the island, messages over the link.

Threads
  * the caller's ("steps"): the only one to touch the island. Steps, reports, and between two steps adopts what came
    (steps.py).
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
from diloco_jax.runtime.island.arrivals import GlobalValues
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.join import FAILED, STOPPED, Hosts, make_dialler
from diloco_jax.runtime.island.leader import LeadingHost
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.whole_state import SavedStates
from diloco_jax.runtime.learner.decisions import Decisions, Signals
from diloco_jax.runtime.learner.effects import Effects, LearnerOutbox
from diloco_jax.runtime.learner.inbox import LearnerInbox, LinkKeeper
from diloco_jax.runtime.learner.states import States
from diloco_jax.runtime.learner.steps import Steps
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.settings.run import RunConfig, fingerprint
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
        inbox: takes what the syncer says.
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
        self._disk = SavedStates(run_dir, check_name(learner_id), 1 if hosts is None else hosts.count)
        finding = self._disk.find()  # while the island is built
        self.host = host = (
            make_host(config, learner_id, devices) if hosts is None else LeadingHost(config, learner_id, hosts, stop)
        )
        saved = finding.result()
        machine = Learner(
            learner_id,
            incarnation,
            config.protocol,
            fingerprint(config, host.plan.fingerprint, host.corpus),
            step_samples=host.batch_shape[0],
            saved=None if saved is None else saved.described,
            adopt_mode=config.adopt.mode,
            payload_bytes={p.fragment_id: codec.encoded_size(p.shapes, config.wire.up) for p in host.fragments},
        )
        self._tape = LearnerTape(run_dir, learner_id, incarnation, host.batch_shape[0])
        self._payloads = make_sender(host, signals.fail)
        self._outbox = LearnerOutbox(host, self._tape, self._payloads)
        states = States(machine, host, self._tape, self._disk, saved)
        self._decisions = decisions = Decisions(machine, Effects(host, self._tape, self._outbox, states), signals)
        self.inbox = LearnerInbox(host, decisions, GlobalValues(host.fragments, config.wire.down), signals)
        dialler = make_dialler(config, host.plan, learner_id, incarnation, address, hosts)
        self._link = LinkKeeper(host, decisions, self.inbox, self._outbox, dialler, signals)
        self._steps = Steps(config, host, decisions, self.inbox, states, self._tape, signals)

    def run(self) -> str:
        """Train until the syncer says stop, or until stopped; returns the reason.

        Raises:
            TransportError: the syncer cannot be reached at the start.
            ValueError: the syncer refused this learner.
            ConnectionError: it expelled this incarnation; a new one may join.
        """
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        try:
            self._link.connect()
            threading.Thread(target=self._link.run, name="link", daemon=True).start()
            self._steps.run()
        finally:
            self._conclude()
        finished = self._decisions.finished
        kind, _, reason = finished.partition(": ")
        if kind == "refused" and not self._decisions.machine.epoch:
            raise ValueError(f"the syncer at {self._address} refused this learner: {reason}")
        if kind in ("refused", "expelled"):
            raise ConnectionAbortedError(f"the syncer at {self._address} {kind} this incarnation: {reason}")
        return finished

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

    def _conclude(self) -> None:
        stopped = self._signals.stop.is_set()
        if stopped and not self._decisions.finished:
            self._decisions.apply(lambda machine, now_s: machine.leave("stopped from outside", now_s))
        finished = self._decisions.finished
        self._payloads.close()
        if self._outbox.link is not None:
            self._outbox.link.close(2.0)
        self._disk.close(wait=True)
        self._decisions.ask(lambda machine: self._tape.end(finished or "failed", machine.digests))
        failed = finished.partition(":")[0] in ("", "refused", "expelled")
        self.host.end(STOPPED if stopped else FAILED if failed else 0)
