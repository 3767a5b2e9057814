"""An island with the built-in inner step: one model on one mesh. It knows of no other island.

    handle = island.step(island.put_batch(batch), learning_rate)      one donated program; returns at once
    island.wait(handle)                                               {"loss": ..., "grad_norm": ...}

How fragments leave it and come in: exchanged.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco_jax.core.codec import Format
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.sample import Sample, Shapes
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import Batch, Metrics
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig, put_array, put_rows, rows_here


class StepHandle(NamedTuple):
    """A dispatched step; give it to `Island.wait`."""

    metrics: Metrics


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
        """Build the mesh and draw the initial parameters, directly in their layout.

        Args:
          seed: of the initial parameters; equal seeds give equal parameters on any mesh.
          devices: the island's devices, all that JAX sees if not given.
          wire: format in which fragments leave the island.
          rebase: whether fragments will be adopted with mode "rebase", for which staged ones are kept on the devices.

        Raises:
          ValueError: the model cannot be loaded, or the mesh does not fit the devices.
        """
        chosen = list(jax.devices() if devices is None else devices)
        self.num_devices = len(chosen)
        self.blueprint = blueprint = Blueprint(model, optimizer, mesh, chosen, seed=seed)
        self.mesh = blueprint.mesh
        super().__init__(
            blueprint.create(),
            blueprint.state_shardings,
            blueprint.kinds,
            blueprint.state_layout,
            blueprint.exchange(wire, rebase),
        )
        self._compiled_steps: dict[tuple[Any, ...], jax.stages.Compiled] = {}  # by shapes of the batch
        self._unfinished: StepHandle | None = None

    def own_rows(self, size: int) -> Sequence[int]:
        """Return which rows of a batch of so many samples this process's devices hold, in their order."""
        return rows_here(self.blueprint.batch_sharding((size,)), size)

    def put_batch(self, batch: Sample, size: int | None = None) -> Batch:
        """Copy a batch to the devices, split over `data` and `fsdp`; returns at once.

        Args:
          batch: arrays [samples, ...] by name.
          size: samples of the whole batch, where `batch` has only those rows that `own_rows` names.
        """
        layout = self.blueprint.batch_sharding
        if size is None:
            return {name: put_array(value, layout(value.shape)) for name, value in batch.items()}
        return {name: put_rows(value, layout((size, *value.shape[1:])), size) for name, value in batch.items()}

    def warm_up(self, shapes: Shapes) -> None:
        """Compile the inner step for batches of these shapes, without running it. May be called from any thread."""
        if _key(shapes) not in self._compiled_steps:
            self._compiled_steps[_key(shapes)] = self.blueprint.lower_step(shapes).compile()

    def step(self, batch: Batch, learning_rate: float, position: int = 0) -> StepHandle:
        """Dispatch one inner step, which consumes the state in place; returns at once.

        A step that nobody waited for is waited for here: more than a few unfinished programs over several emulated
        CPU devices exhaust the thread pool on which their rendezvous depends, and the process aborts.

        Args:
          batch: as `put_batch` gave it.
          position: at which the batch begins in the order of all samples; the model's random streams are made from it,
            so equal positions drop the same. A model without streams does not look at it.
        """
        if self._unfinished is not None:
            jax.block_until_ready(self._unfinished)
        rate = put_array(np.asarray(learning_rate, np.float32), self.blueprint.layout.replicated)
        draw = self.blueprint.put_draw(position)
        program = self._compiled_steps.get(_key(batch), self.blueprint.step)
        with jax.transfer_guard("disallow"):
            self.state, metrics = program(self.state, batch, rate, draw)
        self._unfinished = StepHandle(metrics)
        return self._unfinished

    def wait(self, handle: StepHandle) -> dict[str, float]:
        """Block until a step is done; return `loss`, `grad_norm` and what else the model reports."""
        metrics = jax.device_get(handle.metrics)
        if handle is self._unfinished:
            self._unfinished = None
        return {name: float(value) for name, value in metrics.items()}

    def evaluate(self, batches: Iterable[Sample]) -> dict[str, float]:
        """Compute the mean loss in nats per token over batches; count their tokens.

        In the mode of an evaluation: nothing is dropped, batch statistics are those of this island. A batch weighs as
        much as the model says (its metric `weight`), else as it has tokens to predict, or samples without tokens.

        Raises:
          ValueError: there is no batch, or nothing to predict in any.
        """
        return self.blueprint.mean_loss(self.state.params, self.state.other, batches)


def _key(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, value.shape, value.dtype) for name, value in sorted(batch.items()))
