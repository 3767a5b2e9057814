"""A learner that sends bad values when it is told to, and measures how long it waits between its steps.

`diloco chaos` starts its islands this way. SIGUSR1 makes it read its order (chaos_actions.py) and obey: the next so
many fragment values are NaN, or huge. Nothing of this is in the learner that trains for anybody else.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment
from diloco_jax.protocol.messages import FragmentValue
from diloco_jax.runtime.chaos_actions import CHAOS, order_file
from diloco_jax.runtime.chaos_verdict import WAITS_FILE
from diloco_jax.runtime.files import CLOCK_FILE
from diloco_jax.runtime.hosts import Hosts
from diloco_jax.runtime.learner_payloads import Update
from diloco_jax.runtime.line_file import LineFile
from diloco_jax.runtime.run_learner import LearnerRun
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.transport.link import Link

HUGE = 1e30
WAIT_TOLD_S = 0.02  # shorter waits are not worth a line
WAITS_MAX = 100_000  # lines of one life

log = logging.getLogger(__name__)


class ChaosLearnerRun(LearnerRun):
    """A LearnerRun that can be told to misbehave. Made on the main thread: it sets a signal handler."""

    def __init__(
        self,
        config: RunConfig,
        learner_id: str,
        incarnation: int,
        address: str,
        run_dir: Path,
        stop: threading.Event,
        hosts: Hosts | None = None,
    ) -> None:
        super().__init__(config, learner_id, incarnation, address, run_dir, stop, hosts)
        self._order_path = order_file(run_dir, learner_id)
        self._bad_values, self._bad = 0, 0.0
        self._send_value = self._payloads.value
        self._payloads.value = self._value  # type: ignore[method-assign]
        waits = run_dir / CHAOS / WAITS_FILE.format(name=learner_id, incarnation=incarnation)
        waits.parent.mkdir(exist_ok=True)
        self._waits = _Waits(waits, run_dir / CLOCK_FILE)
        self._island.step = self._waits.before(self._island.step)  # type: ignore[method-assign]
        self._island.wait = self._waits.after(self._island.wait)  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, self._obey)

    def _obey(self, number: int, frame: object) -> None:
        del number, frame
        order = json.loads(self._order_path.read_text(encoding="utf-8"))
        self._bad = np.nan if order["how"] == "nan" else HUGE
        self._bad_values = int(order["values"])

    def _value(self, link: Link, message: FragmentValue, staged: Update) -> None:
        """Send a fragment's outer gradient, bad or not."""
        if self._bad_values > 0:
            self._bad_values -= 1
            log.info(f"sends {self._bad} for fragment {message.fragment_id} of round {message.global_step}")
            staged = _BadUpdate(self._fragments[message.fragment_id], self._bad, self._config.wire.up)
        self._send_value(link, message, staged)


class _BadUpdate(NamedTuple):
    fragment: Fragment
    value: float
    format: codec.Format

    def encode(self) -> bytes:
        values = {key: np.full(shape, self.value, np.float32) for key, shape in self.fragment.keys_shapes}
        return codec.encode(values, self.format)


class _Waits:
    """Writes down when, and how long, a learner waited between two inner steps."""

    def __init__(self, path: Path, clock: Path) -> None:
        self._file = LineFile(path)
        self._began_unix_s = float(json.loads(clock.read_text(encoding="utf-8"))["began_unix_s"])
        self._ended_s: float | None = None
        self._lines = 0

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, with the time since the last one written down."""

        def timed(*arguments: Any) -> Any:
            now_s = time.monotonic()
            wait_s = now_s - self._ended_s if self._ended_s is not None else 0.0
            if wait_s >= WAIT_TOLD_S and self._lines < WAITS_MAX:
                self._lines += 1
                t = round(time.time() - self._began_unix_s, 3)
                self._file.append((json.dumps([t, round(wait_s, 4)]) + "\n").encode())
            return step(*arguments)

        return timed

    def after(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait`, with its end remembered."""

        def timed(*arguments: Any) -> Any:
            result = wait(*arguments)
            self._ended_s = time.monotonic()
            return result

        return timed
