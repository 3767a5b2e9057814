"""A tiny model and its islands, shared by the tests of this folder."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.core import codec
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.training.state import TrainState
from tests.quick import quick_compiler  # noqa: F401
from tests.training.islands import TINY, MakeIsland


def copy_program(shardings: Any) -> Callable[[Any], TrainState]:
    """Return a function that places a state of NumPy arrays on devices."""
    # Through a program: device_put alone may leave the island on NumPy's memory, which cannot be donated.
    own = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)
    return lambda state: own(jax.device_put(state, shardings))


def starting_from(state: Any) -> type[Blueprint]:
    """Return blueprints whose islands start from a state that an equal model has drawn, and compile no initializer."""

    class Drawn(Blueprint):
        def _make_programs(self, optimizer: OptimizerConfig, tx: optax.GradientTransformation) -> None:
            super()._make_programs(optimizer, tx)
            self.create = lambda: copy_program(self.state_shardings)(state)  # type: ignore[assignment]

    return Drawn


@pytest.fixture(scope="session")
def make_island() -> MakeIsland:
    """`make_island(data=2, fsdp=2)` on as many devices as the mesh has; other arguments replace the usual.

    Asked again for the same it returns the same island, back in its first state: a compiled step is seconds of work.
    """
    made: dict[str, tuple[Island, Callable[[Any], TrainState]]] = {}
    first: dict[str, Any] = {}

    def make(
        *,
        optimizer: OptimizerConfig | None = None,
        args: dict[str, object] | None = None,
        module: str = ModelConfig().module,
        wire: codec.Format = "float32",
        rebase: bool = False,
        **mesh: int,
    ) -> Island:
        config, model = MeshConfig(**mesh), repr((optimizer, module, args))
        key = repr((config, model, wire, rebase))
        if key in made:
            island, placed = made[key]
            island.state = placed(first[model])
            island.exchange.held = {}
            return island
        count = config.data * config.fsdp * config.expert * config.tensor
        with pytest.MonkeyPatch.context() as patch:
            if model in first:
                patch.setattr("diloco_jax.training.island.Blueprint", starting_from(first[model]))
            island = Island(
                ModelConfig(module=module, args={**TINY, **(args or {})}),
                optimizer or OptimizerConfig(warmup_steps=0),
                config,
                seed=0,
                devices=jax.devices()[:count],
                wire=wire,
                rebase=rebase,
            )
        first.setdefault(model, jax.tree.map(np.array, island.state))
        made[key] = island, copy_program(island.blueprint.state_shardings)
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
