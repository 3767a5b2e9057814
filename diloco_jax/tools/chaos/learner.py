"""A learner that sends bad values on order, and measures its waits between steps.

`diloco chaos` starts its islands with this learner. On SIGUSR1 it reads an order (actions.py). Then a number of its
next fragment values are NaN or huge; or its losses are NaN, or its clock is wrong, until the next order. Each slice of
an island of several reads the order, and the one that leads obeys it. The normal learner has no such code.
"""

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender, StagedUpdate
from diloco_jax.runtime.learner import joined
from diloco_jax.runtime.learner.joined import Joining
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.records.files import CHAOS
from diloco_jax.runtime.records.tape_file import LineFile
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.chaos.actions import began_unix_s, order_file
from diloco_jax.tools.chaos.ledger import WAITS_FILE
from diloco_jax.training.island import StepHandle
from diloco_jax.transport.link import Link

HUGE = 1e30
# Shorter waits before an inner step are not recorded.
WAIT_TOLD_S = 0.02
# The most lines of one incarnation.
WAITS_MAX = 100_000

log = logging.getLogger(__name__)


def chaos_learner(run_dir: Path, learner_id: str) -> Callable[..., LearnerRun]:
    """Accept orders from now on, and return what makes a LearnerRun that obeys them; only on the main thread."""
    orders = Orders(order_file(run_dir, learner_id))
    joined.unix_s = lambda: time.time() + orders.ahead_s
    return partial(_obeying, orders)


def _obeying(
    orders: "Orders",
    joining: Joining,
    stop: threading.Event,
    *,
    make_loop: Callable[[RunConfig, str, Sequence[jax.Device] | None], BuiltInLoop] = BuiltInLoop,
    **how: Any,
) -> LearnerRun:
    run_dir = joining.run_dir
    path = run_dir / CHAOS / WAITS_FILE.format(name=joining.learner_id, incarnation=joining.incarnation)
    path.parent.mkdir(exist_ok=True)
    # Every slice reads the order, and the one that led has obeyed it.
    orders.left = 0
    waits, began = LineFile(path), began_unix_s(run_dir)

    def timed(*arguments: Any) -> BuiltInLoop:
        return cast(BuiltInLoop, TimedLoop(make_loop(*arguments), waits, began, orders))

    return LearnerRun(
        joining, stop, make_loop=timed, make_sender=partial(BadSender, orders, joining.config.wire.up), **how
    )


class Orders:
    """The newest order.

    Attributes:
        left: the number of fragment values that are still to be replaced.
        bad: the value that replaces their elements.
        bad_loss: whether reported losses are NaN.
        ahead_s: the error of the clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.left, self.bad = 0, 0.0
        self.bad_loss, self.ahead_s = False, 0.0
        signal.signal(signal.SIGUSR1, self._obey)

    def _obey(self, number: int, frame: object) -> None:
        del number, frame
        order = json.loads(self._path.read_text(encoding="utf-8"))
        self.bad = np.nan if order.get("how") == "nan" else HUGE
        self.left = int(order.get("values", 0))
        self.bad_loss, self.ahead_s = bool(order.get("bad_loss")), float(order.get("ahead_s", 0))


class BadSender(PayloadSender):
    """A sender that replaces values with bad ones, as many as the newest order says."""

    def __init__(
        self, orders: Orders, format: codec.Format, host: Host, on_failure: Callable[[Exception], None]
    ) -> None:
        super().__init__(on_failure)
        self._orders = orders
        self._format = format
        self._fragments = host.fragments

    def value(self, link: Link, message: FragmentValue, staged: StagedUpdate) -> None:
        """Send a fragment's outer gradient, or a bad value if one is ordered."""
        orders = self._orders
        if orders.left > 0:
            orders.left -= 1
            log.info(f"sends {orders.bad} for fragment {message.fragment_id} of round {message.global_step}")
            staged = _BadUpdate(self._fragments[message.fragment_id], orders.bad, self._format)
        super().value(link, message, staged)


class _BadUpdate(NamedTuple):
    fragment: Fragment
    value: float
    format: codec.Format

    def encode(self) -> bytes:
        values = {key: np.full(shape, self.value, np.float32) for key, shape in self.fragment.keys_shapes}
        return codec.encode(values, self.format)


class TimedLoop:
    """A learner's loop with a record of its waits between two inner steps."""

    def __init__(self, loop: BuiltInLoop, waits: LineFile, began_unix_s: float, orders: Orders) -> None:
        self._loop = loop
        self._orders = orders
        self._waits = waits
        self._began_unix_s = began_unix_s
        self._step_ended_s: float | None = None
        self._lines = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def step(self, clock: int) -> StepHandle:
        """Start an inner step, and record a long wait before it."""
        wait_s = 0.0 if self._step_ended_s is None else time.monotonic() - self._step_ended_s
        if wait_s >= WAIT_TOLD_S and self._lines < WAITS_MAX:
            self._lines += 1
            t = round(time.time() - self._began_unix_s, 3)
            self._waits.append((json.dumps([t, round(wait_s, 4)]) + "\n").encode())
        return self._loop.step(clock)

    def wait(self, handle: StepHandle) -> Mapping[str, float]:
        """Wait for the step and return its figures; the loss is NaN if that is ordered."""
        figures = self._loop.wait(handle)
        self._step_ended_s = time.monotonic()
        return {**figures, "loss": np.nan} if self._orders.bad_loss else figures
