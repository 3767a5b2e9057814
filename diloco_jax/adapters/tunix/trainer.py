"""The trainer of google-tunix as an island uses it: its step is watched, and its data ends with the run.

Hooks of tunix report a loss one step late, and the last one after `on_train_end`. Therefore an island watches the step
itself, which `PeftTrainer.jit_train_and_eval_step` returns. Nothing here imports tunix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol

from jaxtyping import Array

from diloco_jax.training.sharding import LogicalAxes

# Names of axes that tunix' own models do not give, by the last word of a path and the number of axes: tables of
# embeddings, and stacks of experts.
AXES: Mapping[tuple[str, int], LogicalAxes] = {
    ("input_embedding", 2): ("vocab", None),
    ("gate_proj", 3): ("expert", None, None),
    ("up_proj", 3): ("expert", None, None),
    ("down_proj", 3): ("expert", None, None),
    ("gating_einsum", 4): ("expert", None, None, None),
    ("linear", 3): ("expert", None, None),
}


class PeftTrainer(Protocol):
    """The parts of a `tunix.sft.peft_trainer.PeftTrainer` that an island uses."""

    model: Any
    optimizer: Any
    config: Any
    data_hooks: Any

    def jit_train_and_eval_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the compiled functions of a training step and of an evaluation step."""

    def with_data_hooks(self, data_hooks: Any) -> None:
        """Read batches from hooks."""

    def _run_eval(self, eval_ds: Iterable[Any], eval_step_fn: Callable[..., Any]) -> None:
        """Evaluate the model, with the hooks and the logger of the trainer."""


class WatchedStep:
    """A step of a trainer that passes every result on; it has the other attributes of the step."""

    def __init__(self, step: Callable[..., Any], watch: Callable[[Any], None]) -> None:
        self._step = step
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step, and then call the watcher with its result."""
        result = self._step(*args, **kwargs)
        self._watch(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class RunData:
    """Data hooks that give no batch once the run is over; everything else is the trainer's own hooks.

    Args:
        own: Data hooks of the trainer.
        going: Tells whether the run needs another step.
    """

    def __init__(self, own: Any, going: Callable[[], bool]) -> None:
        self._own = own
        self._going = going

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        """Return the next batch of the trainer's own hooks; None ends the training."""
        return self._own.load_next_train_batch(train_ctx) if self._going() else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class GlobalEvaluation:
    """Evaluation of the run's global model with the trainer's own evaluation step.

    The trainer's hooks and its logger see it as one of the trainer's evaluations.

    Args:
        trainer: The trainer.
        params: Trained parameters of its model, by path; an entry that is written replaces the one in the model.
        eval_ds: Batches for an evaluation; not used if the trainer has data hooks.
    """

    def __init__(self, trainer: PeftTrainer, params: MutableMapping[str, Array], eval_ds: Iterable[Any]) -> None:
        if iter(eval_ds) is eval_ds:
            raise ValueError(
                "eval_ds is an iterator, and can be read only once; give a list, or a dataset that can be read again"
            )
        self._trainer = trainer
        self._params = params
        self._eval_ds = eval_ds

    def __call__(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Return the mean loss of these parameters, in nats as the trainer's loss function counts.

        Raises:
            ValueError: There was no batch.
        """
        losses: list[Any] = []
        _, step = self._trainer.jit_train_and_eval_step(False, True)
        with held_in(self._params, values):
            # tunix has no public method that evaluates between two steps.
            self._trainer._run_eval(self._eval_ds, WatchedStep(step, lambda result: losses.append(result[0])))
        if not losses:
            raise ValueError("the evaluation had no batch; give an eval_ds that is not empty")
        return {"loss": sum(losses) / len(losses)}


@contextmanager
def held_in(params: MutableMapping[str, Array], values: Mapping[str, Array]) -> Iterator[None]:
    """Put values into a model while a block runs, and its own values back after that."""
    own = {path: params[path] for path in values}
    try:
        write(params, values)
        yield
    finally:
        write(params, own)


def write(params: MutableMapping[str, Array], values: Mapping[str, Array]) -> None:
    """Replace parameters in a model."""
    for path, value in values.items():
        params[path] = value


def axes_of(params: Mapping[str, Array]) -> dict[str, LogicalAxes]:
    """Return the logical names of axes that tunix' own models do not give, by path."""
    found = {path: AXES.get((path.rpartition("/")[2], value.ndim)) for path, value in params.items()}
    return {path: names for path, names in found.items() if names is not None}
