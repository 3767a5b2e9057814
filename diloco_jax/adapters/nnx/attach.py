"""`diloco_jax.nnx.attach`: an island in a loop that trains a Flax NNX module or a split state.

with diloco_jax.nnx.attach(model, optimizer, samples_per_step=B, tokens_per_step=B * T) as island:
    while island.training:
        loss = train_step(model, optimizer, load(island.next_samples()))
        island.after_step(loss)
    save(nnx.state(island.global_model()))
"""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
from flax import nnx
from jaxtyping import Array

from diloco_jax.adapters.nnx.holder import KEPT, VariableHolder
from diloco_jax.adapters.nnx.variables import VariableArrays, by_path, variables_of
from diloco_jax.runtime.own_loop.attached import AttachedIsland, HeldArrays
from diloco_jax.runtime.own_loop.enter import LoopOptions, check_options, enter
from diloco_jax.runtime.own_loop.stepping import SteppedIsland, log
from diloco_jax.training.sharding import LogicalAxes

# Formats that keep the sign of a variance which is small beside others.
PRECISE = {"float32", "bfloat16"}


class NnxIsland(AttachedIsland):
    """Island of a loop that trains Flax NNX Variables; `attach` creates it. Use it from one thread at a time."""

    def __init__(self, island: SteppedIsland, arrays: HeldArrays, holder: VariableHolder) -> None:
        super().__init__(island, arrays)
        self._holder = holder

    def after_step(self, metrics: Any) -> None:
        """Report a step and exchange the due fragments, in the model itself.

        Args:
            metrics: A scalar loss, or scalars by name with one called `loss`, such as `metrics.compute()` of an
                nnx.MultiMetric.

        Raises:
            ValueError: As AttachedIsland.after_step, or the steps train another model.
        """
        self._holder.check_trained()
        super().after_step(metrics)

    def global_model(self) -> Any:
        """Return the newest global model that this island holds, as a copy of the loop's module or split state.

        The parameters are those of `global_params`; all other Variables have this island's arrays. Evaluate and save
        this one: the loop's own model is not the result of the run.

        Raises:
            ValueError: The island holds no global model yet.
        """
        return filled(self._holder.model, self.global_params())


def attach(
    model: Any,
    optimizer: Any = None,
    syncer: str | None = None,
    *,
    filter: Any = nnx.Param,
    average: Any = (),
    keep: Any = KEPT,
    axes: Mapping[str, LogicalAxes] | None = None,
    **options: Unpack[LoopOptions],
) -> NnxIsland:
    """Make a loop that trains a Flax NNX model in place an island of a run; docs/nnx.md explains it.

    Args:
        model: nnx.Module, or nnx.State with the parameters. If the loop replaces this object, give a function that
            returns the present one.
        optimizer: nnx.Optimizer or its nnx.State, or a tuple of it and other objects that must return with the island.
            It may be a function, as for `model`. If None, a returning island starts with fresh moments.
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        filter: nnx filter of the trained parameters, such as nnx.LoRAParam; the same as the optimizer's `wrt`.
        average: nnx filter of Variables that are merged with the parameters, such as nnx.BatchStat.
        keep: nnx filter of the model's other Variables that are saved, and return with this island. A filter replaces
            the default, which is batch statistics and random streams.
        axes: Logical axis names of parameters by path, in place of those in the metadata of the Variables.
        options: As for `diloco_jax.join`; `evaluate` gets the global model, as `global_model` returns it.

    Raises:
        ValueError: An argument is wrong, an array was donated, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The run is complete.
    """
    check_options(options)
    holder = VariableHolder(model, optimizer, filter=filter, average=average, keep=keep)
    if (evaluate := options.get("evaluate")) is not None:
        options["evaluate"] = _of_model(evaluate, holder)
    arrays = HeldArrays(holder, axes)
    island = enter(syncer, arrays, options)
    wire = island.config.wire
    if holder.averages_statistics and not {wire.up, wire.down} <= PRECISE:
        log.warning(
            f"batch statistics are averaged over wire.up {wire.up} and wire.down {wire.down}: their rounding can make "
            "a small variance negative, and then an evaluation is NaN; use bfloat16 or float32 if that happens"
        )
    return NnxIsland(island, arrays, holder)


def filled(model: Any, params: Mapping[str, Array]) -> Any:
    """Return a copy of a module or of a split state with these parameters; other Variables share their arrays."""
    split = None
    state = model
    if not isinstance(model, nnx.State):
        split, state = nnx.split(model)
    # New Variables with the same arrays.
    state = jax.tree.map(lambda leaf: leaf, state)
    arrays = VariableArrays(lambda: state, by_path(variables_of(state)))
    for path, value in params.items():
        arrays[path] = value
    return state if split is None else nnx.merge(split, state)


def _of_model(evaluate: Callable[[Any], Any], holder: VariableHolder) -> Callable[[Any], Any]:
    return lambda params: evaluate(filled(holder.model, params))
