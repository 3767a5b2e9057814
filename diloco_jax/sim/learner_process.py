"""The driver of a learner's machine, over all lives of its process: as runtime/run_learner.py.

Pulls, and requests for anchors and states, are answered at once, and global fragments read, as a link's thread does;
every other message waits for the end of the step, and while a whole state is taken over, and so does what was read, the
newest of each fragment only. The next batch may be drawn while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol.effects import (
    AdoptState,
    Effect,
    Send,
)
from diloco_jax.protocol.learner import STOPPED
from diloco_jax.protocol.messages import (
    AnchorRequest,
    AnchorValue,
    FragmentValue,
    GlobalFragment,
    Message,
    PullRequest,
    StatePart,
    StatePull,
    SyncerMessage,
)
from diloco_jax.sim.faults import NEVER_S
from diloco_jax.sim.holder import HANDLED, Holder
from diloco_jax.sim.network import Garbled, Link
from diloco_jax.sim.pace import Pace
from diloco_jax.sim.reader import Reader
from diloco_jax.sim.world import FINGERPRINT, MakeLearner, World

DIAL_S = 0.01  # from dialling to a link that stands
SUPERVISOR_S = 1.0  # until a process that was refused or expelled is started again
FILLED = frozenset((StatePart, AnchorValue, FragmentValue))  # what the machine leaves for the driver to fill
URGENT = frozenset((AnchorRequest, StatePull, Garbled))


class LearnerProcess(Holder):
    """See above.

    Args:
        name: of the learner.
        world: where it runs.
        accept: dials the syncer; None when nobody listens.
        ended: called when the learner has left for good.
        make: builds the machine.
        pace: of its steps.
        step_samples: samples in one of them.
    """

    __slots__ = ("_accept", "_ended", "_make", "_observers", "_reader", "_send")

    def __init__(
        self,
        name: str,
        world: World,
        accept: Callable[[LearnerProcess], Link | None],
        ended: Callable[[], None],
        make: MakeLearner,
        pace: Pace,
        step_samples: int,
    ) -> None:
        super().__init__(name, world, pace, step_samples)
        self._accept = accept
        self._ended = ended
        self._make = make
        self._observers = world.observers
        self._send = world.network.send

    # ---- process and link -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, that is a new incarnation, which dials."""
        self.life += 1
        self.incarnation += 1
        scenario = self._world.scenario
        who = (self.name, self.incarnation, scenario.config, FINGERPRINT)
        saved = self.saved[-1].described if self.saved else None
        self.machine = machine = self._make(*who, step_samples=self.step_samples, saved=saved)
        self._reader = Reader(self._world, self, machine)
        machine.payload_bytes = dict.fromkeys(range(scenario.config.num_fragments), scenario.payload_bytes)
        self.dial(DIAL_S)

    def kill(self, notice_s: float) -> None:
        """The process is gone; the syncer's transport finds out so much later."""
        self._cut(notice_s)
        self.forget()

    def dial(self, after_s: float) -> None:
        """Connect, after some time."""
        self._engine.at(self._engine.now_s + after_s, self._connect, self.life)

    def _connect(self, life: int) -> None:
        if self.life != life or self.machine is None or self.link is not None:
            return
        now_s = self._engine.now_s
        if self.paused_s > now_s:
            self._engine.at(self.paused_s, self._connect, life)
            return
        self.link = self._accept(self)
        if self.link is None:
            self.dial(self.redial_s())
            return
        self.linked_s = now_s
        self._run(self.machine.on_connected(now_s))
        self._settle()

    def disconnect(self, notice_s: float) -> None:
        """The link breaks; the learner knows at once."""
        assert self.machine is not None
        self._cut(notice_s)
        self._run(self.machine.on_disconnected(self._engine.now_s))

    def _cut(self, notice_s: float) -> None:
        link, self.link, self.linked_s = self.link, None, NEVER_S
        if link is not None:
            link.alive = False
            if notice_s < NEVER_S and link.lost is not None:
                self._engine.at(self._engine.now_s + notice_s, link.lost, link)

    def on_syncer_gone(self, link: Link) -> None:
        """The transport finds out that the process at the other end is dead."""
        if self.link is not link or self.machine is None:
            return
        if self.paused_s > self._engine.now_s:
            self._engine.at(self.paused_s, self.on_syncer_gone, link)
            return
        self.disconnect(NEVER_S)
        self.dial(self.redial_s())

    def leave(self, reason: str) -> None:
        """Somebody asks this learner to say goodbye."""
        assert self.machine is not None
        self._run(self.machine.leave(reason, self._engine.now_s))
        self._end(for_good=True)

    def _end(self, *, for_good: bool) -> None:
        """The machine has finished: the process closes its link when everything is sent, and ends."""
        link, self.link, self.linked_s = self.link, None, NEVER_S
        if link is not None and link.lost is not None:
            self._engine.at(self._engine.now_s + 2 * self._world.scenario.network.delay_s, link.lost, link)
        self.forget()
        if for_good:
            self.gone = True
            self._ended()
        else:
            self._engine.at(self._engine.now_s + SUPERVISOR_S, self.start_again, self.life)

    def start_again(self, life: int) -> None:
        """Start, unless somebody else did."""
        if self.life == life:
            self.start()

    def resume(self) -> None:
        """Take what came during the pause; the step in progress goes on by itself."""
        if self.paused_s > self._engine.now_s:
            return  # another pause lasts longer
        held, self.held = self.held, []
        for message in held:
            if self.link is not None:
                self.arrive((self.link, message))

    # ---- messages -------------------------------------------------------------------------------------------------

    def arrive(self, item: tuple[Link, Any]) -> None:
        """A message comes, or one whose payload is garbled."""
        link, message = item
        machine = self.machine
        if machine is None or link.owner is not machine:
            return  # that process is gone
        now_s = self._engine.now_s
        if self.paused_s > now_s:
            self.held.append(message)
        elif type(message) is PullRequest:
            self._see(message, now_s)
            self._run(machine.on_pull(message, now_s))
        elif type(message) is GlobalFragment:
            self._on_global(message, False, now_s)
        elif type(message) in URGENT:
            self._answer(message, now_s)
        elif self.stepping or self.loading:
            self.inbox.append(message)
        else:
            self._take(message, now_s)
            self._settle()

    def _answer(self, message: AnchorRequest | StatePull | Garbled, now_s: float) -> None:
        machine = self.machine
        assert machine is not None
        if isinstance(message, Garbled):
            if isinstance(message.message, GlobalFragment):  # else a part of a state: it will be asked for again
                self._on_global(message.message, True, now_s)
            return
        self._see(message, now_s)
        if isinstance(message, AnchorRequest):
            self._run(machine.on_anchor_request(message, now_s))
        else:
            self._run(machine.on_state_pull(message, now_s))
        self._settle()

    def _on_global(self, message: GlobalFragment, garbled: bool, now_s: float) -> None:
        """Read it now, since steps apply to the newest value that came; adopt it when no step runs."""
        if self._reader.read(message, garbled, now_s):
            if self.stepping or self.loading:
                self.inbox.append(message)
            else:
                self._take(message, now_s)
        self._settle()

    def _take(self, message: SyncerMessage, now_s: float) -> None:
        assert self.machine is not None
        self._see(message, now_s)
        self._run(self.machine.on_message(message, now_s), message)

    def _see(self, message: SyncerMessage, now_s: float) -> None:
        for observer in self._observers:
            observer.on_arrival(self, message, now_s)

    def _take_inbox(self) -> None:
        now_s = self._engine.now_s
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            if self.loading:
                self.inbox.append(message)
                continue
            if not isinstance(message, GlobalFragment) or self._reader.is_newest(message):
                self._take(message, now_s)

    # ---- steps and time -------------------------------------------------------------------------------------------

    def _begin_step(self, now_s: float) -> None:
        machine, scenario, engine = self.machine, self._world.scenario, self._engine
        assert machine is not None
        begins_s = self.pace.begins_s(now_s)
        if begins_s > now_s:
            self.loading = True
            engine.at(begins_s, self._ready, self.life)
            return
        self.stepping = True
        self.began_s = now_s
        self.clock = machine.global_step
        self.batch = self.next_batch or machine.take_batch()
        self.next_batch = machine.take_batch() if scenario.reads_ahead else None
        engine.at(now_s + self.pace.takes_s() * self.factor, self._end_step, self.life)
        for observer in self._observers:
            observer.on_step(self, True, now_s)

    def _ready(self, life: int) -> None:
        """The hardware is: take what came meanwhile, and step."""
        if self.life == life and self.machine is not None:
            self.loading = False
            self._take_inbox()
            self._settle()

    def _end_step(self, life: int) -> None:
        machine = self.machine
        if self.life != life or machine is None:
            return
        now_s = self._engine.now_s
        if self.paused_s > now_s:
            self._engine.at(self.paused_s, self._end_step, life)
            return
        self.stepping = False
        self.pace.ended(self.began_s, now_s)
        if self.pace.lost:
            self.kill(2 * self._world.scenario.network.delay_s)
            self._engine.at(self.pace.begins_s(now_s), self.start_again, self.life)
            return
        for observer in self._observers:
            observer.on_step(self, False, now_s)
        tokens = self._world.scenario.sample_tokens * self.step_samples
        self._run(machine.on_step(tokens, now_s - self.began_s, 1.0, now_s, samples_end=self.batch.end))
        if self.inbox:
            self._take_inbox()
        self._settle()

    def _tick(self, item: tuple[int, float]) -> None:
        life, tick_s = item
        machine = self.machine
        if self.life != life or machine is None or tick_s != self.tick_s:
            return
        now_s = self._engine.now_s
        self.tick_s = NEVER_S
        if self.paused_s > now_s:
            self._plan_tick(self.paused_s)
            return
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            self._run(machine.on_tick(now_s))
            deadline_s = machine.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, f"the driver of {self.name} would spin"
        self._settle()

    def _plan_tick(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self._engine.at(tick_s, self._tick, (self.life, tick_s))

    def _settle(self) -> None:
        """Between two inputs: begin a step if none runs, plan the next tick, see off a learner that has finished."""
        machine, now_s = self.machine, self._engine.now_s
        assert machine is not None
        if machine.state == STOPPED:
            if not self.stepping:
                self._end(for_good=not self.finished.startswith(("refused", "expelled")))
            return
        if not (self.stepping or self.loading) and machine.may_step():
            self._begin_step(now_s)
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s < self.tick_s:
            self._plan_tick(max(deadline_s, now_s))
        for observer in self._observers:
            observer.on_settled(self, now_s)

    # ---- effects --------------------------------------------------------------------------------------------------

    def _run(self, effects: list[Effect], message: SyncerMessage | None = None) -> None:
        link = self.link
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                if link is not None:
                    sent: Message | None = effect.message  # type: ignore[union-attr]
                    if type(sent) in FILLED:
                        sent = self.filled(sent)
                    if sent is not None:
                        self._send(link.up, sent)
            elif kind in HANDLED:
                self.handle(effect, message)
            elif kind is AdoptState:
                self._load(effect)  # type: ignore[arg-type]
        for observer in self._observers:
            observer.on_effects(self.name, self.incarnation, effects, self._engine.now_s)

    def _load(self, effect: AdoptState) -> None:
        assert not (self.stepping or self.loading), f"{self.name} takes over a state while it is busy"
        self.loading = True
        load_s = self._world.scenario.load_s
        self._engine.at(self._engine.now_s + load_s, self._loaded, (self.life, effect))

    def _loaded(self, item: tuple[int, AdoptState]) -> None:
        life, effect = item
        machine, now_s = self.machine, self._engine.now_s
        if life != self.life or machine is None:
            return
        if self.paused_s > now_s:
            self._engine.at(self.paused_s, self._loaded, item)
            return
        self.loading = False
        ok = self._engine.random.random() >= self._world.scenario.bad_states
        for observer in self._observers:
            observer.on_state(self, effect, ok, now_s)
        self.kept = {}
        self._run(machine.on_state_adopted(ok, now_s))
        self._take_inbox()
        self._settle()
