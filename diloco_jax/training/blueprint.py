"""What an island is before it has an array: a model on a mesh, with the layouts and programs that belong to it.

The devices of the mesh may be real ones, or those that a compiler merely knows (jax.experimental.topologies): so the
programs which a slice will run can be compiled without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from diloco_jax.core.codec import Format
from diloco_jax.training.exchange import Exchange
from diloco_jax.training.models.protocol import (
    GraphDef,
    ModelConfig,
    load_model,
    logical_axes,
    split_model,
)
from diloco_jax.training.optimizers import OptimizerConfig, make_inner
from diloco_jax.training.sharding import Layout, LogicalAxes, MeshConfig, make_mesh, planned_mesh, use_layout
from diloco_jax.training.state_bytes import StateLayout
from diloco_jax.training.train_step import TrainState, make_train_step, model_loss

T = TypeVar("T")
PARAMS, OPTIMIZER = "params/", "optimizer/"  # what the names of a state's leaves begin with


class Blueprint:
    """A model, its inner optimizer and their programs on a mesh.

    Attributes:
      mesh: of the island.
      layout: where arrays with logical axes lie.
      shapes: of every parameter, by path.
      stacked: paths of the parameters whose leading axis is that of layers.
      tensors: shape, dtype and layout of every parameter, by path.
      state_shapes: a TrainState of shapes and dtypes.
      state_shardings: a TrainState of layouts.
      state_layout: how a whole state leaves the island.
      create: the program that draws the initial state.
      step: the inner step, (state, batch, learning rate) -> (state, metrics); consumes the state.
      loss: (parameters, batch) -> mean loss.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        mesh: MeshConfig,
        devices: Sequence[jax.Device] | int,
        *,
        seed: int,
    ) -> None:
        """Describe the island; nothing is allocated and nothing compiled.

        Args:
          model: which model.
          optimizer: which inner optimizer.
          mesh: how the devices are used.
          devices: of the island; only how many, if nothing will be compiled.
          seed: of the initial parameters; equal seeds give equal parameters on any mesh.

        Raises:
          ValueError: the model cannot be loaded, or the mesh does not fit the devices.
        """
        self.mesh = planned_mesh(mesh, devices) if isinstance(devices, int) else make_mesh(mesh, devices)
        self.layout = Layout(self.mesh, mesh.all_rules())
        described = _describe_model(model, seed)
        self.shapes = {path: tuple(value.shape) for path, value in described.params.items()}
        self.stacked = frozenset(path for path, names in described.axes.items() if names[:1] == ("layers",))
        self._shardings = {
            path: self.layout.sharding(self.shapes[path], names) for path, names in described.axes.items()
        }
        self.tensors = {path: describe(value, self._shardings[path]) for path, value in described.params.items()}
        tx = make_inner(optimizer, described.params, stacked=described.stacked)
        opt_state = jax.eval_shape(tx.init, described.params)
        self.state_shapes = TrainState(described.params, opt_state)  # type: ignore[arg-type]
        self.state_shardings = self._place(self.state_shapes)
        self.state_layout = StateLayout(by_name(self.state_shapes))

        def create() -> TrainState:
            params = split_model(load_model(model.module, model.args, seed))[1]
            return TrainState(params, tx.init(params))

        scalar = self.layout.replicated
        self.create = jax.jit(create, out_shardings=self.state_shardings)
        # Explicit layouts of the outputs: those that the compiler would choose differ, and step 2 compiles again.
        self.step = jax.jit(
            self._traced(make_train_step(described.graphdef, tx, optimizer.accumulate_steps, self._shardings)),
            donate_argnums=0,
            out_shardings=(self.state_shardings, scalar),
        )
        self.loss = jax.jit(
            self._traced(lambda params, batch: model_loss(described.graphdef, params, batch)[0]), out_shardings=scalar
        )

    def batch_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Layout of a batch of tokens of this shape.

        Raises:
          ValueError: the devices cannot share it equally.
        """
        if shape[0] % self.layout.batch_parts:
            raise ValueError(
                f"a batch of {shape[0]} sequences cannot be split over the mesh {dict(self.mesh.shape)}; make the "
                f"batch size a multiple of {self.layout.batch_parts}"
            )
        return self.layout.sharding(shape, ("batch", None))

    def lower_step(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """The inner step for batches of this shape, (sequences, length + 1), ready to be compiled."""
        state = jax.tree.map(describe, self.state_shapes, self.state_shardings)
        batch = {"tokens": jax.ShapeDtypeStruct(shape, np.int32, sharding=self.batch_sharding(shape))}
        rate = jax.ShapeDtypeStruct((), np.float32, sharding=self.layout.replicated)
        return self.step.lower(state, batch, rate)

    def exchange(self, wire: Format, rebase: bool) -> Exchange:
        """The programs with which fragments leave and enter; see `Exchange`."""
        return Exchange(self.tensors, wire, rebase)

    def _traced(self, function: Callable[..., T]) -> Callable[..., T]:
        """Let `constrain` know the mesh while the function is traced."""

        @wraps(function)
        def wrapped(*args: Any) -> T:
            with use_layout(self.layout):
                return function(*args)

        return wrapped

    def _place(self, state: TrainState) -> Any:
        """Layouts of a TrainState: what the optimizer keeps per parameter lies like it, the rest is replicated."""

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in self.shapes]
            same = bool(names) and self.shapes[names[-1]] == tuple(leaf.shape)
            return self._shardings[names[-1]] if same else self.layout.replicated

        opt_state = jax.tree_util.tree_map_with_path(place, state.opt_state)
        return TrainState(self._shardings, opt_state)  # type: ignore[arg-type]


def describe(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """The leaf with a layout."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def by_name(state: TrainState) -> dict[str, Any]:
    """The leaves of a state by the names under which they leave the island, in the order of the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.opt_state)
    named = {OPTIMIZER + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the optimizer's state have one name"
    return {**{PARAMS + path: value for path, value in state.params.items()}, **named}


class _Description(NamedTuple):
    graphdef: GraphDef
    params: dict[str, jax.ShapeDtypeStruct]  # sorted by path, as JAX sorts dicts
    axes: dict[str, LogicalAxes]
    stacked: dict[str, int]  # by path, how many leading axes count layers or experts


def _describe_model(config: ModelConfig, seed: int) -> _Description:
    """Structure, shapes and axis names of a model, without allocating a parameter."""
    found: list[tuple[GraphDef, dict[str, LogicalAxes]]] = []

    def build() -> dict[str, Array]:
        model = load_model(config.module, config.args, seed)
        graphdef, params = split_model(model)
        found.append((graphdef, logical_axes(model)))
        return params

    params = jax.eval_shape(build)
    for path, value in params.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"parameter '{path}' of '{config.module}' is {value.dtype}; only floats can be merged")
    graphdef, axes = found[0]
    stacked = {path: sum(name in ("layers", "expert") for name in names) for path, names in axes.items()}
    return _Description(graphdef, dict(sorted(params.items())), dict(sorted(axes.items())), stacked)
