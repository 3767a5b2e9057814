"""The driver of a learner's machine, over all processes of that learner: the counterpart of runtime/learner/run.py.

A mailbox decides which messages the machine gets at once, as from a link's thread, and which ones wait for the gap
between two steps. The next batch may be drawn while a step runs.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from diloco_jax.protocol.bans import BANNED
from diloco_jax.protocol.corpora import OwnCorpus
from diloco_jax.protocol.effects import AdoptState, Drop, Effect, EvaluateModel, Finish, SaveState, Send, Stage, Unstage
from diloco_jax.protocol.learner.machine import STOPPED
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.messages import (
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    Message,
    PullRequest,
    Score,
    StateChunk,
    SyncerMessage,
)
from diloco_jax.sim.engine import NEVER_S, Action
from diloco_jax.sim.holdings import HELD, Holdings
from diloco_jax.sim.network import Deliver, Garbled, SimulatedLink
from diloco_jax.sim.node import FINGERPRINT, LearnerProcess, MakeLearner, Node, SavedCopy, World

# Time from dialling until the connection is ready.
DIAL_S = 0.01
# Time until a process that was refused or expelled is started again.
SUPERVISOR_S = 1.0
SAVED_KEPT = 2
# Time until another slice leads after the leading one was lost.
ELECTED_S = 0.8
# A leading slice may be lost before the others have made its last step.
STEPS_IN_MEMORY = 2
# Digest in the description of a state in memory of a fragment that was adopted after the step; no value has it.
CHANGED = -1
# Samples in one epoch of a corpus.
CORPUS_SAMPLES = 100
# The machine leaves it to the driver to fill in the payload of these.
FILLED = frozenset((StateChunk, AnchorValue))
# The simulator copies no arrays, so these need no action.
IGNORED = frozenset((Stage, Unstage, Drop))


class LearnerDriver:
    """The driver of one learner, whose lasting state is in its node.

    Args:
        world: time, network and observers.
        node: the learner.
        accept: connects a process to the syncer; returns None if nothing listens there.
        left: is called when the learner has ended for good.
        make: builds the machine.
    """

    __slots__ = ("_accept", "_engine", "_left", "_make", "_observers", "_send", "_wake_s", "_world", "node")

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
        self._wake_s = world.scenario.wake_s

    def start(self, kept: SavedCopy | None = None) -> None:
        """Start a new process, which is a new incarnation, and let it dial; `kept` is a state in memory."""
        node, scenario = self.node, self._world.scenario
        assert node.process is None, f"{node.name} runs already"
        node.incarnation += 1
        node.kept, node.memory = kept, []
        who = (node.name, node.incarnation)
        saved = node.own.described if node.own is not None else None
        sizes = dict.fromkeys(range(scenario.config.num_fragments), scenario.payload_bytes)
        corpus = OwnCorpus(node.corpus, f"the text of {node.corpus}" if node.corpus else "", CORPUS_SAMPLES, "words")
        described = {"step_samples": node.step_samples, "saved": saved, "payload_bytes": sizes, "corpus": corpus}
        machine = self._make(*who, scenario.config, FINGERPRINT, **described)
        holdings = Holdings(*who, scenario, self._world.steps)
        node.process = process = LearnerProcess(node, *who, machine, Mailbox(machine), holdings)
        self.dial(process, DIAL_S)
        if scenario.connect_timeout_s < NEVER_S:
            self._engine.at(self._engine.now_s + scenario.connect_timeout_s, self._give_up, process)

    def _give_up(self, process: LearnerProcess) -> None:
        """End a process that has had no connection since it started."""
        if not (process.ended or process.greeted):
            self._forget(process)
            self.start_later(self._engine.now_s)

    def start_later(self, at_s: float) -> None:
        """Let the supervisor start a new process, at this time at the earliest, unless another one starts before."""
        self._engine.at(at_s + self._world.scenario.restart_s, self._start_again, self.node.generation)

    def _start_again(self, generation: tuple[int, bool]) -> None:
        if self.node.generation == generation:
            self.start()

    def lose_slices(self, process: LearnerProcess, count: int, *, leads: bool, notice_s: float) -> int:
        """Take slices from an island, at most all but one; return how many. With `leads`, another slice leads then."""
        node, engine = self.node, self._engine
        lost = min(count, node.slices - node.missing - 1)
        node.missing += lost
        if leads and lost:
            kept = self._in_memory(process)
            self.kill(process, notice_s)
            engine.at(engine.now_s + ELECTED_S, self._elected, (node.generation, kept))
        return lost

    def _in_memory(self, process: LearnerProcess) -> SavedCopy | None:
        """Return the state of the slice that leads next: after the last step of its leader, or after the one before."""
        memory, held = self.node.memory, process.holdings.anchors
        if not memory:
            return self.node.kept
        copy = self._engine.random.choice(memory)
        if copy is not memory[-1]:
            return copy
        digests = copy.described.digests
        now = tuple(d if held[p] == copy.anchors[p] else CHANGED for p, d in enumerate(digests))
        return copy._replace(described=copy.described._replace(digests=now))

    def _elected(self, item: tuple[tuple[int, bool], SavedCopy | None]) -> None:
        generation, kept = item
        if self.node.generation == generation:
            self.start(kept)

    def kill(self, process: LearnerProcess, notice_s: float) -> None:
        """End the process now; the syncer's transport notices it `notice_s` later."""
        self._cut(process, notice_s)
        self._forget(process)

    def _forget(self, process: LearnerProcess) -> None:
        process.ended = True
        self.node.process = None

    def leave(self, process: LearnerProcess, reason: str) -> None:
        """Let the learner say goodbye, as its operator asks it to, and end the process for good."""
        now_s = self._engine.now_s
        self._run(process, process.machine.leave(reason, now_s), now_s)
        self._end(process, for_good=True)

    def pause(self, process: LearnerProcess, until_s: float) -> None:
        """Stop the process without breaking its connection; `resume` must follow then."""
        process.paused_s = max(process.paused_s, until_s)

    def resume(self, process: LearnerProcess) -> None:
        """Deliver the messages that came during a pause; a step in progress continues by itself."""
        # Another pause may last longer.
        if process.paused_s > self._engine.now_s:
            return
        held, process.held = process.held, []
        for message in held:
            if process.link is not None:
                self.arrive((process.link, message))

    def _postponed(self, process: LearnerProcess, action: Action, argument: object) -> bool:
        """Return whether a running process is paused; if so, the event comes again when the pause is over."""
        paused = process.paused_s > self._engine.now_s
        if paused:
            self._engine.at(process.paused_s, action, argument)
        return paused

    def dial(self, process: LearnerProcess, after_s: float) -> None:
        """Connect after some time."""
        self._engine.at(self._engine.now_s + after_s, self._connect, process)

    def _redial(self, process: LearnerProcess) -> None:
        pauses_s = self._world.scenario.redials_s
        process.attempts += 1
        self.dial(process, pauses_s[min(process.attempts, len(pauses_s)) - 1])

    def reconnect(self, process: LearnerProcess) -> None:
        """Connect at once, unless the process is connected."""
        if process.link is None:
            self.dial(process, 0.0)

    def disconnect(self, process: LearnerProcess, notice_s: float) -> None:
        """Break the link; the learner knows at once, the syncer's transport `notice_s` later."""
        self._cut(process, notice_s)
        now_s, machine = self._engine.now_s, process.machine
        waits = machine.wait.holds
        self._run(process, machine.on_disconnected(now_s), now_s)
        if waits:
            self._engine.at(now_s, self._wake, process)

    def on_syncer_gone(self, link: SimulatedLink) -> None:
        """Notice that the syncer's process at the other end of this link has ended."""
        process: LearnerProcess = link.owner
        if process.link is not link or process.ended or self._postponed(process, self.on_syncer_gone, link):
            return
        self.disconnect(process, NEVER_S)
        self._redial(process)

    def _connect(self, process: LearnerProcess) -> None:
        if process.ended or process.link is not None or self._postponed(process, self._connect, process):
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

    def _end(self, process: LearnerProcess, *, for_good: bool, starts_again: bool = False) -> None:
        """End a process whose machine has finished; its link closes when everything is sent."""
        link, process.link, process.linked_s = process.link, None, NEVER_S
        if link is not None and link.lost is not None:
            self._engine.at(self._engine.now_s + 2 * self._world.scenario.network.delay_s, link.lost, link)
        self._forget(process)
        if for_good:
            self.node.gone = True
        if not starts_again:
            self._left()
        else:
            self.start_later(self._engine.now_s + SUPERVISOR_S)

    def arrive(self, item: tuple[SimulatedLink, Any]) -> None:
        """Take a message that arrives; its payload may be garbled."""
        link, message = item
        process: LearnerProcess = link.owner
        if process.ended:
            return
        now_s, stepping = self._engine.now_s, process.step.runs
        if process.paused_s > now_s:
            process.held.append(message)
            return
        kind = type(message)
        if kind is GlobalFragment:
            # A fragment that waits for the gap changes no deadline, unless a pause has delayed a tick.
            if self._read(process, message, now_s) and stepping and process.tick_s > now_s:
                return
        elif kind is Garbled:
            self._read_garbled(process, message.message, now_s)
        else:
            given = process.mailbox.arrive(message, None, now_s)
            if given is not None:
                self._run(process, given.effects, now_s, given.message)
            # No deadline has changed.
            if stepping and (given is None or type(message) is PullRequest):
                return
        self._see_mail(process, now_s)

    def _read(self, process: LearnerProcess, message: GlobalFragment, now_s: float) -> bool:
        """Decode a global fragment on arrival, as a real learner's link thread does; return whether it was useful."""
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

    def _read_garbled(self, process: LearnerProcess, message: Message, now_s: float) -> None:
        """Reject a garbled payload, as a real learner's link thread does."""
        if isinstance(message, StateChunk):
            self._run(process, process.machine.on_part_damaged(message, now_s), now_s)
        elif isinstance(message, GlobalFragment) and process.machine.wants(message, now_s):
            for observer in self._observers:
                observer.on_read(process, message, False, now_s)
            process.machine.on_corrupt(now_s)

    def _see_mail(self, process: LearnerProcess, now_s: float) -> None:
        """Take waiting messages, unless a step runs or the process waits for its hardware."""
        if process.step.runs or process.loading:
            self._settle(process, now_s)
        elif self._wake_s:
            self._wake_later(process, now_s)
        else:
            self._reach_gap(process, now_s)

    def _wake_later(self, process: LearnerProcess, now_s: float) -> None:
        """Take waiting messages a little later, because the step thread may compile or copy to its devices."""
        if process.mailbox and not process.waking:
            process.waking = True
            self._engine.at(now_s + self._wake_s * self._engine.random.random(), self._wake, process)
        self._settle(process, now_s)

    def _wake(self, process: LearnerProcess) -> None:
        if process.ended or self._postponed(process, self._wake, process):
            return
        process.waking = False
        if not process.step.runs:
            self._reach_gap(process, self._engine.now_s)

    def _reach_gap(self, process: LearnerProcess, now_s: float) -> None:
        """Give the machine the waiting messages between two steps, and continue."""
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
        machine.allotment.resize(node.next_samples)
        step.batch = step.ahead or machine.take_batch()
        step.ahead = machine.take_batch() if self._world.scenario.reads_ahead else None
        parts = node.parts_each(step.samples)
        engine.at(now_s + node.pace.takes_s() * node.factor * parts, self._end_step, process)
        for observer in self._observers:
            observer.on_step(process, True, now_s)

    def _ready(self, process: LearnerProcess) -> None:
        """Take the messages that came while the hardware was not ready, and step."""
        if not process.ended:
            process.loading = False
            self._reach_gap(process, self._engine.now_s)

    def _end_step(self, process: LearnerProcess) -> None:
        if process.ended or self._postponed(process, self._end_step, process):
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
        tokens, machine = scenario.sample_tokens * step.samples, process.machine
        effects = machine.on_step(tokens, now_s - step.began_s, 1.0, now_s, samples_end=step.batch.end)
        self._run(process, effects, now_s)
        if node.slices > 1:
            described = Saved(machine.global_step, tuple(machine.digests))
            copy = SavedCopy(described, process.incarnation, machine.local_step, dict(process.holdings.anchors))
            node.memory = [*node.memory, copy][-STEPS_IN_MEMORY:]
        self._reach_gap(process, now_s)

    def _tick(self, item: tuple[LearnerProcess, float]) -> None:
        process, tick_s = item
        if process.ended or tick_s != process.tick_s:
            return
        now_s, machine = self._engine.now_s, process.machine
        if process.paused_s > now_s:
            self._plan_tick(process, process.paused_s)
            return
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
        """Start a step if none runs, plan the next tick, and end a process whose machine has finished."""
        machine = process.machine
        if machine.state == STOPPED:
            if not process.step.runs:
                # As with an older release, the process of a learner that was expelled by a ban is started once more.
                # A refused one stays away until its operator starts it again.
                banned = process.finished.startswith("refused") and BANNED in process.finished
                again = process.finished.startswith(("refused", "expelled"))
                self._end(process, for_good=not again, starts_again=again and not banned)
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
        """Execute the machine's effects; `message` is its input, None if the input was not a message."""
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
            assert not (process.step.runs or process.loading), f"{process.name} loads a state while it is busy"
            engine.at(engine.now_s + scenario.load_s, self._loaded, (process, effect))
        elif isinstance(effect, SaveState):
            machine = process.machine
            described = Saved(effect.global_step, tuple(machine.digests))
            copy = SavedCopy(described, process.incarnation, machine.local_step, dict(process.holdings.anchors))
            engine.at(engine.now_s + scenario.save_s * engine.random.random(), self._saved, (process, copy))
        elif isinstance(effect, EvaluateModel):
            assert not process.step.runs, f"{process.name} evaluates while a step runs"
            eval_s = scenario.eval_s * (0.5 + engine.random.random())
            engine.at(engine.now_s + eval_s, self._evaluated, process)
        elif isinstance(effect, Finish):
            process.finished = effect.reason

    def _loaded(self, item: tuple[LearnerProcess, AdoptState]) -> None:
        process, effect = item
        if process.ended or self._postponed(process, self._loaded, item):
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
        # If the process ended before, the file is incomplete and unusable.
        if not process.ended:
            self.node.saved = [*self.node.saved, copy][-SAVED_KEPT:]

    def _evaluated(self, process: LearnerProcess) -> None:
        if process.ended or self._postponed(process, self._evaluated, process):
            return
        now_s, scenario = self._engine.now_s, self._world.scenario
        loss = inf if self._engine.random.random() < scenario.bad_scores else 1.0
        found = Score("", 0, 0, 0, (), loss, 1.0, 1, (), scenario.eval_s, "")
        self._run(process, process.machine.on_evaluated(found, now_s), now_s)
        self._reach_gap(process, now_s)
