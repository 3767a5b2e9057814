"""`diloco_jax.join`: an island in a user's own training loop.

    with diloco_jax.join("syncer:50051", name="a", params=params, opt_state=opt_state,
                         samples_per_step=B, tokens_per_step=B * T) as island:
        params, opt_state = island.state().values()
        while island.training:
            batch = load(island.next_samples())
            params, opt_state, metrics = step(params, opt_state, batch, island.global_step)
            params = island.after_step(params, metrics, opt_state=opt_state)

The loop steps; everything else of a learner is shared with the built-in loop (runtime/learner/joined.py). On an island
of several processes, every process calls the same methods in the same order: the first one leads, the others follow.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax
import numpy as np
from jaxtyping import Int64

from diloco_jax.core.fragments import put
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import STOPPED_OUTSIDE
from diloco_jax.runtime.island.evaluation import OwnEvaluation, scalars
from diloco_jax.runtime.island.follower import Follower
from diloco_jax.runtime.island.host import Ranges
from diloco_jax.runtime.island.join import die, meet
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner.effects import Signals
from diloco_jax.runtime.learner.joined import Joined, Joining, StepSize, island_pulse
from diloco_jax.runtime.learner.metrics import own_metrics
from diloco_jax.runtime.learner.preemption import check_source, watch
from diloco_jax.runtime.own_loop.introduce import introduce
from diloco_jax.runtime.own_loop.loaders import Batches, loader_of
from diloco_jax.runtime.own_loop.place import Place, find_place
from diloco_jax.runtime.own_loop.surroundings import look, unless_typed
from diloco_jax.runtime.own_loop.trees import LoopState
from diloco_jax.runtime.records.signals import die_with_parent, stop_on_sigterm
from diloco_jax.training.sharding import LogicalAxes
from diloco_jax.training.train_step import TrainState
from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.link import TransportConfig

# A loop may read the samples of this many steps ahead.
COMING_STEPS = 8
# JAX's messages for an array whose memory was given away.
DELETED = ("has been deleted", "deleted or donated")
USED_UP = (
    "an array was used after its memory had been given away: after_step() uses up the parameters that it gets, so "
    "continue with what after_step() returns (params = island.after_step(...)); a step with donate_argnums uses up its "
    "inputs likewise"
)
STOPS = (KeyboardInterrupt, SystemExit)
REASON_MAX = 100  # letters
# Between two calls only the loop holds the arrays.
NOTHING = TrainState({}, None)
# What is known of the data of a loop that reads its own: its loader's state is saved and restored, or nothing.
RESUMED, OWN = "resumed", "own"

log = logging.getLogger(__name__)


class OwnIsland:
    """An island that a user's loop steps, created by `join`; for one thread at a time.

    Attributes:
        name: Name of the island.
        config: Config of the run.
        global_step: The run's global step when the next step starts, the same on all hosts; use it for schedules. With
            a budget of tokens it is the step that corresponds to the merged tokens.
        loader: The batches of the loader that `join` got, from the restored position on; None without one.
    """

    def __init__(
        self,
        joining: Joining,
        state: LoopState,
        stop: threading.Event,
        size: StepSize,
        data: str,
        flops_per_step: float,
        evaluate: Callable[[Any], Any] | None,
        place: Callable[[], Place],
        loader: Batches | None = None,
    ) -> None:
        self.name = joining.learner_id
        self.config = config = joining.config
        self.global_step = 0
        self.loader = loader
        self._place = place
        self._pulse = joining.pulse
        self._state = state
        self._stop = stop
        self._leased = data == "leased"
        if state.has_moments and not config.protocol.snapshot_every:
            log.warning(
                "protocol.snapshot_every is 0: opt_state is not saved, and is lost once all islands have stopped"
            )
        self._held = state.exchanged(config.wire.up, config.adopt.mode == "rebase")
        self._batch = Batch((), 0)
        self._ahead: Ranges = ()
        # Whether the loop requested the samples of the coming step.
        self._asked = False
        # Whether `state` has given the state to the loop.
        self._handed = False
        self._going: bool | None = None
        self._ready_s = 0.0
        self._undo = ExitStack()
        self._undo.callback(self._pulse.close)
        self._undo.callback(stop_on_sigterm(stop))
        self._pulse.rest()
        # The island has several processes.
        self._several = joining.hosts is not None
        evaluation = OwnEvaluation(evaluate, state.given_back) if evaluate is not None else None
        self._host = joining.host(self._held, None, evaluation, stop)
        self._host.loader = loader
        # The first process leads, the others follow.
        self._side: Joined | Follower | None
        if joining.hosts is not None and joining.hosts.host:
            self._side = joining.follower(self._host, stop, self._take_ranges)
        else:
            signals, flops_per_token = Signals(stop), flops_per_step / size.tokens
            metrics = own_metrics(self._host.run.config, self.name, state.devices, flops_per_token)
            self._side = Joined(joining, self._host, size, signals, PayloadSender(signals.fail), metrics)
            if not self._leased:
                self._side.reads(RESUMED if loader is not None and config.protocol.snapshot_every else OWN)

    @property
    def index(self) -> int:
        """The number of this island's shard of own data, below `count`: the same at every start."""
        return self._place().index

    @property
    def count(self) -> int:
        """The number of shards of own data, `islands.count` of the run's config."""
        return self._place().count

    def state(self) -> dict[str, Any]:
        """Wait for the state of the first step, and return it as {"params", "opt_state"}.

        The parameters are the global model. The optimizer's state of a returning island is that of its newest save or
        of a healthy peer; otherwise it is the one that `join` got. Without an `opt_state` in `join`, the result has
        "params" alone.

        Raises:
            ValueError: The syncer refuses this island.
            ConnectionError: The syncer cannot be reached.
        """
        if self._handed:
            raise ValueError("call state() once, before the first step; after_step() returns the later parameters")
        if self._going is None:
            with self._pulse.step():
                self._begin()
        self._handed, found = True, self._held.state
        given: dict[str, Any] = {"params": self._state.given_back(found.params)}
        if found.opt_state is not None:
            given["opt_state"] = found.opt_state
        return given

    @property
    def training(self) -> bool:
        """Tell whether the loop shall make another step."""
        if not self._handed:
            raise ValueError("start with the result of state(): the arguments of join() need not be the run's model")
        self._held.state = NOTHING
        # The watchdog ignores the loop after its last step.
        if not self._going:
            self._pulse.rest()
        return bool(self._going)

    def next_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the samples of the next step: positions of the run's global order, from 0 without end.

        Raises:
            ValueError: The loop reads its own data (`data="own"`).
        """
        if not self._leased:
            raise ValueError('this island was joined with data="own"; read your own data, or join with data="leased"')
        if not self._going:
            raise ValueError("next_samples() before state(), or after the end: call it only while island.training")
        self._asked = True
        return _positions(self._batch.ranges)

    def coming_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the known samples of the steps after the next one, so that a loader can read them ahead.

        Train only on the result of `next_samples`: some of these samples may go to other islands instead.
        """
        return _positions(self._ahead)

    def after_step(self, params: Any, metrics: Any, *, opt_state: Any = None) -> Any:
        """Report a step, exchange the due fragments, and return the parameters for the next step.

        The call waits for the step, but not for the network (except in lockstep, `protocol.overlap_steps: 0`). It uses
        up the given parameters where a fragment arrived, so continue with the returned ones.

        Args:
            params: Parameters after the step, in the tree, layout and dtypes that `join` got.
            metrics: A scalar loss, or scalars by name with one called `loss`.
            opt_state: Optimizer state after the step, if `join` got one.

        Raises:
            ValueError: The tree differs, an array was donated, there is no loss, or the loop did not request its batch.
        """
        if not self._going:
            raise ValueError("after_step() without a step: call it only while island.training")
        if self._leased and not self._asked:
            raise ValueError('next_samples() was not called for this step; call it, or join with data="own"')
        with self._pulse.step():
            if self.loader is not None:
                self.loader.stepped()
            self._held.state = self._state.taken(params, opt_state, "after_step()")
            values = scalars(metrics)
            side = self._side
            if isinstance(side, Joined):
                took_s = time.monotonic() - self._ready_s
                self._next(side, side.stepped(self._batch, self.global_step, values, took_s))
            else:
                self._follow()
            return self._state.given_back(self._held.state.params)

    def global_params(self) -> Any:
        """Return the newest global model that this island holds, as the loop's tree, for an evaluation.

        Raises:
            ValueError: The island holds none yet.
        """
        if len(self._host.anchors) < len(self._host.fragments):
            raise ValueError("global_params(): the island holds no global model yet; call state() first")
        values = {path: np.zeros(shape, np.float32) for path, shape in self._state.shapes.items()}
        for fragment in self._host.fragments:
            values = put(values, fragment, self._host.anchors[fragment.fragment_id])
        return self._state.placed(values)

    def leave(self) -> None:
        """Leave the run with a goodbye, if it is not over; safe to call again.

        Raises:
            ValueError: The syncer had refused this island.
            ConnectionError: The syncer had expelled this incarnation; a new one may join.
        """
        self._leave(STOPPED_OUTSIDE)

    def _leave(self, reason: str) -> None:
        side, self._side = self._side, None
        try:
            if isinstance(side, Follower):
                self._stop.set()
                # The leader decides when the island ends.
                while side.next_step() is not None:
                    pass
                side.leave()
            elif side is not None:
                if self._going:
                    self._stop.set()
                side.leave(reason)
                side.check_end()
        finally:
            self._undo.close()
        self._going = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.leave()
            return
        if error is not None and any(words in str(error) for words in DELETED):
            error.add_note(USED_UP)
        # The other processes may wait for this one in a collective, forever.
        if self._several:
            traceback.print_exception(kind, error, where)
            die(f"host {jax.process_index()} failed")
        try:
            self._leave(STOPPED_OUTSIDE if kind in STOPS else f"its loop failed: {kind.__name__}"[:REASON_MAX])
        # The user needs to see the loop's own error, so this one is only logged.
        except Exception as other:
            log.warning(f"{self.name}: {other!r}")

    def _begin(self) -> None:
        side = self._side
        if side is None:
            raise ValueError("this island has left its run; join again")
        if isinstance(side, Joined):
            going = side.begin()
            side.check_end()
            if going and self.loader is not None:
                side.resume_loader()
            self._next(side, going)
        else:
            self._follow()

    def _next(self, joined: Joined, going: bool) -> None:
        """Send the next step to the other hosts, if there is one."""
        self._going, self._asked = going, False
        if not going:
            return
        self.global_step = joined.machine.schedule_step
        self._batch = joined.take_batch()
        self._ahead = joined.upcoming(COMING_STEPS) if self._leased else ()
        self._host.tell_batch(self._batch.ranges, self._ahead)
        self._host.tell_step(self.global_step)
        self._ready_s = time.monotonic()

    def _follow(self) -> None:
        assert isinstance(self._side, Follower), "another host leads"
        clock = self._side.next_step()
        self._going, self._asked = clock is not None, False
        self.global_step = self.global_step if clock is None else clock

    def _take_ranges(self, ranges: Ranges, ahead: Ranges) -> None:
        self._batch, self._ahead = self._batch._replace(ranges=tuple((start, stop) for start, stop in ranges)), ahead


