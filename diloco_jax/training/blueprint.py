"""Blueprints: the layouts and programs of a model on a mesh, before any array is allocated.

The devices of the mesh may be real, or only described to the compiler (jax.experimental.topologies). So the programs
of a slice can be compiled without the slice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from diloco_jax.core.codec import Format
from diloco_jax.core.kinds import LAYER_AXES, Canonical, Kind, Order, canonical_forms
from diloco_jax.training.data.sample import Sample, Shapes, batch_size, count_predicted
from diloco_jax.training.exchange.exchange import Exchange
from diloco_jax.training.exchanged import by_name
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.protocol import GraphDef, join_model, load_model, logical_axes, split_model
from diloco_jax.training.optimizers import OptimizerConfig, make_inner
from diloco_jax.training.sharding import (
    LogicalAxes,
    MeshConfig,
    MeshLayout,
    make_mesh,
    planned_mesh,
    put_array,
    use_layout,
)
from diloco_jax.training.state import Batch, Metrics, Params, TrainState, Variables
from diloco_jax.training.train_step import (
    WEIGHT,
    make_gradient,
    make_packed_update,
    make_part,
    make_train_step,
    model_loss,
)
from diloco_jax.training.variables import Draw, Streams, draw_of, frozen_variables, other_variables
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.packing import Packing

T = TypeVar("T")
# What to do about a parameter without axis names in a stack of layers.
NAME_THE_AXES = (
    "give all parameters of a layer axis names, such as nnx.with_partitioning(init, (None,)), and this one any name if "
    "it is not a stack"
)


class Blueprint:
    """A model, its inner optimizer and their programs on a mesh."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        mesh: MeshConfig,
        devices: Sequence[jax.Device] | int,
        *,
        seed: int,
    ) -> None:
        """Describe the island, without allocating or compiling anything.

        Args:
          devices: the island's devices, or only their number if nothing will be compiled.
          seed: seed of the initial parameters; equal seeds give equal parameters on any mesh.

        Raises:
          ValueError: the model cannot be loaded, or the mesh does not fit the devices.
        """
        self.mesh = planned_mesh(mesh, devices) if isinstance(devices, int) else make_mesh(mesh, devices)
        self.layout = MeshLayout(self.mesh, mesh.all_rules())
        described = _describe_model(model, seed)
        self.model_config = model
        self._forms = described.forms
        # Parameters whose first canonical axis counts layers.
        self.stacked = frozenset(path for path, names in described.axes.items() if not {*names}.isdisjoint(LAYER_AXES))
        self._shardings = {
            path: self.layout.sharding(value.shape, described.axes[path]) for path, value in described.params.items()
        }
        self.tensors = {path: describe(value, self._shardings[path]) for path, value in described.params.items()}
        tx = make_inner(optimizer, described.params, kinds=self.kinds, orders=self.orders)
        opt_state = jax.eval_shape(tx.init, described.params)
        self.state_shapes = TrainState(described.params, opt_state, described.other)  # type: ignore[arg-type]
        self.state_shardings = self._place(self.state_shapes, described.other_axes)
        self.state_layout = StateLayout(by_name(self.state_shapes))
        # The model's frozen variables, which no state includes.
        self.frozen = {
            path: describe(leaf, self.layout.sharding(leaf.shape, described.other_axes[path]))
            for path, leaf in described.frozen.items()
        }
        self.streams = Streams(seed, described.streams)
        self._graphdef = described.graphdef
        self._make_programs(optimizer, tx)

    def _make_programs(self, optimizer: OptimizerConfig, tx: optax.GradientTransformation) -> None:
        """Describe the model's programs, which JAX compiles at their first use."""
        model, graphdef, streams = self.model_config, self._graphdef, self.streams

        def initial() -> tuple[Params, Variables]:
            module = load_model(model.module, model.args, streams.seed, model.lora)
            return split_model(module)[1], other_variables(module)[0]

        def create() -> TrainState:
            params, other = initial()
            return TrainState(params, tx.init(params), other)

        def loss(params: Params, other: Variables, batch: Batch) -> tuple[Array, Metrics]:
            # A layer needs its stream even in an evaluation, where it draws nothing.
            drawn = streams.at(jnp.asarray(draw_of(0)))
            changing = {path: other[path] for path in self.state_shapes.other}
            mean, (metrics, _) = model_loss(graphdef, params, batch, changing, {**other, **drawn}, evaluate=True)
            return mean, metrics

        def settle(params: Params, other: Variables, batch: Batch, draw: Draw | None, frozen: Variables) -> Variables:
            return model_loss(graphdef, params, batch, other, {**frozen, **streams.at(draw)})[1][1]

        scalar = self.layout.replicated
        # These programs make the initial parameters, the initial other state, and the whole initial state.
        self.draw = jax.jit(lambda: initial()[0], out_shardings=self._shardings)
        self.draw_other = jax.jit(lambda: initial()[1], out_shardings=self.state_shardings.other)
        self.create = jax.jit(create, out_shardings=self.state_shardings)
        # (state, batch, learning rate, draw of `draw_of`, frozen variables) -> (state, metrics); consumes the state.
        # The outputs' layouts are explicit, because the compiler would choose others, and step 2 would have to be
        # compiled again.
        self.step = jax.jit(
            self._traced(make_train_step(graphdef, tx, optimizer.accumulate_steps, self._shardings, streams)),
            donate_argnums=0,
            out_shardings=(self.state_shardings, scalar),
        )
        # The same in two halves: (parameters, batch, draw, frozen variables) -> (packed gradient, metrics), and
        # (state, packed gradient, learning rate) -> (state, metrics), which consumes the state.
        self.packing = packing = Packing(self.tensors, self.mesh)
        gradient_of = make_gradient(graphdef, optimizer.accumulate_steps, self._shardings, streams)
        self.part = jax.jit(self._traced(make_part(gradient_of, packing)), out_shardings=(packing.layouts, scalar))
        self.update = jax.jit(
            self._traced(make_packed_update(tx, packing)),
            donate_argnums=0,
            out_shardings=(self.state_shardings, scalar),
        )
        # (parameters, other state and frozen variables, batch) -> (mean loss, metrics), in evaluation mode
        self.loss = jax.jit(self._traced(loss), out_shardings=scalar)
        # (parameters, other state, batch, draw, frozen variables) -> other state, after a forward pass in training mode
        self.settle = jax.jit(self._traced(settle), out_shardings=self.state_shardings.other)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every canonical parameter (core/kinds.py), by path."""
        return {path: form.shape for path, form in self._forms.items()}

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Return the kind of every parameter, by path."""
        return {path: form.kind for path, form in self._forms.items()}

    @cached_property
    def orders(self) -> dict[str, Order]:
        """Return the stored axes of every parameter in canonical order, by path."""
        return {path: form.order for path, form in self._forms.items()}

    def batch_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the layout of an array in a training batch; ValueError if the mesh does not divide the samples."""
        if shape[0] % self.layout.batch_parts:
            raise ValueError(
                f"a batch of {shape[0]} samples cannot be split over the mesh {dict(self.mesh.shape)}; make the "
                f"batch size a multiple of {self.layout.batch_parts}"
            )
        return self._eval_sharding(shape)

    def put_draw(self, position: int) -> Array | None:
        """Copy the seed of a step's random streams to the devices; None for a model without random streams."""
        return put_array(draw_of(position), self.layout.replicated) if self.streams.kinds else None

    def settled(
        self,
        params: Params,
        other: Variables,
        batches: Iterable[Sample],
        frozen: Mapping[str, Array] = MappingProxyType({}),
    ) -> Variables:
        """Return the model's other state, such as batch statistics, after forward passes with these parameters.

        The passes run in training mode and without updates. A model that has only parameters needs no pass.
        """
        position = 0
        for batch in batches if other else ():
            placed, draw = self._put_whole(batch), self.put_draw(position)
            with jax.transfer_guard("disallow"):
                other = jax.block_until_ready(self.settle(params, other, placed, draw, dict(frozen)))
            position += batch_size(batch)
        return other

    def mean_loss(
        self,
        params: Params,
        other: Variables,
        batches: Iterable[Sample],
        program: Callable[[Params, Variables, Batch], tuple[Array, Metrics]] | None = None,
    ) -> dict[str, float]:
        """Compute the mean loss over batches like `Island.evaluate`, with the given parameters and other state.

        Args:
          other: the other state, and the frozen variables.
          batches: whole batches of any size, the same on every process.
          program: a program like `loss` that is already compiled; `loss` by default.

        Raises:
          ValueError: there is no batch, or none of the batches has anything to predict.
        """
        totals, tokens, program = defaultdict[str, float](float), 0.0, program or self.loss
        for batch in batches:
            placed = self._put_whole(batch)
            with jax.transfer_guard("disallow"):
                found = program(params, other, placed)
            loss, metrics = jax.device_get(found)
            predicted = float(metrics.pop(WEIGHT, count_predicted(batch)))
            for name, value in {**metrics, "loss": loss}.items() if predicted else ():
                totals[name] += float(value) * predicted
            tokens += predicted
        if not tokens:
            raise ValueError("there is nothing to evaluate on: no batch, or none that has anything to predict")
        return {**{name: total / tokens for name, total in totals.items()}, "tokens": tokens}

    def model(self, params: Params, other: Variables) -> nnx.Module:
        """Join the module in evaluation mode, with frozen variables in `other`; call this inside a compiled program."""
        module = join_model(self._graphdef, params, {**other, **self.streams.at(jnp.asarray(draw_of(0)))})
        module.eval()
        return module

    def lower_step(self, shapes: Shapes) -> jax.stages.Lowered:
        """Return the inner step for batches of these shapes, ready to be compiled."""
        batch, draw = self._describe_batch(shapes)
        return self.step.lower(self._described_state, batch, self._described_rate, draw, self.frozen)

    def lower_part(self, shapes: Shapes) -> jax.stages.Lowered:
        """Return the gradient of batches of these shapes, ready to be compiled."""
        return self.part.lower(self.tensors, *self._describe_batch(shapes), self.frozen)

    def lower_update(self) -> jax.stages.Lowered:
        """Return the update with a packed gradient, ready to be compiled."""
        return self.update.lower(self._described_state, self.packing.described, self._described_rate)

    @property
    def _described_state(self) -> TrainState:
        state: TrainState = jax.tree.map(describe, self.state_shapes, self.state_shardings)
        return state

    @property
    def _described_rate(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), np.float32, sharding=self.layout.replicated)

    def _describe_batch(self, shapes: Shapes) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct | None]:
        """Return shapes and layouts of a training batch, and of the seed of its random streams if there are any."""
        batch = {name: describe(shape, self.batch_sharding(shape.shape)) for name, shape in shapes.items()}
        draw = jax.ShapeDtypeStruct((2,), np.uint32, sharding=self.layout.replicated) if self.streams.kinds else None
        return batch, draw

    def lower_loss(self, shapes: Shapes) -> jax.stages.Lowered:
        """Return the evaluation of batches of these shapes, ready to be compiled."""
        layouts = self.state_shardings.other
        other = {**jax.tree.map(describe, self.state_shapes.other, layouts), **self.frozen}
        batch = {name: describe(shape, self._eval_sharding(shape.shape)) for name, shape in shapes.items()}
        return self.loss.lower(self.tensors, other, batch)

    def _eval_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the layout of an array in a batch of any size, split as far as the mesh divides it."""
        return self.layout.sharding(shape, ("batch", *(None,) * (len(shape) - 1)))

    def _put_whole(self, batch: Sample) -> Batch:
        return {name: put_array(value, self._eval_sharding(value.shape)) for name, value in batch.items()}

    def exchange(self, wire: Format, rebase: bool) -> Exchange:
        """Return the programs that take fragments out of the island and bring them in (`Exchange`)."""
        return Exchange(self.tensors, wire, rebase, self.orders)

    def _traced(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function, traced with this island's layout in use, which `constrain` reads."""

        @wraps(function)
        def wrapped(*args: Any) -> T:
            with use_layout(self.layout):
                return function(*args)

        return wrapped

    def _place(self, state: TrainState, axes: Mapping[str, LogicalAxes]) -> Any:
        """Return the layouts of a TrainState.

        An array that the optimizer keeps for a parameter, in its shape, has the parameter's layout; the rest of the
        optimizer's state is replicated. The layout of the model's other state follows from its axis names.
        """

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in self.tensors]
            same = bool(names) and self.tensors[names[-1]].shape == tuple(leaf.shape)
            return self._shardings[names[-1]] if same else self.layout.replicated

        opt_state = jax.tree_util.tree_map_with_path(place, state.opt_state)
        other = {path: self.layout.sharding(tuple(leaf.shape), axes[path]) for path, leaf in state.other.items()}
        return TrainState(self._shardings, opt_state, other)  # type: ignore[arg-type]


