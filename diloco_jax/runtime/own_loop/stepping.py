"""The part of an island that every user's loop shares: the state of the run, the samples, the reports and the end.

The loop steps; everything else of a learner is shared with the built-in loop (runtime/learner/joined.py). On an island
of several processes, every process calls the same methods in the same order: the first one leads, the others follow.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from diloco_jax.core.fragments import put
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import RUN_COMPLETE, STOPPED_OUTSIDE
from diloco_jax.runtime.island.evaluation import OwnEvaluation
from diloco_jax.runtime.island.follower import Follower
from diloco_jax.runtime.island.host import Ranges
from diloco_jax.runtime.island.join import die
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner.effects import Signals
from diloco_jax.runtime.learner.joined import Joined, Joining, StepSize
from diloco_jax.runtime.learner.metrics import own_metrics
from diloco_jax.runtime.own_loop.data_shard import DataShard
from diloco_jax.runtime.own_loop.lagging import LaggingMetrics
from diloco_jax.runtime.own_loop.loaders import Batches
from diloco_jax.runtime.own_loop.trees import LoopArrays
from diloco_jax.runtime.records.files import nothing_to_do
from diloco_jax.runtime.records.signals import WRONG_INPUT, RefusedForGood, end_now, stop_on_sigterm
from diloco_jax.training.island_state import IslandState

# A loop may read the samples of this many steps ahead.
COMING_STEPS = 8
# JAX's messages for an array whose memory was given away.
DELETED = ("has been deleted", "deleted or donated")
USED_UP = (
    "an array was used after its memory had been given away: after_step() uses up the parameters that it gets, so "
    "continue with what after_step() returns (params = island.after_step(...)); a step with donate_argnums uses up its "
    "inputs likewise"
)
# What is known of the data of a loop that reads its own: its loader's state is saved and restored, or nothing.
RESUMED, OWN = "resumed", "own"
STOPS = (KeyboardInterrupt, SystemExit)
REASON_MAX = 100  # letters

log = logging.getLogger(__name__)


class RunComplete(SystemExit):
    """Raised if an island joins a complete run; if nothing catches it, the process ends with status 0."""

    def __init__(self, name: str, run_dir: Path) -> None:
        super().__init__(0)
        self.text = nothing_to_do(name, run_dir)
        log.warning(self.text)

    def __str__(self) -> str:
        return self.text


class SteppedIsland:
    """Island that another program's loop steps. Use it from one thread at a time.

    Attributes:
        name: Name of the island.
        incarnation: Number of this start; it grows with every start.
        config: Config of the run.
        global_step: The run's global step when the next step starts, the same on all hosts.
        local_step: Finished steps of this start.
        held: The exchanged state; its owner gives it the arrays before a step's report, and takes them after it.
        going: Whether there is a next step; None before `begin`.
        place: Returns the island's shard of own data; the first call asks the syncer.
        loader: Batches of own data, at the restored position after `begin`; None without a loader.
    """

    def __init__(
        self,
        joining: Joining,
        arrays: LoopArrays,
        stop: threading.Event,
        size: StepSize,
        data: str,
        flops_per_step: float,
        evaluate: Callable[[Any], Any] | None,
        place: Callable[[], DataShard],
        loader: Batches | None = None,
    ) -> None:
        self.name, self.incarnation = joining.learner_id, joining.incarnation
        self.config = config = joining.config
        self.global_step = self.local_step = 0
        self.going: bool | None = None
        self.place, self.loader = place, loader
        self._pulse, self._run_dir = joining.pulse, joining.run_dir
        self._arrays = arrays
        self._stop = stop
        self._leased = data == "leased"
        if arrays.has_moments and not config.protocol.snapshot_every:
            log.warning(
                "protocol.snapshot_every is 0: opt_state is not saved, and is lost once all islands have stopped"
            )
        self.held: IslandState = arrays.exchanged(config.wire.up, config.adopt.mode == "rebase")
        emulated = sum(device.platform == "cpu" for device in arrays.devices) > 1
        self._metrics = LaggingMetrics(waits=emulated)
        self._batch = Batch((), 0)
        self._ahead: Ranges = ()
        # Whether the loop requested the samples of the coming step.
        self._asked = False
        self._ready_s = 0.0
        self._undo = ExitStack()
        self._undo.callback(self._pulse.close)
        self._undo.callback(stop_on_sigterm(stop))
        self._pulse.rest()
        # The island has several processes.
        self._several = joining.hosts is not None
        evaluation = OwnEvaluation(evaluate, arrays.tree) if evaluate is not None else None
        self._host = joining.host(self.held, None, evaluation, stop)
        self._host.loader = loader
        # The first process leads, the others follow.
        self._side: Joined | Follower | None
        if joining.hosts is not None and joining.hosts.host:
            self._side = joining.follower(self._host, stop, self._take_ranges)
        else:
            signals, flops_per_token = Signals(stop), flops_per_step / size.tokens
            metrics = own_metrics(self._host.run.config, self.name, arrays.devices, flops_per_token)
            self._side = Joined(joining, self._host, size, signals, PayloadSender(signals.fail), metrics)
            if not self._leased:
                self._side.reads(RESUMED if loader is not None and config.protocol.snapshot_every else OWN)

    def begin(self) -> None:
        """Wait until the first step can start, with the run's model in `held`.

        Raises:
            RefusedForGood: The syncer refuses this island.
            ValueError: The island has left its run.
            ConnectionError: The syncer cannot be reached.
            RunComplete: The run is complete; an island of several processes just has no next step.
        """
        if self.going is not None:
            return
        side = self._side
        if side is None:
            raise ValueError("this island has left its run; join again")
        with self._pulse.step():
            if isinstance(side, Joined):
                going = side.begin()
                side.check_end()
                if side.finished == RUN_COMPLETE and not self._several:
                    self.leave()
                    raise RunComplete(self.name, self._run_dir)
                if going and self.loader is not None:
                    side.resume_loader()
                self._next(side, going)
                if going:
                    moments = side.moments if self._arrays.has_moments else "none given"
                    log.info(f"{self.name}: training from global step {self.global_step}; optimizer state: {moments}")
            else:
                self._follow()

    def may_step(self) -> bool:
        """Tell whether the loop shall make another step, after `begin`."""
        # The watchdog ignores the loop after its last step.
        if not self.going:
            self._pulse.rest()
        return bool(self.going)

    def next_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the samples of the next step: positions of the run's global order, from 0 without end.

        Raises:
            ValueError: The loop reads its own data (`data="own"`), or there is no next step.
        """
        if not self._leased:
            raise ValueError('this island was joined with data="own"; read your own data, or join with data="leased"')
        if not self.going:
            raise ValueError("next_samples() before state(), or after the end: call it only while island.training")
        self._asked = True
        return _positions(self._batch.ranges)

    def coming_samples(self) -> Int64[np.ndarray, " samples"]:
        """Return the known samples of the steps after the next one, so that a loader can read them ahead.

        Train only on the result of `next_samples`: some of these samples may go to other islands instead.
        """
        return _positions(self._ahead)

    @property
    def due(self) -> frozenset[str]:
        """Return the paths of parameters that the next report will read or write, as far as this process knows now.

        A merged fragment may arrive between this call and the report. A following host does not know what is due, and
        returns all paths.
        """
        if not isinstance(self._side, Joined):
            return frozenset(self._arrays.shapes)
        fragments = (self._host.fragments[number] for number in self._side.due())
        return frozenset(piece.path for fragment in fragments for piece in fragment.slices)

    def report(self, take: Callable[[], None], metrics: Any) -> None:
        """Report a step and exchange the due fragments.

        Args:
            take: Gives the arrays after the step to `held`.
            metrics: A scalar loss, or scalars by name with one called `loss`.

        Raises:
            ValueError: `take` raised it, there is no loss, or the loop did not request its batch.
        """
        if not self.going:
            raise ValueError("after_step() without a step: call it only while island.training")
        if self._leased and not self._asked:
            raise ValueError('next_samples() was not called for this step; call it, or join with data="own"')
        with self._pulse.step():
            take()
            if self.loader is not None:
                self.loader.stepped()
            values = self._metrics.take(metrics)
            self.local_step += 1
            side = self._side
            if isinstance(side, Joined):
                took_s = time.monotonic() - self._ready_s
                self._next(side, side.stepped(self._batch, self.global_step, values, took_s))
            else:
                self._follow()

    def global_values(self) -> Any:
        """Return the newest global model that this island holds, in the loop's own form.

        Raises:
            ValueError: The island holds none yet.
        """
        if len(self._host.anchors) < len(self._host.fragments):
            raise ValueError("global_params(): the island holds no global model yet; call state() first")
        values = {path: np.zeros(shape, np.float32) for path, shape in self._arrays.shapes.items()}
        for fragment in self._host.fragments:
            values = put(values, fragment, self._host.anchors[fragment.fragment_id])
        return self._arrays.placed(values)

    def leave(self, reason: str = STOPPED_OUTSIDE) -> None:
        """Leave the run with a goodbye, if it is not over; safe to call again.

        Raises:
            ValueError: The syncer had refused this island.
            ConnectionError: The syncer had expelled this incarnation; a new one may join.
        """
        side, self._side = self._side, None
        try:
            if isinstance(side, Follower):
                self._stop.set()
                # The leader decides when the island ends.
                while side.next_step() is not None:
                    pass
                side.leave()
            elif side is not None:
                if self.going:
                    self._stop.set()
                side.leave(reason)
                log.info(f"{self.name}: {side.finished or reason}, after {self.local_step} steps of this start")
                side.check_end()
        finally:
            self._undo.close()
        self.going = False

    def close(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Leave the run at the end of a `with` block, which may have raised an error."""
        if kind is None:
            self.leave()
            return
        if error is not None and any(words in str(error) for words in DELETED):
            error.add_note(USED_UP)
        # The other processes may wait for this one in a collective, forever.
        if self._several and isinstance(error, RefusedForGood):
            sys.stderr.write(f"diloco_jax: {error}\n")
            end_now(WRONG_INPUT)
        if self._several:
            traceback.print_exception(kind, error, where)
            die(f"host {jax.process_index()} failed")
        try:
            self.leave(STOPPED_OUTSIDE if issubclass(kind, STOPS) else f"its loop failed: {kind.__name__}"[:REASON_MAX])
        # The user needs to see the loop's own error, so this one is only logged.
        except Exception as other:
            # A refusal is both.
            if str(other) != str(error):
                log.warning(f"{self.name}: {other!r}")

    def _next(self, joined: Joined, going: bool) -> None:
        """Send the next step to the other hosts, if there is one."""
        self.going, self._asked = going, False
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
        self.going, self._asked = clock is not None, False
        self.global_step = self.global_step if clock is None else clock

    def _take_ranges(self, ranges: Ranges, ahead: Ranges) -> None:
        self._batch, self._ahead = self._batch._replace(ranges=tuple((start, stop) for start, stop in ranges)), ahead


def _positions(ranges: Ranges) -> Int64[np.ndarray, " samples"]:
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in ranges)])
