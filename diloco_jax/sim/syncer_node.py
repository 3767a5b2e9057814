"""The syncer over all its processes, with its disk and tape: the counterpart of runtime/syncer/begin.py.

Restart: a new process loads the newest readable snapshot and replays every later decision from the tape. Learners
bring newer values. Rewind: if all processes have ended, the run continues from the newest readable snapshot alone.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.observations import remembered
from diloco_jax.protocol.syncer.tape import Moment, Moments, count_epochs, repeat_bans, replay
from diloco_jax.sim.disk import Disk
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.holdings import Value, digest_of
from diloco_jax.sim.hostile import Hostile
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import Deliver, SimulatedLink
from diloco_jax.sim.node import FINGERPRINT, LearnerProcess, MakeSyncer, World
from diloco_jax.sim.syncer_process import SyncerProcess

# The id of a simulated run.
RUN = "0123456789abcdef"
# Longest time after a rewind until a learner starts again.
RESTART_S = 3.0


class SyncerNode:
    """The syncer's tape and disk, and its current or last process.

    Args:
        world: time, network and observers.
        learners: all learners by name.
        make_syncer: builds the machine.
        taped: record the tape; a process can be restarted only with a tape.
    """

    def __init__(
        self, world: World, learners: Mapping[str, LearnerDriver], make_syncer: MakeSyncer, taped: bool
    ) -> None:
        self.tape: list[str] = []
        self.taped = taped
        self.disk = Disk()
        self.hostile = Hostile(world.scenario.seed)
        self._world = world
        self._engine = world.engine
        self._learners = learners
        self._make_syncer = make_syncer
        self.process = self._new_process(self.new_syncer(), self._initial())
        digests = [digest for _, digest in self.process.values]
        self.process.execute(self.process.inputs.on_begin(digests, 0.0, RUN))

    def new_syncer(self) -> Syncer:
        """Build a machine equal to the first one of this run."""
        scenario = self._world.scenario
        fragments = range(scenario.config.num_fragments)
        return self._make_syncer(
            scenario.config,
            scenario.total_steps,
            FINGERPRINT,
            dict.fromkeys(fragments, scenario.payload_bytes),
            budget=scenario.budget,
            delta_bytes={} if scenario.delta_bytes is None else dict.fromkeys(fragments, scenario.delta_bytes),
            plan=scenario.plan,
        )

    def _initial(self) -> list[Value]:
        return [
            (0, digest_of("initial", fragment_id)) for fragment_id in range(self._world.scenario.config.num_fragments)
        ]

    def _new_process(self, machine: Syncer, values: Sequence[Value]) -> SyncerProcess:
        return SyncerProcess(
            self._world,
            self.tape,
            machine,
            list(values),
            taped=self.taped,
            disk=self.disk,
            hostile=self.hostile,
            die=self._on_death,
        )

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink | None:
        """Connect a learner that dials; None if no process runs."""
        return self.process.accept(learner, down) if self.process.alive else None

    def drain(self, learner_id: str) -> None:
        """Ask a learner to leave, as an operator does with `diloco drain`."""
        process = self.process
        try:
            effects = process.inputs.on_drain(learner_id, self._engine.now_s) if process.alive else []
        except ValueError:
            # The learner is not connected; the operator would read that.
            return
        for effect in effects:
            assert isinstance(effect, Send), f"draining led to {effect}"
            if effect.peer in process.heard:
                self._world.network.send(process.heard[effect.peer].down, effect.message)

    def ban(self, learner_id: str) -> None:
        """Ban a learner, as an operator does with `diloco ban`."""
        process = self.process
        if process.alive:
            # The operator reads why the ban is refused.
            with contextlib.suppress(ValueError):
                process.execute(process.inputs.on_ban(learner_id, "the operator of the simulation", self._engine.now_s))

    def admit(self, learner_id: str) -> bool:
        """Admit a learner, as an operator does with `diloco admit`; return whether it was banned."""
        process = self.process
        try:
            process.execute(process.inputs.on_admit(learner_id, self._engine.now_s))
        except ValueError:
            return False
        return True

    def crash(self) -> None:
        """End the process now, or in the middle of the effects of its next input."""
        random = self._engine.random
        if not self.process.alive:
            return
        if random.random() < 0.3:
            self._on_death()
        else:
            self.process.dies_after = random.choice((0, 0, 1, 2, random.randint(0, 20)))

    def _on_death(self) -> None:
        """End the process; connected learners notice it soon."""
        process, engine = self.process, self._engine
        if not process.alive:
            return
        process.alive = False
        for learner in self._learners.values():
            connected = learner.node.process
            if connected is not None and connected.link is not None:
                connected.link.alive = False
                notice_s = engine.random.choice((0.01, 0.01, 1.0)) * engine.random.random()
                engine.at(engine.now_s + notice_s, learner.on_syncer_gone, connected.link)
        for observer in self._world.observers:
            observer.on_syncer_died(process.machine, engine.now_s)

    def restart(self) -> None:
        """Start a new process with the disk and the tape of the dead one."""
        # The end of the old process was planned for its next input, but none has come since.
        if self.process.alive:
            self._on_death()
        snapshot, machine, states = self.disk.newest_readable(), self.new_syncer(), {}
        values, start, loaded = self._initial(), 0, -1
        if snapshot is not None:
            states[Moment(snapshot.global_step)] = snapshot.state()
            machine.restore(dict(snapshot.state()))
            values, start, loaded = list(snapshot.values), snapshot.tape_lines, snapshot.global_step
        lines, norms = iter(self.tape[start:]), self._world.norms
        if norms is not None:
            norms.begin(snapshot.histories if snapshot is not None else None)
            kept = Moments[Any]()
            kept.keep(Moment(loaded), norms.state)
            lines = remembered(lines, machine, norms, kept)
        for _ in replay(lines, machine, states):
            pass
        process = self.process = self._new_process(machine, values)
        now_s = self._engine.now_s
        for observer in self._world.observers:
            observer.on_syncer_back(machine, -1, now_s)
        versions, digests = [version for version, _ in values], [digest for _, digest in values]
        process.execute(process.taped.on_restart(versions, digests, loaded, now_s))

    def end_all(self, fault: Fault) -> bool:
        """End every process except those of the fault's learners; False if the run could not continue."""
        if self.disk.newest_readable() is None or self.process.machine.finished:
            return False
        if fault.breaks_snapshot:
            self.disk.break_newest()
        self._on_death()
        for name, learner in self._learners.items():
            if learner.node.process is not None and name not in fault.learners:
                learner.kill(learner.node.process, NEVER_S)
        return True

    def rewind(self) -> None:
        """Continue the run from its newest readable snapshot."""
        snapshot = self.disk.newest_readable()
        assert snapshot is not None, "a rewind without a snapshot"
        now_s = self._engine.now_s
        for learner in self._learners.values():
            node = learner.node
            if node.process is None and not node.gone and node.incarnation > 0:
                learner.start_later(now_s + RESTART_S * self._engine.random.random())
        # Another fault may have restarted the syncer meanwhile.
        if self.process.alive:
            if self.process.machine.finished:
                return
            self._on_death()
        self.disk.drop_after(snapshot.global_step)
        if self._world.norms is not None:
            self._world.norms.begin(snapshot.histories)
        epoch = count_epochs(self.tape) + 1
        process = self.process = self._new_process(self.new_syncer(), snapshot.values)
        # A rewind keeps the bans of the whole tape.
        repeat_bans(self.tape, process.machine)
        for observer in self._world.observers:
            observer.on_syncer_back(process.machine, snapshot.global_step, now_s)
        process.execute(process.taped.on_rewind(snapshot.state(), snapshot.global_step, epoch, now_s))
