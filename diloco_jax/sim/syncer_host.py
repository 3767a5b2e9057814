"""The syncer's machine, its disk, and the process that serves learners."""

from collections.abc import Mapping, Sequence

from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.holdings import Value, digest_of
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import Deliver, SimulatedLink
from diloco_jax.sim.node import LearnerProcess
from diloco_jax.sim.syncer_process import Disk, SyncerProcess
from diloco_jax.sim.world import FINGERPRINT, MakeSyncer, World


class SyncerHost:
    """The syncer's disk, and the process that runs beside it or ran there last."""

    def __init__(
        self, world: World, learners: Mapping[str, LearnerDriver], make_syncer: MakeSyncer, taped: bool
    ) -> None:
        self.disk = Disk()
        self._world = world
        self._engine = world.engine
        self._learners = learners
        self._make_syncer = make_syncer
        self._taped = taped
        self.process = self._new_process(self.new_syncer(), self._initial())
        digests = [digest for _, digest in self.process.values]
        self.process.execute(self.process.inputs.on_begin(digests, 0.0))

    def new_syncer(self) -> Syncer:
        """Build a machine as that with which this run began."""
        scenario = self._world.scenario
        fragments = range(scenario.config.num_fragments)
        whole = dict.fromkeys(fragments, scenario.payload_bytes)
        steps = dict.fromkeys(fragments, scenario.step_bytes) if scenario.step_bytes is not None else {}
        settings = (scenario.config, scenario.total_steps, FINGERPRINT, whole, steps, scenario.budget)
        return self._make_syncer(*settings, plan=scenario.plan)

    def _initial(self) -> list[Value]:
        return [
            (0, digest_of("initial", fragment_id)) for fragment_id in range(self._world.scenario.config.num_fragments)
        ]

    def _new_process(self, machine: Syncer, values: Sequence[Value]) -> SyncerProcess:
        return SyncerProcess(self._world, self.disk, machine, list(values), self._taped, self._on_death)

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink | None:
        """Answer a learner that dials, if a process runs."""
        return self.process.accept(learner, down) if self.process.alive else None

    def _on_death(self) -> None:
        """Take note that the process has died; without faults it never does."""
