"""A tiny model and its islands, shared by the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from tests.quick import quick_compiler  # noqa: F401
from tests.training.islands import MakeIsland

TINY = {"vocab_size": 16, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 32}


@pytest.fixture(scope="session")
def make_island() -> MakeIsland:
    """`make_island(data=2, fsdp=2)` on as many devices as the mesh has; other arguments replace the usual.

    Asked again for the same it returns the same island, back in its first state: a compiled step is seconds of work.
    """
    made: dict[str, tuple[Island, Any]] = {}

    def make(
        *,
        optimizer: OptimizerConfig | None = None,
        args: dict[str, object] | None = None,
        module: str = ModelConfig().module,
        wire: codec.Format = "float32",
        rebase: bool = False,
        **mesh: int,
    ) -> Island:
        config = MeshConfig(**mesh)
        key = repr((config, optimizer, module, args, wire, rebase))
        if key in made:
            island, (host, shardings) = made[key]
            # Through a program: device_put alone may leave the island on NumPy's memory, which cannot be donated.
            own = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)
            island.state = own(jax.device_put(host, shardings))
            island.exchange.held = {}
            return island
        count = config.data * config.fsdp * config.expert * config.tensor
        island = Island(
            ModelConfig(module=module, args={**TINY, **(args or {})}),
            optimizer or OptimizerConfig(warmup_steps=0),
            config,
            seed=0,
            devices=jax.devices()[:count],
            wire=wire,
            rebase=rebase,
        )
        made[key] = island, (jax.tree.map(np.array, island.state), jax.tree.map(lambda x: x.sharding, island.state))
        return island

    return make


@pytest.fixture(scope="session")
def batches() -> list[Sample]:
    """Eight batches of 8 sequences that count upwards from a random start: quickly learnt."""
    rng = np.random.default_rng(0)
    return [{"tokens": ((rng.integers(0, 16, (8, 1)) + np.arange(9)[None, :]) % 16).astype(np.int32)} for _ in range(8)]


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Record the names of the programs that XLA compiles."""
    names: list[str] = []

    def listen(event: str, duration_s: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
