"""The objects that the modules of a syncer's process share: queue of results, merges."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Merge
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.model.global_model import GlobalModel, Merged
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.tape_file import TapeFile
from diloco_jax.runtime.syncer.run_clock import RunClock
from diloco_jax.settings.run import RunConfig


class SyncerContext(NamedTuple):
    """The objects of one process of a syncer."""

    # Resolved for the model.
    config: RunConfig
    run_dir: Path
    stop: threading.Event
    clock: RunClock
    tape: TapeFile
    machine: Syncer
    # It puts every input on the tape before the machine gets it.
    taped: TapedSyncer
    model: GlobalModel
    # It counts what the machine does not.
    stats: RunStats


class Results:
    """A queue of results from other threads for the driver's thread, which it wakes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake` for every result from now on."""
        self._wake = wake

    def put(self, result: Any) -> None:
        """Queue a result, or an exception that the driver raises; any thread."""
        self._queue.put(result)
        self._wake()

    def take(self) -> Iterator[Any]:
        """Yield the queued results, and raise those that are exceptions."""
        while not self._queue.empty():
            result = self._queue.get_nowait()
            if isinstance(result, Exception):
                raise result
            yield result


@dataclass(eq=False)
class Merges:
    """The learners' values of rounds that are not merged yet, and the thread that merges them."""

    model: GlobalModel
    # The merging thread calls it with each order and its result.
    report: Callable[[tuple[Merge, Merged] | Exception], None]
    # Signs of life of the merging thread.
    pulse: Pulse

    def __post_init__(self) -> None:
        self.pulse.rest()
        # Round -> learner -> outer gradient.
        self._values: dict[int, dict[str, Any]] = {}
        self._thread = ThreadPoolExecutor(1, "merge")

    def keep(self, message: FragmentValue, value: Any) -> None:
        """Keep a learner's value until its round is merged or discarded."""
        self._values.setdefault(message.global_step, {})[message.learner_id] = value

    def drop(self, global_step: int, learner_id: str) -> None:
        """Free one value of a round."""
        self._values.get(global_step, {}).pop(learner_id, None)

    def discard(self, global_step: int) -> None:
        self._values.pop(global_step, None)

    def start(self, order: Merge, without: str = "") -> None:
        """Start a merge; `without` as for GlobalModel.merge."""
        self._thread.submit(self._merge, order, self._values.pop(order.global_step), without)

    def _merge(self, order: Merge, values: Mapping[str, Any], without: str) -> None:
        # A merge may wait for each fragment of a snapshot, up to the limit of HeldStates.
        self.pulse.patient()
        try:
            self.report((order, self.model.merge(order, values, without=without)))
        except Exception as error:
            self.report(error)
        self.pulse.rest()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.pulse.close()
