"""The syncer's other threads, as its driver knows them: a worker that merges, and the way of all results back."""

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diloco_jax.protocol.effects import Merge
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.runtime.model.global_model import GlobalModel, Merged
from diloco_jax.runtime.records.pulse import Pulse


class Results:
    """A queue of what other threads have for the driver's thread, which is woken for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake` for every result from now on: the driver waits from now on."""
        self._wake = wake

    def put(self, result: Any) -> None:
        """Hand over a result, or the exception that the driver is to raise; any thread."""
        self._queue.put(result)
        self._wake()

    def take(self) -> Iterator[Any]:
        """Yield the results that are there, and raise those that are exceptions."""
        while not self._queue.empty():
            result = self._queue.get_nowait()
            if isinstance(result, Exception):
                raise result
            yield result


@dataclass(eq=False)
class Merges:
    """The learners' values of rounds that are not merged yet, and the thread that merges them."""

    model: GlobalModel
    report: Callable[[tuple[Merge, Merged] | Exception], None]  # gets each order with its result, on that thread
    pulse: Pulse  # signs of life of that thread

    def __post_init__(self) -> None:
        self.pulse.rest()
        self._values: dict[int, dict[str, Any]] = {}  # round -> learner -> outer gradient, or shards' names of it
        self._thread = ThreadPoolExecutor(1, "merge")

    def keep(self, message: FragmentValue, value: Any) -> None:
        """Keep a learner's value until its round is merged or discarded."""
        self._values.setdefault(message.global_step, {})[message.learner_id] = value

    def discard(self, global_step: int) -> None:
        self._values.pop(global_step, None)

    def start(self, order: Merge) -> None:
        self._thread.submit(self._merge, order, self._values.pop(order.global_step))

    def _merge(self, order: Merge, values: Mapping[str, Any]) -> None:
        self.pulse.patient()  # it may wait for fragments of a snapshot, each for as long as HeldStates says
        try:
            self.report((order, self.model.merge(order, values)))
        except Exception as error:
            self.report(error)
        self.pulse.rest()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.pulse.close()
