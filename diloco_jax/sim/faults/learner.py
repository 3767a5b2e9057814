"""The driver of a learner to which faults happen."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from diloco_jax.protocol.effects import AdoptState, Effect, EvaluateModel
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.messages import GlobalFragment, Score, SyncerMessage
from diloco_jax.sim.engine import NEVER_S, Action
from diloco_jax.sim.holdings import Holdings
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import Garbled, SimulatedLink
from diloco_jax.sim.node import LearnerProcess
from diloco_jax.sim.scenario import Scenario


@dataclass(slots=True, eq=False)
class MortalProcess(LearnerProcess):
    """A process that can stand still."""

    waking: bool = False  # its step thread is about to see its mail
    paused_s: float = 0.0  # when the pause ends
    held: list[SyncerMessage | Garbled] = field(default_factory=list)  # waits for the end of a pause


class MortalLearner(LearnerDriver):
    """A driver whose process can lose its connection, stand still, be asked to leave, and be slow to see its mail."""

    __slots__ = ()

    @property
    def _scenario(self) -> Scenario:
        return self._world.scenario

    def start(self) -> None:
        """Begin a new process, which ends when nobody answers it for too long."""
        super().start()
        if self._scenario.connect_timeout_s < NEVER_S:
            self._engine.at(self._engine.now_s + self._scenario.connect_timeout_s, self._give_up, self.node.process)

    def _new_process(self, machine: Learner, name: str, incarnation: int) -> MortalProcess:
        holdings = Holdings(name, incarnation, self._world.scenario, self._world.steps)
        return MortalProcess(self.node, name, incarnation, machine, Mailbox(machine), holdings)

    def _give_up(self, process: LearnerProcess) -> None:
        """End a process that nobody has answered since it started."""
        if not (process.ended or process.greeted):
            self._forget(process)
            self.start_later(self._engine.now_s)

    def reconnect(self, process: LearnerProcess) -> None:
        """Connect at once, unless a link stands."""
        if process.link is None:
            self.dial(process, 0.0)

    def disconnect(self, process: LearnerProcess, notice_s: float) -> None:
        """Break the link; the learner knows at once."""
        self._cut(process, notice_s)
        now_s = self._engine.now_s
        self._run(process, process.machine.on_disconnected(now_s), now_s)

    def on_syncer_gone(self, link: SimulatedLink) -> None:
        """Take it that the process at the other end is dead, as the transport has found out."""
        process: LearnerProcess = link.owner
        if process.link is not link or process.ended or self._postponed(process, self.on_syncer_gone, link):
            return
        self.disconnect(process, NEVER_S)
        self._redial(process)

    def leave(self, process: LearnerProcess, reason: str) -> None:
        """Say goodbye, as somebody asks this learner to do."""
        now_s = self._engine.now_s
        self._run(process, process.machine.leave(reason, now_s), now_s)
        self._end(process, for_good=True)

    def _postponed(self, process: LearnerProcess, action: Action, argument: object) -> bool:
        """Say if a process is paused; then an event comes again when the pause is over, unless it has ended."""
        assert isinstance(process, MortalProcess), "this driver makes no others"
        paused = process.paused_s > self._engine.now_s
        if paused and not process.ended:
            self._engine.at(process.paused_s, action, argument)
        return paused

    def _connect(self, process: LearnerProcess) -> None:
        if process.link is not None or not self._postponed(process, self._connect, process):
            super()._connect(process)

    def arrive(self, item: tuple[SimulatedLink, Any]) -> None:
        """Take a message that comes, or one whose payload is garbled."""
        link, message = item
        process: MortalProcess = link.owner
        now_s = self._engine.now_s
        if process.ended:
            return
        if process.paused_s > now_s:
            process.held.append(message)
        elif not isinstance(message, Garbled):
            super().arrive(item)
        else:
            fragment = message.message  # a part of a state will be asked for again
            if isinstance(fragment, GlobalFragment) and process.machine.wants(fragment, now_s):
                for observer in self._observers:
                    observer.on_read(process, fragment, False, now_s)
                process.machine.on_corrupt(now_s)
            self._see_mail(process, now_s)

    def _end_step(self, process: LearnerProcess) -> None:
        if not self._postponed(process, self._end_step, process):
            super()._end_step(process)

    def _tick(self, item: tuple[LearnerProcess, float]) -> None:
        process, tick_s = item
        assert isinstance(process, MortalProcess), "this driver makes no others"
        if process.ended or tick_s != process.tick_s or process.paused_s <= self._engine.now_s:
            super()._tick(item)
        else:
            self._plan_tick(process, process.paused_s)

    def _loaded(self, item: tuple[LearnerProcess, AdoptState]) -> None:
        if not self._postponed(item[0], self._loaded, item):
            super()._loaded(item)

    def _handle(self, process: LearnerProcess, effect: Effect) -> None:
        if isinstance(effect, EvaluateModel):
            assert not process.step.runs, f"{process.name} evaluates while a step runs"
            eval_s = self._scenario.eval_s * (0.5 + self._engine.random.random())
            self._engine.at(self._engine.now_s + eval_s, self._evaluated, process)
        else:
            super()._handle(process, effect)

    def _evaluated(self, process: LearnerProcess) -> None:
        if process.ended or self._postponed(process, self._evaluated, process):
            return
        now_s, scenario = self._engine.now_s, self._scenario
        loss = inf if self._engine.random.random() < scenario.bad_scores else 1.0
        found = Score("", 0, 0, 0, (), loss, 1.0, 1, (), scenario.eval_s, "")
        self._run(process, process.machine.on_evaluated(found, now_s), now_s)
        self._reach_gap(process, now_s)

    def resume(self, process: MortalProcess) -> None:
        """Take what came during the pause; the step in progress goes on by itself."""
        if process.paused_s > self._engine.now_s:
            return  # another pause lasts longer
        held, process.held = process.held, []
        for message in held:
            if process.link is not None:
                self.arrive((process.link, message))

    def _see_mail(self, process: LearnerProcess, now_s: float) -> None:
        """Take what waits when the thread that would step has seen it: it may compile, or copy to its devices."""
        wake_s = self._scenario.wake_s
        if not wake_s or process.step.runs or process.loading:
            return super()._see_mail(process, now_s)
        assert isinstance(process, MortalProcess), "this driver makes no others"
        if process.mailbox and not process.waking:
            process.waking = True
            self._engine.at(now_s + wake_s * self._engine.random.random(), self._wake, process)
        self._settle(process, now_s)

    def _wake(self, process: MortalProcess) -> None:
        if process.ended or self._postponed(process, self._wake, process):
            return
        process.waking = False
        if not process.step.runs:
            self._reach_gap(process, self._engine.now_s)
