"""The driver of a learner to which faults happen."""

from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import SimulatedLink
from diloco_jax.sim.node import LearnerProcess
from faulty.scenario import FaultyScenario


class MortalLearner(LearnerDriver):
    """A driver whose process can lose its connection, stand still, be asked to leave, and be slow to see its mail."""

    __slots__ = ()

    @property
    def _scenario(self) -> FaultyScenario:
        scenario = self._world.scenario
        assert isinstance(scenario, FaultyScenario), "faults have settings of their own"
        return scenario

    def start(self) -> None:
        """Begin a new process, which ends when nobody answers it for too long."""
        super().start()
        if self._scenario.connect_timeout_s < NEVER_S:
            self._engine.at(self._engine.now_s + self._scenario.connect_timeout_s, self._give_up, self.node.process)

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
        if process.link is not link:
            return
        if process.ended or process.paused_s > self._engine.now_s:
            return self._postpone(process, self.on_syncer_gone, link)
        self.disconnect(process, NEVER_S)
        self._redial(process)

    def leave(self, process: LearnerProcess, reason: str) -> None:
        """Say goodbye, as somebody asks this learner to do."""
        now_s = self._engine.now_s
        self._run(process, process.machine.leave(reason, now_s), now_s)
        self._end(process, for_good=True)

    def resume(self, process: LearnerProcess) -> None:
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
        if not wake_s:
            return self._reach_gap(process, now_s)
        if process.mailbox and not process.waking:
            process.waking = True
            self._engine.at(now_s + wake_s * self._engine.random.random(), self._wake, process)
        self._settle(process, now_s)

    def _wake(self, process: LearnerProcess) -> None:
        if process.ended or process.paused_s > self._engine.now_s:
            return self._postpone(process, self._wake, process)
        process.waking = False
        if not process.step.runs:
            self._reach_gap(process, self._engine.now_s)