def describe(leaf: jax.ShapeDtypeStruct | np.ndarray, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf together with a layout."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class _Description(NamedTuple):
    graphdef: GraphDef
    # Sorted by path.
    params: dict[str, jax.ShapeDtypeStruct]
    # The state beside the parameters, sorted by path.
    other: dict[str, jax.ShapeDtypeStruct]
    streams: dict[str, jax.ShapeDtypeStruct]
    # The frozen variables, sorted by path.
    frozen: dict[str, jax.ShapeDtypeStruct]
    axes: dict[str, LogicalAxes]
    # Of the state beside the parameters, and of the frozen variables.
    other_axes: dict[str, LogicalAxes]
    forms: dict[str, Canonical]


def _describe_model(config: ModelConfig, seed: int) -> _Description:
    """Return structure, shapes and axis names of a model, without allocating a parameter."""
    found: list[tuple[GraphDef, dict[str, LogicalAxes]]] = []

    def build() -> tuple[Params, Variables, Variables, Variables]:
        model = load_model(config.module, config.args, seed, config.lora)
        graphdef, params = split_model(model)
        found.append((graphdef, logical_axes(model)))
        return params, *other_variables(model), frozen_variables(model)

    params, other, streams, frozen = jax.eval_shape(build)
    for path, value in params.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"parameter '{path}' of '{config.module}' is {value.dtype}; only floats can be merged")
    graphdef, all_axes = found[0]
    # JAX sorts dicts in this order too.
    params, other, frozen = (dict(sorted(each.items())) for each in (params, other, frozen))
    axes = {path: all_axes[path] for path in params}
    other_axes = {path: all_axes[path] for path in (*other, *frozen)}
    shapes = {path: tuple(value.shape) for path, value in params.items()}
    forms = canonical_forms(shapes, {path: names for path, names in axes.items() if any(names)}, NAME_THE_AXES)
    return _Description(graphdef, params, other, streams, frozen, axes, other_axes, forms)