def _positions(ranges: Ranges) -> Int64[np.ndarray, " samples"]:
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in ranges)])


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
    """Join a run as an island that the caller's own loop steps; docs/join.md explains it with examples.

    SIGTERM or a preemption notice makes `training` false, so that the loop ends and the island leaves the run.

    Args:
        syncer: host:port of the syncer. None: DILOCO_SYNCER, as `diloco train` sets it (islands.command).
        name: Name of the island, the same at every start. None: DILOCO_ISLAND.
        params: Trained and exchanged parameters, a pytree of JAX arrays in any layout on one mesh. If the run's config
            names no model, its first island sends the initial values.
        opt_state: Other state of a returning island, such as the optimizer's: any pytree of arrays. None: a returning
            island gets only parameters.
        samples_per_step: Samples of one inner step, over all devices and hosts of the island.
        tokens_per_step: Tokens in these samples, which weigh the island's merges.
        flops_per_step: Floating-point operations of the model in one step, for the metrics; 0 if unknown.
        data: "leased": the loop reads the samples of `next_samples`, so that every sample of the run has one fate.
            "own": it reads any data.
        corpus: Description of the data, a word or a digest that all islands must share.
        axes: Logical axis names of parameters by path, such as ("vocab", "embed") for an embedding, which is averaged,
            or ("layers", None, None) for a stack; unnamed ones follow from the shape. The same on all islands.
        evaluate: Function that evaluates the global model, given as the tree of `params`; see docs/join.md.
        transport: Certificates, token and timeouts of this machine; its address is not used.
        run_dir: Folder of tapes and saved states, the same at every start. None: DILOCO_RUN_DIR, else the run's name.
        preemption: "gce", or a file whose appearance is a notice of preemption.
        coordinator: Address given to jax.distributed.initialize. "": DILOCO_COORDINATOR, or this machine's address.
        loader: Loader of own data whose position is saved and restored, or a function (index, count, incarnation) that
            returns one; docs/loaders.md lists them. Read its batches from `island.loader`. It needs data="own".

    Raises:
        ValueError: An argument is wrong, an array was donated, or the run has another model.
        ConnectionError: The syncer cannot be reached.
    """
    here = look(syncer, name, run_dir, coordinator)
    sizes = {"samples_per_step": samples_per_step, "tokens_per_step": tokens_per_step}
    _check(sizes, data, loader)
    state = LoopState(params, opt_state, axes)
    del params, opt_state
    own = replace(transport or here.transport, address=here.syncer)
    await_listener(own, here.given_by, log.warning)
    config = unless_typed(introduce(own, here.name, state.params, state.kinds))
    die_with_parent()
    incarnation, hosts = here.incarnation, None
    if jax.process_count() > 1:
        same = {"data": data, **{what: str(count) for what, count in sizes.items()}}
        hosts = meet(config, here.name, incarnation, here.coordinator, same)
        incarnation = hosts.incarnation
    stop = threading.Event()
    if preemption:
        watch(check_source(preemption), stop)
    folder = here.run_dir or Path(config.runs_dir) / config.name
    pulse = island_pulse(config, folder, here.name, 0 if hosts is None else hosts.host)
    joining = Joining(config, here.name, incarnation, own.address, folder, pulse, hosts)
    size = StepSize(samples_per_step, tokens_per_step, corpus)
    place = cache(partial(find_place, own, config, here.name))
    batches = loader_of(loader, place, incarnation)
    return OwnIsland(joining, state, stop, size, data, flops_per_step, evaluate, place, batches)


def _check(sizes: Mapping[str, int], data: str, loader: Any) -> None:
    for what, count in sizes.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{what} is {count!r}; give a whole number from 1")
    if data not in ("leased", "own"):
        raise ValueError(f'data is {data!r}; use "leased" or "own"')
    if loader is not None and data != "own":
        raise ValueError('a loader= reads data of its own order: give data="own" with it, or leave it out')
