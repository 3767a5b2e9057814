"""`attach`: an island in a loop that keeps its arrays in an object, such as a Flax module.

    with attach(holder, "syncer:50051", name="a", samples_per_step=B, tokens_per_step=B * T) as island:
        while island.training:
            loss = step(load(island.next_samples()))
            island.after_step(loss)

After each step the island reads and writes only the tensors that are due. `diloco_jax.nnx.attach` builds the holder
of a Flax module.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int64

from diloco_jax.runtime.own_loop.cpu_arrays import CpuArrays
from diloco_jax.runtime.own_loop.enter import LoopOptions, check_options, enter
from diloco_jax.runtime.own_loop.loaders import Batches
from diloco_jax.runtime.own_loop.stepping import SteppedIsland
from diloco_jax.runtime.own_loop.trees import LoopArrays, LoopTensors, check_moments
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.exchanged import Deferred, ExchangedState
from diloco_jax.training.island_state import IslandState
from diloco_jax.training.numpy_exchange.holder import HostHolder
from diloco_jax.training.sharding import LogicalAxes


class Holder(Protocol):
    """An object that holds a loop's JAX arrays, and that the loop trains in place."""

    @property
    def params(self) -> MutableMapping[str, Array]:
        """Return the trained and exchanged parameters by path; reading an entry is cheap, writing one replaces it."""

    @property
    def axes(self) -> Mapping[str, LogicalAxes]:
        """Return the known logical axis names of parameters, by path."""

    def moments(self) -> Any:
        """Return what stays on the island, such as the optimizer's state, as a pytree of arrays; None for nothing.

        It is called when a copy is due, and always returns the same structure.
        """

    def set_moments(self, tree: Any) -> None:
        """Replace what stays on the island with a tree as `moments` returns it."""


class AttachedArrays(LoopArrays, Protocol):
    """The arrays of a holder, as an island exchanges them."""

    def take_loaded(self, held: IslandState) -> None:
        """Give the holder what the island loaded at its start, unless the holder has it already."""

    def metrics(self, given: Any) -> Any:
        """Return a step's metrics as scalars that JAX or NumPy can read."""


