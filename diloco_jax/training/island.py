"""An island with the built-in inner step: one model on one mesh, without knowledge of other islands.

    handle = island.step(island.put_batch(batch), learning_rate)      one donated program; returns at once
    island.wait(handle)                                               {"loss": ..., "grad_norm": ...}

The exchange of fragments is in exchanged.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from diloco_jax.core.codec import Format
from diloco_jax.training.base import read_base
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.sample import Sample, Shapes
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig, put_array, put_rows, rows_here
from diloco_jax.training.state import Batch


class StepHandle(NamedTuple):
    """A dispatched step, or a half of one, which `Island.wait` waits for."""

    metrics: Mapping[str, Array | float]


class Island(ExchangedState):
    """A model, its inner optimizer and their state on a mesh."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        mesh: MeshConfig,
        *,
        seed: int,
        devices: Sequence[jax.Device] | None = None,
        wire: Format = "float32",
        rebase: bool = False,
    ) -> None:
        """Build the mesh and draw the initial parameters directly in their layout.

        Args:
          seed: seed of the initial parameters; equal seeds give equal parameters on any mesh.
          devices: the island's devices; by default all devices that JAX sees.
          wire: format of the updates that the island sends.
          rebase: whether fragments may be adopted with mode "rebase"; if so, staged copies stay on the devices.

        Raises:
          ValueError: the model or the weights below its adapters cannot be loaded, or the mesh does not fit the
            devices.
        """
        chosen = list(jax.devices() if devices is None else devices)
        self.num_devices = len(chosen)
        self.blueprint = blueprint = Blueprint(model, optimizer, mesh, chosen, seed=seed)
        self.mesh = blueprint.mesh
        # The weights below adapters; empty if the whole model is trained.
        self.base = read_base(blueprint)
        super().__init__(
            blueprint.create(),
            blueprint.state_shardings,
            blueprint.kinds,
            blueprint.state_layout,
            blueprint.exchange(wire, rebase),
        )
        # Compiled steps by the shapes of their batches.
        self._compiled_steps: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._unfinished: StepHandle | None = None

    def own_rows(self, size: int) -> Sequence[int]:
        """Return the rows of a batch of `size` samples that this process's devices hold, in ascending order."""
        return rows_here(self.blueprint.batch_sharding((size,)), size)

    def put_batch(self, batch: Sample, size: int | None = None) -> Batch:
        """Copy a batch to the devices, split along the mesh axes of `batch`; return at once.

        Args:
          batch: arrays [samples, ...] by name.
          size: samples of the whole batch if `batch` has only the rows of `own_rows`; None if it has all.
        """
        layout = self.blueprint.batch_sharding
        if size is None:
            return {name: put_array(value, layout(value.shape)) for name, value in batch.items()}
        return {name: put_rows(value, layout((size, *value.shape[1:])), size) for name, value in batch.items()}

    def warm_up(self, shapes: Shapes) -> None:
        """Compile the inner step for batches of these shapes, without running it; any thread may call this."""
        if shapes_key(shapes) not in self._compiled_steps:
            self._compiled_steps[shapes_key(shapes)] = self.blueprint.lower_step(shapes).compile()

    def step(self, batch: Batch, learning_rate: float, position: int = 0) -> StepHandle:
        """Dispatch one inner step, which updates the state in place; return at once.

        Args:
          batch: the result of `put_batch`.
          position: position of the batch's first sample in the global order. It seeds the model's random streams, so
            equal positions drop the same activations. A model without streams ignores it.
        """
        draw = self.blueprint.put_draw(position)
        program = self._compiled_steps.get(shapes_key(batch), self.blueprint.step)
        self.state, handle = self.dispatch(
            program, self.state, batch, self.put_rate(learning_rate), draw, self.base.values
        )
        return handle

    def put_rate(self, learning_rate: float) -> Array:
        """Copy a learning rate to the devices, as float32; return at once."""
        return put_array(np.asarray(learning_rate, np.float32), self.blueprint.layout.replicated)

    def dispatch(
        self, program: Callable[..., Any], *arguments: Any, known: Mapping[str, float] = MappingProxyType({})
    ) -> tuple[Any, StepHandle]:
        """Run a program that returns a result and metrics, once the one before it is finished; return at once.

        Args:
          known: metrics that the handle has besides those of the program.
        """
        # The previous program must be finished. More than a few unfinished programs on several emulated CPU devices
        # exhaust the thread pool that they meet in, and the process aborts.
        if self._unfinished is not None:
            jax.block_until_ready(self._unfinished.metrics)
        with jax.transfer_guard("disallow"):
            result, metrics = program(*arguments)
        self._unfinished = StepHandle({**known, **metrics})
        return result, self._unfinished

    def wait(self, handle: StepHandle) -> dict[str, float]:
        """Block until a step is done; return `loss`, `grad_norm` and the other metrics of the model."""
        metrics = jax.device_get(handle.metrics)
        if handle is self._unfinished:
            self._unfinished = None
        return {name: float(value) for name, value in metrics.items()}

    def evaluate(self, batches: Iterable[Sample]) -> dict[str, float]:
        """Compute the mean loss over batches in nats per token, the means of other metrics, and the number of tokens.

        The model runs in evaluation mode: nothing is dropped, and batch statistics are those of this island. A batch's
        weight is the model's metric `weight` if there is one. Otherwise it is the number of tokens to predict, or of
        samples if there are no tokens.

        Raises:
          ValueError: there is no batch, or none of the batches has anything to predict.
        """
        return self.blueprint.mean_loss(self.state.params, {**self.state.other, **self.base.values}, batches)


def shapes_key(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is equal for batches that one compiled program takes: names, shapes and dtypes."""
    return tuple((name, value.shape, value.dtype) for name, value in sorted(batch.items()))
