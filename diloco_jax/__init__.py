"""Train one model on many islands of accelerators that fail, lag, join and leave: Decoupled DiLoCo in JAX.

The names below are loaded on first use, so that `import diloco_jax.sim` starts without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.config import dump, load
    from diloco_jax.protocol.learner import Learner
    from diloco_jax.protocol.pacing import ProtocolConfig
    from diloco_jax.protocol.syncer import Syncer
    from diloco_jax.runtime.run_learner import LearnerRun
    from diloco_jax.runtime.run_syncer import SyncerRun
    from diloco_jax.runtime.settings import RunConfig
    from diloco_jax.training.island import Island
    from diloco_jax.training.models.protocol import TrainableModel

__version__ = "0.1.0"

_HOMES = {
    "dump": "config",
    "load": "config",
    "Learner": "protocol.learner",
    "ProtocolConfig": "protocol.pacing",
    "Syncer": "protocol.syncer",
    "LearnerRun": "runtime.run_learner",
    "SyncerRun": "runtime.run_syncer",
    "RunConfig": "runtime.settings",
    "Island": "training.island",
    "TrainableModel": "training.models.protocol",
}

__all__ = [
    "Island",
    "Learner",
    "LearnerRun",
    "ProtocolConfig",
    "RunConfig",
    "Syncer",
    "SyncerRun",
    "TrainableModel",
    "dump",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
