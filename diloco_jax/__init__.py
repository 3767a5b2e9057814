"""Train one model on many islands of accelerators that fail, lag, join and leave: Decoupled DiLoCo in JAX.

The names below are loaded on first use, so that `import diloco_jax.sim` starts without JAX.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.releases import RELEASE as __version__

if TYPE_CHECKING:
    from diloco_jax.protocol.pacing import ProtocolConfig
    from diloco_jax.runtime.own_loop.attached import AttachedIsland, Holder, attach
    from diloco_jax.runtime.own_loop.island import OwnIsland, join
    from diloco_jax.runtime.own_loop.loaders import loader
    from diloco_jax.runtime.own_loop.stepping import RunComplete
    from diloco_jax.runtime.subscriber.subscription import FollowedModel, follow
    from diloco_jax.settings.run import RunConfig
    from diloco_jax.settings.text import dump, load
    from diloco_jax.training.models.protocol import TrainableModel
    from diloco_jax.training.numpy_exchange.holder import HostHolder, NumpyArrays
    from diloco_jax.transport.link import TransportConfig

_HOMES = {
    "dump": "settings.text",
    "load": "settings.text",
    "ProtocolConfig": "protocol.pacing",
    "AttachedIsland": "runtime.own_loop.attached",
    "Holder": "runtime.own_loop.attached",
    "attach": "runtime.own_loop.attached",
    "RunComplete": "runtime.own_loop.stepping",
    "OwnIsland": "runtime.own_loop.island",
    "join": "runtime.own_loop.island",
    "loader": "runtime.own_loop.loaders",
    "FollowedModel": "runtime.subscriber.subscription",
    "follow": "runtime.subscriber.subscription",
    "RunConfig": "settings.run",
    "HostHolder": "training.numpy_exchange.holder",
    "NumpyArrays": "training.numpy_exchange.holder",
    "TrainableModel": "training.models.protocol",
    "TransportConfig": "transport.link",
}

# Names of releases before 0.4, which warn.
_MOVED = ("Island", "Learner", "LearnerRun", "Syncer", "SyncerRun")

__all__ = [
    "AttachedIsland",
    "FollowedModel",
    "Holder",
    "HostHolder",
    "NumpyArrays",
    "OwnIsland",
    "ProtocolConfig",
    "RunComplete",
    "RunConfig",
    "TrainableModel",
    "TransportConfig",
    "__version__",
    "attach",
    "dump",
    "follow",
    "join",
    "load",
    "loader",
]


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"import {name} from {__name__}.runs", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"{__name__}.runs"), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