class HeldArrays:
    """The arrays of a holder, as an island exchanges them.

    Raises:
        ValueError: As `LoopTensors`.
    """

    def __init__(self, holder: Holder, axes: Mapping[str, LogicalAxes] | None = None) -> None:
        self._holder = holder
        self._tensors = LoopTensors(dict(holder.params), {**holder.axes, **(axes or {})})
        self.shapes, self.kinds, self.devices = self._tensors.shapes, self._tensors.kinds, self._tensors.devices
        self.forms = self._tensors.forms
        moments = holder.moments()
        check_moments(moments)
        self._moments_tree: Any = jax.tree.structure(moments)

    @property
    def initial(self) -> Mapping[str, Array]:
        return self._holder.params

    @property
    def has_moments(self) -> bool:
        return self._moments_tree.num_leaves > 0

    def exchanged(self, wire: Any, rebase: bool) -> ExchangedState:
        """Return the exchanged state, which reads from the holder and writes to it; arguments as for `Island`."""
        params = self._holder.params
        for path in self.shapes:
            # Copies: adoption donates them, and the loop may have the same memory elsewhere, such as in an average.
            params[path] = jnp.copy(params[path])
        if self.has_moments:
            committed = jax.tree.map(self._tensors.committed, self._holder.moments())
            self._holder.set_moments(committed)
            layouts = jax.tree.map(lambda leaf: leaf.sharding, committed)
        else:
            layouts = None
        live: Any = _LiveParams(self._tensors, params)
        return self._tensors.exchanged(live, Deferred(self._moments), layouts, wire, rebase)

    def take_loaded(self, held: IslandState) -> None:
        """Give the holder the moments that the island loaded, if it loaded any."""
        assert isinstance(held, ExchangedState), "`exchanged` makes one"
        loaded: Any = held.state.opt_state
        if not isinstance(loaded, Deferred):
            self._holder.set_moments(loaded)
            held.state = held.state._replace(opt_state=Deferred(self._moments))

    def metrics(self, given: Any) -> Any:
        """Return a step's metrics as they are."""
        return given

    def tree(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters by path, in the loop's layouts."""
        return {path: self._tensors.returned(path, leaf) for path, leaf in params.items()}

    def placed(self, values: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Return canonical CPU values as parameters by path, in the loop's types and layouts."""
        return {path: self._tensors.placed(path, value) for path, value in values.items()}

    def _moments(self) -> Any:
        moments = self._holder.moments()
        if (found := jax.tree.structure(moments)) != self._moments_tree:
            raise ValueError(
                f"the optimizer's state has another structure than when the island joined: {found}, not "
                f"{self._moments_tree}; keep its structure"
            )
        check_moments(moments)
        return moments


class _LiveParams(MutableMapping[str, Array]):
    """Parameters of a holder, checked when they are read, and written in the loop's layouts."""

    def __init__(self, tensors: LoopTensors, params: MutableMapping[str, Array]) -> None:
        self._tensors = tensors
        self._params = params
        for path in self:
            tensors.note(path, params[path], "the island")

    def __getitem__(self, path: str) -> Array:
        leaf = self._params[path]
        self._tensors.note(path, leaf, "after_step()")
        return leaf

    def __setitem__(self, path: str, leaf: Array) -> None:
        self._params[path] = self._tensors.returned(path, leaf)

    def __delitem__(self, path: str) -> None:
        raise TypeError(f"parameter {path!r} belongs to the loop")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.shapes)

    def __len__(self) -> int:
        return len(self._tensors.shapes)


class AttachedIsland:
    """Island of a loop that keeps its arrays in a holder; `attach` creates it. Use it from one thread at a time."""

    def __init__(self, island: SteppedIsland, arrays: AttachedArrays) -> None:
        self._island = island
        self._arrays = arrays

    @property
    def name(self) -> str:
        """Return the name of the island."""
        return self._island.name

    @property
    def config(self) -> RunConfig:
        """Return the config of the run."""
        return self._island.config

    @property
    def incarnation(self) -> int:
        """Return a number that grows with every start of the island.

        It is DILOCO_INCARNATION, as `diloco train` sets it, or the time of the start in milliseconds.
        """
        return self._island.incarnation

    @property
    def global_step(self) -> int:
        """Return the run's global step at the start of the next step; the first access waits for the run's model."""
        self._begin()
        return self._island.global_step

    @property
    def local_step(self) -> int:
        """Return the number of steps that the island has finished since this start."""
        return self._island.local_step

    @property
    def loader(self) -> Batches | None:
        """Return the batches of `loader=` at the restored position; None without a loader.

        The first access waits for the run's model.
        """
        if self._island.loader is not None:
            self._begin()
        return self._island.loader

    @property
    def index(self) -> int:
        """Return the number of this island's shard of own data, below `count`; it is the same at every start."""
        return self._island.place().index

    @property
    def count(self) -> int:
        """Return the number of shards of own data, `islands.count` of the run's config."""
        return self._island.place().count

    @property
    def training(self) -> bool:
        """Return whether the loop must make another step.

        The first access waits for the run's model, and writes it into the holder. If the island has returned, it also
        writes the moments, from the island's newest save or from a healthy peer.

        Raises:
            ValueError: The syncer refuses this island.
            ConnectionError: The syncer cannot be reached.
        """
        self._begin()
        return self._island.may_step()

    @property
    def due(self) -> frozenset[str]:
        """Return the paths of parameters that the next `after_step` will read or write, as far as known now."""
        return self._island.due

    def next_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the samples of the next step: positions of the run's global order, from 0 without end.

        Raises:
            ValueError: The loop reads its own data (`data="own"`).
        """
        self._begin()
        return self._island.next_samples()

    def coming_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the known samples of the steps after the next one, so that a loader can read them ahead.

        Train only on the result of `next_samples`: some of these samples may go to other islands instead.
        """
        return self._island.coming_samples()

    def after_step(self, metrics: Any) -> None:
        """Report a step and exchange the due fragments, in the holder.

        The call waits for the previous step, not for this one. If the devices have not computed this step's metrics
        yet, it reports those of the previous step. It waits for the network only if `protocol.overlap_steps` is 0, or
        for at most `protocol.wait_steps`.

        Args:
            metrics: A scalar loss, or scalars by name with one called `loss`.

        Raises:
            ValueError: An array has another shape, type or layout than before or was donated, there is no loss, or the
                loop did not request its batch.
        """
        self._island.report(lambda: None, self._arrays.metrics(metrics))

    def global_params(self) -> dict[str, Any]:
        """Return the newest global model that this island holds, by path, for an evaluation or a file.

        Raises:
            ValueError: The island holds none yet.
        """
        found: dict[str, Any] = self._island.global_values()
        return found

    def leave(self) -> None:
        """Leave the run with a goodbye, if it is not over; safe to call again.

        Raises:
            ValueError: The syncer had refused this island.
            ConnectionError: The syncer had expelled this incarnation; a new one may join.
        """
        self._island.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._island.close(kind, error, where)

    def _begin(self) -> None:
        if self._island.going is None:
            self._island.begin()
            self._arrays.take_loaded(self._island.held)


def attach(
    holder: Holder | HostHolder,
    syncer: str | None = None,
    *,
    axes: Mapping[str, LogicalAxes] | None = None,
    **options: Unpack[LoopOptions],
) -> AttachedIsland:
    """Join a run as an island whose loop keeps its arrays in `holder`; the loop trains them in place.

    Args:
        holder: The arrays: JAX arrays, each copied once, or a `HostHolder`, such as `NumpyArrays`.
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        axes: Logical axis names of parameters by path, in place of those of the holder.
        options: As for `diloco_jax.join`; `evaluate` gets parameters by path.

    Raises:
        ValueError: An argument is wrong, an array was donated, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The run is complete.
    """
    check_options(options)
    arrays = CpuArrays(holder, axes) if isinstance(holder, HostHolder) else HeldArrays(holder, axes)
    return AttachedIsland(enter(syncer, arrays, options), arrays)
