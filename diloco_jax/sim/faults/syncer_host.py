"""Lives and deaths of the syncer's process: as runtime/syncer/begin.py.

Restart: the newest readable snapshot, then every decision after it from the tape; newer values come from learners.
Rewind: every process died; the newest readable snapshot alone, and what came after it is void.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import Moment, lives, replay
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.faults.faults import Fault
from diloco_jax.sim.faults.hostile import Hostile
from diloco_jax.sim.faults.learner import MortalLearner
from diloco_jax.sim.faults.scenario import FaultyScenario
from diloco_jax.sim.faults.syncer_process import Disk, MortalSyncer
from diloco_jax.sim.holdings import Value
from diloco_jax.sim.node import MakeSyncer, World
from diloco_jax.sim.syncer_process import SyncerHost

RESTART_S = 3.0  # learners start again within this time after a rewind


class MortalSyncerHost(SyncerHost):
    """The syncer's disk, and the process that runs beside it or ran there last; to restart one needs the tape."""

    process: MortalSyncer
    _learners: Mapping[str, MortalLearner]

    def __init__(
        self, world: World, learners: Mapping[str, MortalLearner], make_syncer: MakeSyncer, taped: bool
    ) -> None:
        assert isinstance(world.scenario, FaultyScenario), "steps and evaluations have settings of their own"
        self.disk, self.hostile = Disk(), Hostile(world.scenario.seed)
        size, fragments = world.scenario.step_bytes, range(world.scenario.config.num_fragments)
        steps = {} if size is None else dict.fromkeys(fragments, size)
        super().__init__(world, learners, partial(make_syncer, step_bytes=steps, plan=world.scenario.plan), taped)

    def _new_process(self, machine: Syncer, values: Sequence[Value]) -> MortalSyncer:
        return MortalSyncer(
            self._world, self.tape, machine, list(values), self._taped, self.disk, self._on_death, self.hostile
        )

    def drain(self, learner_id: str) -> None:
        """Ask a learner to leave, as somebody does on the command line."""
        process = self.process
        try:
            effects = process.inputs.on_drain(learner_id, self._engine.now_s) if process.alive else []
        except ValueError:
            return  # it is not connected, and whoever asked was told so
        for effect in effects:
            assert isinstance(effect, Send), f"draining led to {effect}"
            if effect.peer in process.heard:
                self._world.network.send(process.heard[effect.peer].down, effect.message)

    def crash(self) -> None:
        """End the process now, or in the middle of what its next input asks for."""
        random = self._engine.random
        if not self.process.alive:
            return
        if random.random() < 0.3:
            self._on_death()
        else:
            self.process.dies_after = random.choice((0, 0, 1, 2, random.randint(0, 20)))

    def _on_death(self) -> None:
        """Let nothing of the process be left; whoever was connected finds out soon."""
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
        """Begin a new process in the folder of the dead one."""
        if self.process.alive:  # its end was planned, but nothing happened since
            self._on_death()
        snapshot, machine, states = self.disk.newest_readable(), self.new_syncer(), {}
        values, start, loaded = self._initial(), 0, -1
        if snapshot is not None:
            states[Moment(snapshot.global_step)] = snapshot.state()
            machine.restore(dict(snapshot.state()))
            values, start, loaded = list(snapshot.values), snapshot.tape_lines, snapshot.global_step
        if self._world.norms is not None:
            self._world.norms.begin(snapshot.histories if snapshot is not None else None)
        for _ in replay(self.tape[start:], machine, states):
            pass
        process = self.process = self._new_process(machine, values)
        now_s = self._engine.now_s
        for observer in self._world.observers:
            observer.on_syncer_back(machine, -1, now_s)
        versions, digests = [version for version, _ in values], [digest for _, digest in values]
        process.execute(process.taped.on_restart(versions, digests, loaded, now_s))

    def end_all(self, fault: Fault) -> bool:
        """End every process, but those of a few learners that nobody finds; False if the run could not go on."""
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
        """Go on with the run from its newest readable snapshot."""
        snapshot = self.disk.newest_readable()
        assert snapshot is not None, "a rewind without a snapshot"
        now_s = self._engine.now_s
        for learner in self._learners.values():
            node = learner.node
            if node.process is None and not node.gone and node.incarnation > 0:
                learner.start_later(now_s + RESTART_S * self._engine.random.random())
        if self.process.alive:  # somebody restarted it meanwhile
            if self.process.machine.finished:
                return
            self._on_death()
        # what is later must not be taken for the newest
        self.disk.snapshots = [each for each in self.disk.snapshots if each.global_step <= snapshot.global_step]
        if self._world.norms is not None:
            self._world.norms.begin(snapshot.histories)
        epoch = lives(self.tape) + 1
        process = self.process = self._new_process(self.new_syncer(), snapshot.values)
        for observer in self._world.observers:
            observer.on_syncer_back(process.machine, snapshot.global_step, now_s)
        process.execute(process.taped.on_rewind(snapshot.state(), snapshot.global_step, epoch, now_s))
