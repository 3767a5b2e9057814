"""The driver of a learner's machine, over all lives of its process: as runtime/learner/run.py.

A mailbox says what is given to the machine at once, as by a link's thread, and what in the gap between two steps. The
next batch may be drawn while a step runs. `faults/` has a driver to which faults happen.
"""

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol.effects import AdoptState, Drop, Effect, Finish, SaveState, Send, Stage, Unstage
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.messages import (
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    Message,
    PullRequest,
    StatePart,
    SyncerMessage,
)
from diloco_jax.protocol.recovery import Saved
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.holdings import HELD, Holdings
from diloco_jax.sim.network import Deliver, SimulatedLink
from diloco_jax.sim.node import FINGERPRINT, LearnerProcess, MakeLearner, Node, SavedCopy, World

DIAL_S = 0.01  # from dialling to a link that stands
SUPERVISOR_S = 1.0  # until a process that was refused or expelled is started again
SAVED_KEPT = 2
FILLED = frozenset((StatePart, AnchorValue))  # what the machine leaves for the driver to fill
IGNORED = frozenset((Stage, Unstage, Drop))  # there is nothing to copy


class LearnerDriver:
    """The driver of one learner, whose state is the node's; `accept` dials the syncer, `left` hears of its end."""

    __slots__ = ("_accept", "_engine", "_left", "_make", "_observers", "_send", "_world", "node")

    def __init__(
        self,
        world: World,
        node: Node,
        accept: Callable[[LearnerProcess, Deliver], SimulatedLink | None],
        left: Callable[[], None],
        make: MakeLearner,
    ) -> None:
        self.node = node
        self._world = world
        self._accept = accept
        self._left = left
        self._make = make
        self._engine = world.engine
        self._observers = world.observers
        self._send = world.network.send

    def start(self) -> None:
        """Begin a new process, that is a new incarnation, which dials."""
        node, scenario = self.node, self._world.scenario
        assert node.process is None, f"{node.name} runs already"
        node.incarnation += 1
        who = (node.name, node.incarnation)
        saved = node.saved[-1].described if node.saved else None
        sizes = dict.fromkeys(range(scenario.config.num_fragments), scenario.payload_bytes)
        told = {"step_samples": node.step_samples, "saved": saved, "payload_bytes": sizes}
        machine = self._make(*who, scenario.config, FINGERPRINT, **told)
        node.process = process = self._new_process(machine, *who)
        self.dial(process, DIAL_S)

    def _new_process(self, machine: Learner, name: str, incarnation: int) -> LearnerProcess:
        holdings = Holdings(name, incarnation, self._world.scenario, self._world.steps)
        return LearnerProcess(self.node, name, incarnation, machine, Mailbox(machine), holdings)

    def start_later(self, at_s: float) -> None:
        """Let the supervisor begin a new process, at this time at the earliest, unless somebody else does."""
        self._engine.at(at_s + self._world.scenario.restart_s, self._start_again, self.node.life)

    def _start_again(self, life: tuple[int, bool]) -> None:
        if self.node.life == life:
            self.start()

    def kill(self, process: LearnerProcess, notice_s: float) -> None:
        """End the process now; the syncer's transport finds out so much later."""
        self._cut(process, notice_s)
        self._forget(process)

    def _forget(self, process: LearnerProcess) -> None:
        process.ended = True
        self.node.process = None

    def dial(self, process: LearnerProcess, after_s: float) -> None:
        """Connect, after some time."""
        self._engine.at(self._engine.now_s + after_s, self._connect, process)

    def _redial(self, process: LearnerProcess) -> None:
        pauses_s = self._world.scenario.redials_s
        process.attempts += 1
        self.dial(process, pauses_s[min(process.attempts, len(pauses_s)) - 1])

    def _connect(self, process: LearnerProcess) -> None:
        if process.ended or process.link is not None:
            return
        now_s = self._engine.now_s
        process.link = self._accept(process, self.arrive)
        if process.link is None:
            self._redial(process)
            return
        process.linked_s, process.attempts, process.greeted = now_s, 0, True
        self._run(process, process.machine.on_connected(now_s), now_s)
        self._settle(process, now_s)

    def _cut(self, process: LearnerProcess, notice_s: float) -> None:
        link, process.link, process.linked_s = process.link, None, NEVER_S
        if link is not None:
            link.alive = False
            if notice_s < NEVER_S and link.lost is not None:
                self._engine.at(self._engine.now_s + notice_s, link.lost, link)

    def _end(self, process: LearnerProcess, *, for_good: bool) -> None:
        """Close the link of a process whose machine has finished when everything is sent, and end it."""
        link, process.link, process.linked_s = process.link, None, NEVER_S
        if link is not None and link.lost is not None:
            self._engine.at(self._engine.now_s + 2 * self._world.scenario.network.delay_s, link.lost, link)
        self._forget(process)
        if for_good:
            self.node.gone = True
            self._left()
        else:
            self.start_later(self._engine.now_s + SUPERVISOR_S)

    def arrive(self, item: tuple[SimulatedLink, Any]) -> None:
        """Take a message that comes."""
        link, message = item
        process: LearnerProcess = link.owner
        if process.ended:
            return
        now_s, stepping = self._engine.now_s, process.step.runs
        if type(message) is GlobalFragment:
            if self._read(process, message, now_s) and stepping and process.tick_s > now_s:
                return  # it waits for the gap; no deadline has changed, and no pause held up a tick
        else:
            given = process.mailbox.arrive(message, None, now_s)
            if given is not None:
                self._run(process, given.effects, now_s, given.message)
            if stepping and (given is None or type(message) is PullRequest):
                return  # no deadline has changed
        self._see_mail(process, now_s)

    def _read(self, process: LearnerProcess, message: GlobalFragment, now_s: float) -> bool:
        """Read a global fragment as it comes, as the link thread of a real learner; returns whether it was of use."""
        if not process.machine.wants(message, now_s):
            return False
        ok = process.holdings.read(message)
        for observer in self._observers:
            observer.on_read(process, message, ok, now_s)
        if ok:
            process.mailbox.read(message, None, now_s)
        else:
            process.machine.on_corrupt(now_s)
        return ok

    def _see_mail(self, process: LearnerProcess, now_s: float) -> None:
        """Take what waits, unless a step runs, or will when the hardware is ready."""
        if process.step.runs or process.loading:
            self._settle(process, now_s)
        else:
            self._reach_gap(process, now_s)

    def _reach_gap(self, process: LearnerProcess, now_s: float) -> None:
        """Give the machine what waits, between two steps, and go on."""
        take = process.mailbox.take
        while not process.loading and (given := take(now_s)) is not None:
            self._run(process, given.effects, now_s, given.message)
        self._settle(process, now_s)

    def _begin_step(self, process: LearnerProcess, now_s: float) -> None:
        node, machine, engine, step = self.node, process.machine, self._engine, process.step
        begins_s = node.pace.begins_s(now_s)
        if begins_s > now_s:
            process.loading = True
            engine.at(begins_s, self._ready, process)
            return
        step.runs = True
        step.began_s = now_s
        step.clock = machine.schedule_step
        step.batch = step.ahead or machine.take_batch()
        step.ahead = machine.take_batch() if self._world.scenario.reads_ahead else None
        engine.at(now_s + node.pace.takes_s() * node.factor, self._end_step, process)
        for observer in self._observers:
            observer.on_step(process, True, now_s)

    def _ready(self, process: LearnerProcess) -> None:
        """Take what came while the hardware was not ready, and step."""
        if not process.ended:
            process.loading = False
            self._reach_gap(process, self._engine.now_s)

    def _end_step(self, process: LearnerProcess) -> None:
        if process.ended:
            return
        now_s, node, step = self._engine.now_s, self.node, process.step
        step.runs = False
        node.pace.ended(step.began_s, now_s)
        scenario = self._world.scenario
        if node.pace.lost:
            self.kill(process, 2 * scenario.network.delay_s)
            self.start_later(node.pace.begins_s(now_s))
            return
        for observer in self._observers:
            observer.on_step(process, False, now_s)
        tokens = scenario.sample_tokens * node.step_samples
        effects = process.machine.on_step(tokens, now_s - step.began_s, 1.0, now_s, samples_end=step.batch.end)
        self._run(process, effects, now_s)
        self._reach_gap(process, now_s)

    def _tick(self, item: tuple[LearnerProcess, float]) -> None:
        process, tick_s = item
        if process.ended or tick_s != process.tick_s:
            return
        now_s, machine = self._engine.now_s, process.machine
        process.tick_s = NEVER_S
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            self._run(process, machine.on_tick(now_s), now_s)
            deadline_s = machine.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, f"the driver of {process.name} would spin"
        self._settle(process, now_s)

    def _plan_tick(self, process: LearnerProcess, tick_s: float) -> None:
        process.tick_s = tick_s
        self._engine.at(tick_s, self._tick, (process, tick_s))

    def _settle(self, process: LearnerProcess, now_s: float) -> None:
        """Begin a step if none runs, plan the next tick, see off a learner that has finished: between two inputs."""
        machine = process.machine
        if machine.state == STOPPED:
            if not process.step.runs:
                self._end(process, for_good=not process.finished.startswith(("refused", "expelled")))
            return
        if not (process.step.runs or process.loading) and machine.may_step():
            self._begin_step(process, now_s)
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s < process.tick_s:
            self._plan_tick(process, max(deadline_s, now_s))
        for observer in self._observers:
            observer.on_settled(process, now_s)

    def _run(
        self, process: LearnerProcess, effects: list[Effect], now_s: float, message: SyncerMessage | None = None
    ) -> None:
        """Do what the machine asks for; `message` is what it was given, if it was one."""
        link = process.link
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                if link is not None:
                    sent: Message | None = effect.message  # type: ignore[union-attr]
                    if type(sent) in FILLED:
                        sent = process.holdings.fill(sent)  # type: ignore[arg-type]
                    elif self.node.poisoned and type(sent) is FragmentValue:
                        self._world.useless.add((process.name, sent.global_step))
                    if sent is not None:
                        self._send(link.up, sent)
            elif kind in HELD:
                process.holdings.execute(effect, message)
            elif kind not in IGNORED:
                self._handle(process, effect)
        for observer in self._observers:
            observer.on_learner(process, message, effects, now_s)

    def _handle(self, process: LearnerProcess, effect: Effect) -> None:
        engine, scenario = self._engine, self._world.scenario
        if isinstance(effect, AdoptState):
            assert not (process.step.runs or process.loading), f"{process.name} takes over a state while it is busy"
            engine.at(engine.now_s + scenario.load_s, self._loaded, (process, effect))
        elif isinstance(effect, SaveState):
            machine = process.machine
            described = Saved(effect.global_step, tuple(machine.digests))
            copy = SavedCopy(described, process.incarnation, machine.local_step, dict(process.holdings.anchors))
            engine.at(engine.now_s + scenario.save_s * engine.random.random(), self._saved, (process, copy))
        elif isinstance(effect, Finish):
            process.finished = effect.reason

    def _loaded(self, item: tuple[LearnerProcess, AdoptState]) -> None:
        process, effect = item
        if process.ended:
            return
        now_s = self._engine.now_s
        ok = self._engine.random.random() >= self._world.scenario.bad_states
        for observer in self._observers:
            observer.on_state(process, effect, ok, now_s)
        process.holdings.kept = {}
        self._run(process, process.machine.on_state_adopted(ok, now_s), now_s)
        self._reach_gap(process, now_s)

    def _saved(self, item: tuple[LearnerProcess, SavedCopy]) -> None:
        process, copy = item
        if not process.ended:  # else it is half-written, and nobody takes it for one
            self.node.saved = [*self.node.saved, copy][-SAVED_KEPT:]
