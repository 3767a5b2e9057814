"""Classes for programs that start the processes of a run themselves, such as tests; docs/api.md describes them."""

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.training.island import Island

__all__ = ["Island", "Learner", "LearnerRun", "Syncer", "SyncerRun"]
