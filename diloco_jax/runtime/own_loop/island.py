"""`diloco_jax.join`: an island in a user's own training loop, which passes its arrays at every call.

with diloco_jax.join("syncer:50051", name="a", params=params, opt_state=opt_state,
                     samples_per_step=B, tokens_per_step=B * T) as island:
    params, opt_state = island.state().values()
    while island.training:
        batch = load(island.next_samples())
        params, opt_state, metrics = step(params, opt_state, batch, island.global_step)
        params = island.after_step(params, metrics, opt_state=opt_state)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Int64

from diloco_jax.runtime.own_loop.enter import LoopOptions, check_options, enter
from diloco_jax.runtime.own_loop.loaders import Batches
from diloco_jax.runtime.own_loop.stepping import SteppedIsland
from diloco_jax.runtime.own_loop.trees import LoopState
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.state import TrainState
from diloco_jax.transport.link import TransportConfig

# Between two calls only the loop holds the arrays.
NOTHING = TrainState({}, None)


class OwnIsland:
    """An island that a user's loop steps, created by `join`; for one thread at a time."""

    def __init__(self, island: SteppedIsland, state: LoopState) -> None:
        self._island = island
        self._state = state
        # Whether `state` has given the state to the loop.
        self._handed = False

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
        """Return the run's global step at the start of the next step, the same on all hosts; use it for schedules.

        If `train.tokens` ends the run, this is the step of the schedule that fits the tokens merged so far.
        """
        return self._island.global_step

    @property
    def local_step(self) -> int:
        """Return the number of steps that the island has finished since this start."""
        return self._island.local_step

    @property
    def loader(self) -> Batches | None:
        """Return the batches of `loader=` at the restored position; None without a loader.

        Raises:
            ValueError: `state` has not restored the position yet.
        """
        if not self._handed and self._island.loader is not None:
            raise ValueError("island.loader before state(): call state() first, which restores the loader's position")
        return self._island.loader

    @property
    def index(self) -> int:
        """Return the number of this island's shard of own data, below `count`; it is the same at every start."""
        return self._island.place().index

    @property
    def count(self) -> int:
        """Return the number of shards of own data, `islands.count` of the run's config."""
        return self._island.place().count

    def state(self) -> dict[str, Any]:
        """Wait for the state of the first step, and return it as {"params", "opt_state"}.

        The parameters are the global model. If the island has returned, the optimizer's state comes from its newest
        save or from a healthy peer. Otherwise it is the state that `join` got. If `join` got no `opt_state`, the result
        has only "params".

        Raises:
            ValueError: The syncer refuses this island.
            ConnectionError: The syncer cannot be reached.
            RunComplete: The run is complete.
        """
        if self._handed:
            raise ValueError("call state() once, before the first step; after_step() returns the later parameters")
        self._island.begin()
        self._handed, found = True, self._held.state
        given: dict[str, Any] = {"params": self._state.tree(found.params)}
        if found.opt_state is not None:
            given["opt_state"] = self._state.moments(found.opt_state)
        return given

    @property
    def training(self) -> bool:
        """Return whether the loop must make another step."""
        if not self._handed:
            raise ValueError("start with the result of state(): the arguments of join() need not be the run's model")
        self._held.state = NOTHING
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
        return self._island.next_samples()

    def coming_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the known samples of the steps after the next one, so that a loader can read them ahead.

        Train only on the result of `next_samples`: some of these samples may go to other islands instead.
        """
        return self._island.coming_samples()

    def after_step(self, params: Any, metrics: Any, *, opt_state: Any = None) -> Any:
        """Report a step, exchange the due fragments, and return the parameters for the next step.

        The call waits for the previous step, not for this one. If the devices have not computed this step's metrics
        yet, it reports those of the previous step. It waits for the network only if `protocol.overlap_steps` is 0, or
        for at most `protocol.wait_steps`.

        The call may donate the arrays in `params`, so continue with the parameters that it returns.

        Args:
            params: Parameters after the step, in the tree, layout and dtypes that `join` got.
            metrics: A scalar loss, or scalars by name with one called `loss`.
            opt_state: Optimizer state after the step, if `join` got one.

        Raises:
            ValueError: The tree differs, an array was donated, there is no loss, or the loop did not request its batch.
        """
        held = self._held

        def take() -> None:
            held.state = self._state.taken(params, opt_state, "after_step()")

        self._island.report(take, metrics)
        return self._state.tree(held.state.params)

    @property
    def _held(self) -> ExchangedState:
        held = self._island.held
        assert isinstance(held, ExchangedState), "LoopState makes one"
        return held

    def global_params(self) -> Any:
        """Return the newest global model that this island holds, as the loop's tree, for an evaluation.

        Raises:
            ValueError: The island holds none yet.
        """
        return self._island.global_values()

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


def join(
    syncer: str | None = None,
    *,
    name: str | None = None,
    params: Any,
    opt_state: Any = None,
    samples_per_step: int,
    tokens_per_step: int,
    flops_per_step: float = 0.0,
    data: Literal["leased", "own"] = "leased",
    corpus: str = "",
    axes: Mapping[str, LogicalAxes] | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    transport: TransportConfig | None = None,
    run_dir: str | Path | None = None,
    preemption: str = "",
    coordinator: str = "",
    loader: Any = None,
) -> OwnIsland:
    """Make the caller's training loop an island of a run; docs/join.md explains it with examples.

    SIGTERM (in the main thread) or a preemption notice makes `training` false, so that the island leaves the run.

    Args:
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        name: Name of the island, the same at every start. If None, DILOCO_ISLAND.
        params: Trained and exchanged parameters, a pytree of JAX arrays in any layout on one mesh. If the run's config
            names no model, its first island sends the initial values.
        opt_state: State that the island gets back after a restart, such as the optimizer's: any pytree of JAX arrays
            and random keys.
        samples_per_step: Samples of one inner step, over all devices and hosts of the island.
        tokens_per_step: Tokens in these samples. They decide the weight of the island in a merge.
        flops_per_step: Floating-point operations of the model in one step, for the metrics; 0 if unknown.
        data: "leased" if the loop reads the samples of `next_samples`, "own" if it reads any other data.
        corpus: Description of the data, a word or a digest. The syncer refuses an island with another one.
        axes: Logical axis names of parameters by path, such as ("vocab", None) for an embedding, or
            (None, "layers", None) for a stack. The kind of a parameter without names follows from its shape. All
            islands must give the same names; only the positions of stacks may differ.
        evaluate: Function of the tree of `params` that returns a scalar loss, or scalars by name with one `loss`.
        transport: Certificates, token and timeouts of this machine. If None, those of the config file DILOCO_CONFIG.
        run_dir: Folder of tapes and saved states, the same at every start. If None, DILOCO_RUN_DIR; without this
            variable, the run's name below its `runs_dir`.
        preemption: "gce" for notices of Google Cloud, or the path of a file that is a notice once it exists.
        coordinator: Address given to jax.distributed.initialize. If empty, DILOCO_COORDINATOR, or this machine's.
        loader: Loader of own data whose position is saved and restored, or a function (index, count, incarnation) that
            returns one; docs/loaders.md lists them. Read its batches from `island.loader`. It needs data="own".

    Raises:
        ValueError: An argument is wrong, an array was donated, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The syncer cannot be reached, and `run_dir` has the summary of a complete run.
    """
    options: LoopOptions = {
        "name": name,
        "samples_per_step": samples_per_step,
        "tokens_per_step": tokens_per_step,
        "flops_per_step": flops_per_step,
        "data": data,
        "corpus": corpus,
        "evaluate": evaluate,
        "transport": transport,
        "run_dir": run_dir,
        "preemption": preemption,
        "coordinator": coordinator,
        "loader": loader,
    }
    check_options(options)
    state = LoopState(params, opt_state, axes)
    del params, opt_state
    return OwnIsland(enter(syncer, state, options), state)
