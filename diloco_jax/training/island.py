"""An island: one model on one mesh. Trains, hands fragments out, takes merged fragments in; knows of no other island.

    handle = island.step(island.put_batch(tokens), learning_rate)     one donated program; returns at once
    staged = island.stage(fragment)                                   queued before the next step, no host sync
    island.wait(handle)                                               {"loss": ..., "grad_norm": ...}
    staged.encode()                                                   in any thread: anchor - local as it is sent
    island.adopt(fragment, values, sent=staged)                       between two steps
    island.stage_state(), island.load_state(state)                    the same for everything, optimizer included

Call everything but `warm_up` and the methods of what was staged from one thread. Parameters live as a flat dict
{path: array}, which costs a tenth of the host time per step that a module tree does. Every program runs under a
transfer guard: nothing crosses between host and device but by the functions above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int32, Shaped

from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.fragments import Fragment, Slice, take
from diloco_jax.training.blueprint import OPTIMIZER, OTHER, PARAMS, Blueprint, by_name
from diloco_jax.training.exchange.exchange import AdoptMode, HostValues
from diloco_jax.training.exchange.outgoing import StagedFragment
from diloco_jax.training.models.protocol import Batch, Metrics, ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig, put_array
from diloco_jax.training.whole_state.staging import StagedState, stage_leaves


class StepHandle(NamedTuple):
    """A dispatched step; give it to `Island.wait`."""

    metrics: Metrics


class Island:
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
          model: which model.
          optimizer: which inner optimizer.
          mesh: how the devices are used.
          seed: of the initial parameters; equal seeds give equal parameters on any mesh.
          devices: the island's devices, all that JAX sees if not given.
          wire: format in which fragments leave the island.
          rebase: whether fragments will be adopted with mode "rebase", for which staged ones are kept on the devices.

        Raises:
          ValueError: the model cannot be loaded, or the mesh does not fit the devices.
        """
        chosen = list(jax.devices() if devices is None else devices)
        self.num_devices = len(chosen)
        self._blueprint = blueprint = Blueprint(model, optimizer, mesh, chosen, seed=seed)
        self.mesh = blueprint.mesh
        self.shapes = blueprint.shapes
        self.kinds = blueprint.kinds
        self.state_layout = blueprint.state_layout
        self.state = blueprint.create()
        self.exchange = blueprint.exchange(wire, rebase)
        self._compiled_steps: dict[tuple[int, ...], jax.stages.Compiled] = {}  # by shape of the batch
        self._unfinished: StepHandle | None = None

    # ---- training ---------------------------------------------------------------------------------------------

    def put_batch(self, tokens: Int32[np.ndarray, "b t"]) -> Batch:
        """Copy a batch to the devices, split over `data` and `fsdp`; returns at once.

        Args:
          tokens: int32 [batch, length + 1].

        Raises:
          ValueError: the devices cannot share the batch equally.
        """
        return self._blueprint.put_batch(tokens)

    def warm_up(self, shape: tuple[int, int], fragments: Iterable[Fragment] = ()) -> None:
        """Compile the inner step for batches of this shape, and what `stage` and `adopt` need; without running them.

        May be called from any thread, at any time.

        Args:
          shape: (sequences, length + 1), as `put_batch` gets them.
          fragments: that will be staged and adopted.
        """
        self._compiled_steps[shape] = self._blueprint.lower_step(shape).compile()
        self.exchange.warm_up(fragments)

    def step(self, batch: Batch, learning_rate: float, position: int = 0) -> StepHandle:
        """Dispatch one inner step, which consumes the state in place; returns at once.

        A step that nobody waited for is waited for here: more than a few unfinished programs over several emulated
        CPU devices exhaust the thread pool on which their rendezvous depends, and the process aborts.

        Args:
          batch: as `put_batch` gave it.
          learning_rate: of this step.
          position: at which the batch begins in the order of all samples; the model's random streams are made from it,
            so equal positions drop the same. A model without streams does not look at it.
        """
        if self._unfinished is not None:
            jax.block_until_ready(self._unfinished)
        rate = put_array(np.asarray(learning_rate, np.float32), self._blueprint.layout.replicated)
        draw = self._blueprint.put_draw(position)
        program = self._compiled_steps.get(batch["tokens"].shape, self._blueprint.step)
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

    def evaluate(self, batches: Iterable[Int32[np.ndarray, "b t"]]) -> dict[str, float]:
        """Compute the mean loss in nats per token over batches int32 [batch, length + 1]; count their tokens.

        In the mode of an evaluation: nothing is dropped, batch statistics are those of this island.

        Raises:
          ValueError: there is no batch.
        """
        return self._blueprint.mean_loss(self.state.params, self.state.other, batches)

    # ---- the border to the host -------------------------------------------------------------------------------

    def stage(self, fragment: Fragment) -> StagedFragment:
        """Queue a fragment's update, as it is after the newest step, to host memory; returns at once.

        The update is what the fragment was when it was last adopted, minus what it is now, plus what rounding kept
        back of earlier ones (outgoing.py).
        """
        with jax.transfer_guard("disallow"):
            return self.exchange.stage(self.state.params, fragment)

    def adopt(
        self,
        fragment: Fragment,
        values: HostValues,
        *,
        mode: AdoptMode = "overwrite",
        alpha: float = 0.0,
        sent: StagedFragment | None = None,
    ) -> None:
        """Replace a fragment by a merged one, between two steps.

            overwrite   local = new
            blend       local = alpha local + (1 - alpha) new
            rebase      local = new + (local - local when sent)      keeps the steps made while the fragment travelled

        Args:
          fragment: which part of the parameters.
          values: the merged fragment, {slice key: float32 array}.
          mode: how the merged fragment meets the local one.
          alpha: share of the local values, in [0, 1]; only for blend.
          sent: the staged copy that went into the merged fragment, if one did: what rounding kept back of it counts
            from now on. Rebase needs it.

        Raises:
          ValueError: values of other names or shapes, or rebase without what was sent.
        """
        updated = self.exchange.adopt(self.state.params, fragment, values, mode, alpha, sent)
        self.state = self.state._replace(params=self.state.params | updated)

    def _overwrite(self, fragment: Fragment, values: HostValues) -> None:
        updated = self.exchange.overwrite(self.state.params, fragment, values)
        self.state = self.state._replace(params=self.state.params | updated)

    def stage_state(self) -> StagedState:
        """Queue a copy of parameters, optimizer's and other state to host memory; returns at once."""
        with jax.transfer_guard("disallow"):
            return stage_leaves(by_name(self.state), self.state_layout)

    def load_state(
        self, state: Bytes | Mapping[str, Shaped[np.ndarray, "..."]], fragments: Iterable[Fragment] | None = None
    ) -> None:
        """Take over the optimizer's and other state, and parameters, of an island of the same model on any mesh.

        Args:
          state: what a `StagedState` gave, as bytes or as {leaf name: array}.
          fragments: which parameters to take; all if not given.

        Raises:
          ValueError: names, dtypes, shapes or sizes are not those of this island, which is unchanged then.
        """
        chosen = [self._whole()] if fragments is None else fragments
        self.load_leaves(self.state_layout.read(state).__getitem__, chosen)

    def load_leaves(self, leaf: Callable[[str], Shaped[np.ndarray, "..."]], fragments: Iterable[Fragment]) -> None:
        """Take over a state that is known to be of this island's layout, as `load_state`; look up a leaf at a time."""
        # The old state goes first: a device need not have room for two. Nothing can be refused from here on.
        self.state = self.state._replace(opt_state=None, other={})
        lies = self._blueprint.state_shardings
        moments = [put_array(leaf(name), to) for name, to in by_name(lies).items() if name.startswith(OPTIMIZER)]
        opt_state = jax.tree.unflatten(jax.tree.structure(lies.opt_state), moments)
        other = {path: put_array(leaf(OTHER + path), to) for path, to in lies.other.items()}
        self.state = self.state._replace(opt_state=opt_state, other=other)
        for fragment in fragments:
            params = {path: leaf(PARAMS + path) for path in {part.path: None for part in fragment.slices}}
            self._overwrite(fragment, take(params, fragment))

    def parameters(self) -> HostValues:
        """Return host copies of all parameters {path: float32 array}; block until the running step is done.

        Only on an island of one process.
        """
        return {path: np.array(value, np.float32) for path, value in jax.device_get(self.state.params).items()}

    def load(self, params: Mapping[str, Float[np.ndarray, "..."]]) -> None:
        """Replace all parameters; the optimizer's state stays.

        Raises:
          ValueError: paths or shapes are not those of the model.
        """
        if unknown := sorted(set(params) - set(self.shapes)):
            raise ValueError(f"parameters {unknown[:3]} are not in the model; were they saved from another one?")
        self._overwrite(self._whole(), dict(params))

    def _whole(self) -> Fragment:
        shapes = {path: shape for path, shape in self.shapes.items() if math.prod(shape)}
        slices = tuple(Slice(path, -1, 0, shape[0] if shape else 0) for path, shape in shapes.items())
        return Fragment(-1, slices, tuple(shapes.values()), sum(math.prod(shape) for shape in shapes.values()))
