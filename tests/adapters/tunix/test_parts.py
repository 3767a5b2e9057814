"""What an island adds to a trainer of tunix, on a stand-in with the same members; test_tunix.py has real trainers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import diloco_jax.tunix
from diloco_jax.adapters.tunix.island import TunixIsland
from diloco_jax.adapters.tunix.trainer import GlobalEvaluation, RunData, WatchedStep, axes_of


@dataclass
class Config:
    """The settings of a trainer that an island reads."""

    gradient_accumulation_steps: int | None = None
    max_steps: int | None = None


class StandIn:
    """A trainer whose evaluation is the mean of a parameter times a batch."""

    def __init__(self, config: Config) -> None:
        self.model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.optimizer: Any = SimpleNamespace(wrt=nnx.Param)
        self.config: Any = config
        self.data_hooks: Any = None

    def jit_train_and_eval_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (lambda batch: (batch, None, 0.0)), lambda batch: (self.model.kernel.get_value().mean() * batch, None)

    def with_data_hooks(self, data_hooks: Any) -> None:
        self.data_hooks = data_hooks

    def _run_eval(self, eval_ds: Iterable[Any], eval_step_fn: Callable[..., Any]) -> None:
        for batch in eval_ds:
            eval_step_fn(batch)

    def train(self, batches: Iterable[Any]) -> None:
        step, _ = self.jit_train_and_eval_step(False)
        for batch in batches:
            step(batch)


class Run:
    """An island that ends after some steps."""

    def __init__(self, steps: int, samples: int) -> None:
        self.local_step, self._steps, self._samples = 0, steps, samples
        self.losses: list[float] = []

    @property
    def training(self) -> bool:
        return self.local_step < self._steps

    def next_samples(self) -> np.ndarray:
        return np.arange(self._samples) + self.local_step * self._samples

    def after_step(self, metrics: Any) -> None:
        self.losses.append(float(metrics["loss"]))
        self.local_step += 1

    def global_params(self) -> dict[str, Any]:
        return {"kernel": jnp.full((2, 2), 7.0)}

    def leave(self) -> None:
        self._steps = 0


class Holder:
    """The parameters of a run's model."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {"kernel": jnp.zeros((2, 2))}

    def check_trained(self) -> None:
        pass


def made(config: Config, steps: int = 2, samples: int = 6) -> tuple[StandIn, Run, Holder, TunixIsland]:
    trainer, run, holder = StandIn(config), Run(steps, samples), Holder()
    return trainer, run, holder, TunixIsland(trainer, run, holder)  # type: ignore[arg-type]


def test_an_update_of_the_optimizer_is_a_step_of_the_island() -> None:
    trainer, run, holder, island = made(Config(gradient_accumulation_steps=3))
    parts: list[list[int]] = []

    def load(positions: np.ndarray) -> float:
        parts.append(positions.tolist())
        return float(positions.sum())

    trainer.train(island.batches(load))
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert run.losses == [5.0, 17.0]
    assert island.local_step == 2
    np.testing.assert_array_equal(holder.params["kernel"], 7.0, "the global model")


def test_samples_that_do_not_split_are_refused() -> None:
    trainer, _, _, island = made(Config(gradient_accumulation_steps=4))
    with pytest.raises(ValueError, match="samples_per_step is 6, which is not a multiple of the 4"):
        trainer.train(island.batches(float))


def test_batches_that_a_restored_trainer_skips_are_loaded_once() -> None:
    trainer, run, _, island = made(Config())
    loads: list[np.ndarray] = []
    batches = island.batches(lambda positions: loads.append(positions) or 1.0)  # type: ignore[func-returns-value]
    assert [next(batches) for _ in range(5)] == [1.0] * 5 and len(loads) == 1
    trainer.train(batches)
    assert run.local_step == 2


def test_own_batches_end_with_the_run_or_before() -> None:
    trainer, run, _, island = made(Config(), steps=3)
    trainer.train(island.batches([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert run.losses == [1.0, 2.0, 3.0]


def test_own_batches_are_read_after_the_run_was_joined_and_none_behind_its_end() -> None:
    trainer, run, _, island = made(Config(), steps=2)
    read_at: list[int] = []
    joined: list[bool] = []

    def source() -> Iterator[float]:
        while True:
            read_at.append(run.local_step)
            assert joined, "a loader's position is restored before its first batch"
            yield 1.0

    class Joining(Run):
        @property
        def training(self) -> bool:
            joined.append(True)
            return super().training

    run.__class__ = Joining
    trainer.train(island.batches(source()))
    assert read_at == [0, 1]


def test_max_steps_is_the_trainers_again_after_the_run() -> None:
    trainer, run, _, island = made(Config(max_steps=3), steps=5)
    assert trainer.config.max_steps is None
    trainer.train(island.batches([1.0] * 9))
    assert run.local_step == 5
    island.leave()
    assert trainer.config == Config(max_steps=3)


def test_a_trainer_with_its_own_data_is_refused_and_is_given_back() -> None:
    trainer, run, _, island = made(Config())
    with pytest.raises(ValueError, match=r"call train\(island.batches"):
        trainer.train([1.0])
    with pytest.raises(ValueError, match="is an island already"):
        diloco_jax.tunix.attach(trainer, samples_per_step=6, tokens_per_step=6)
    island.leave()
    trainer.train([1.0])
    assert run.losses == []


def test_hooks_give_no_batch_at_the_end_and_keep_their_attributes() -> None:
    going = [True, False]
    own = SimpleNamespace(load_next_train_batch=lambda trainer: 5, train_batch=4)
    data = RunData(own, lambda: going.pop(0))
    assert (data.load_next_train_batch(None), data.load_next_train_batch(None), data.train_batch) == (5, None, 4)


def test_a_watched_step_has_what_the_step_has() -> None:
    seen: list[Any] = []

    def step(batch: int, *, twice: bool) -> int:
        return batch * (2 if twice else 1)

    watched = WatchedStep(step, seen.append)
    assert watched(4, twice=True) == 8 and seen == [8] and watched.__kwdefaults__ is None


def test_an_evaluation_sees_the_global_model_and_leaves_the_own_one() -> None:
    trainer, own = StandIn(Config()), jnp.ones((2, 2))
    trainer.model.kernel.set_value(own)

    class Params(dict[str, Any]):
        def __getitem__(self, path: str) -> Any:
            return trainer.model.kernel.get_value()

        def __setitem__(self, path: str, value: Any) -> None:
            trainer.model.kernel.set_value(value)

    evaluation = GlobalEvaluation(trainer, Params(kernel=None), [1.0, 3.0])
    assert float(evaluation({"kernel": jnp.full((2, 2), 5.0)})["loss"]) == 10.0
    np.testing.assert_array_equal(trainer.model.kernel.get_value(), own)
    with pytest.raises(ValueError, match="had no batch"):
        GlobalEvaluation(trainer, Params(), [])({})
    with pytest.raises(ValueError, match="can be read only once"):
        GlobalEvaluation(trainer, Params(), iter([1.0]))


def test_axes_of_tunix_models_are_named() -> None:
    shapes = {
        "embedder/input_embedding": (8, 4),
        "layers/0/mlp/gate_proj": (2, 4, 8),
        "layers/0/mlp/up_proj/kernel": (4, 8),
    }
    found = axes_of({path: jnp.zeros(shape) for path, shape in shapes.items()})
    assert found == {"embedder/input_embedding": ("vocab", None), "layers/0/mlp/gate_proj": ("expert", None, None)}
