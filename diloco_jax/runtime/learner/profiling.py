"""A profile of some steps of an island, on demand: `diloco profile` leaves an order in the run's folder.

RUN/profiles/NAME.json   the order, and what becomes of it: state is asked, profiling, done or failed; steps, folder
RUN/profiles/NAME-STEP/  what jax.profiler wrote of the steps after STEP: xprof and TensorBoard open it

The learner looks for orders between two steps, so its process needs no port. A profiler that fails never stops it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from diloco_jax.runtime.records.files import PROFILES, STATUS_FILE, TAPES
from diloco_jax.runtime.records.liveness import DEAD, ENDED
from diloco_jax.runtime.records.status import read_status
from diloco_jax.runtime.records.telemetry import read_object, write_json

STEPS_MAX = 1000  # a trace of so many steps is as large as viewers take
LOOK_S = 0.5  # between two looks for an order
SILENCE_S = 120.0  # without a step an order is given up
ASKED, PROFILING, DONE, FAILED = "asked", "profiling", "done", "failed"

log = logging.getLogger(__name__)


class Profiling:
    """The learner's side. Only the thread that steps may call it."""

    def __init__(self, run_dir: Path, learner_id: str) -> None:
        self._path = order_path(run_dir, learner_id)
        self._steps = self._left = 0
        self._folder = Path()
        self._mark: jax.profiler.StepTraceAnnotation | None = None
        self._look_at_s = self._tell_at_s = 0.0
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)  # an order to an earlier life

    def step_done(self, local_step: int) -> None:
        """Begin, go on with or end a profile, as an order says; `local_step` is the step that is done."""
        now_s = time.monotonic()
        try:
            if self._left:
                self._left -= 1
                self._end_mark()
                self._go_on(local_step, now_s)
            elif now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                if self._path.exists():
                    self._begin(local_step)
        except Exception as error:  # of the profiler, or of the disk
            log.warning(f"no profile: {error}")
            if self._left:
                with contextlib.suppress(Exception):
                    jax.profiler.stop_trace()
            self._left = 0
            with contextlib.suppress(OSError):
                self._tell(FAILED, reason=str(error))

    def close(self) -> None:
        """End a profile early: there are no more steps."""
        if self._left:
            self._steps -= self._left
            self._left = 1
            self.step_done(-1)

    def _begin(self, local_step: int) -> None:
        order = read_object(self._path, "state", "steps")
        if order["state"] != ASKED:  # nobody has fetched the outcome of another one
            return
        self._steps = check_steps(order["steps"])
        self._folder = self._path.with_suffix("").with_name(f"{self._path.stem}-{local_step}")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would slow the steps that are measured
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._left = self._steps
        self._go_on(local_step, time.monotonic())

    def _go_on(self, local_step: int, now_s: float) -> None:
        if not self._left:
            jax.profiler.stop_trace()
            log.info(f"profiled {self._steps} steps: {self._folder}")
            self._tell(DONE)
            return
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + LOOK_S
            self._tell(PROFILING)
        self._mark = jax.profiler.StepTraceAnnotation("step", step_num=local_step + 1)
        self._mark.__enter__()

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _tell(self, state: str, **more: str) -> None:
        write_json(self._path, {"state": state, "steps": self._steps, "folder": self._folder.name, **more})


def order_path(run_dir: Path, learner_id: str) -> Path:
    """Return the file by which a learner is asked for a profile."""
    return run_dir / PROFILES / f"{learner_id}.json"


def check_steps(steps: object) -> int:
    """Return the number of steps of an order; raise ValueError if it is none."""
    if not isinstance(steps, int) or not 1 <= steps <= STEPS_MAX:
        raise ValueError(f"--steps is {steps!r}; use 1 to {STEPS_MAX}")
    return steps


def ask_profile(run_dir: Path, learner_id: str, steps: int) -> Mapping[str, Any]:
    """Let a learner whose folder this is profile its next steps, and wait for it.

    Returns:
        The order as it ended: folder, and steps, fewer if the learner left meanwhile.

    Raises:
        ValueError: there is no such learner, it makes no steps, it is being profiled already, or its profiler failed.
    """
    check_steps(steps)
    _check_running(run_dir, learner_id)
    path = order_path(run_dir, learner_id)
    with contextlib.suppress(FileNotFoundError):
        if read_object(path, "state")["state"] in (ASKED, PROFILING) and time.time() - path.stat().st_mtime < SILENCE_S:
            raise ValueError(f"{learner_id} is being profiled already; wait, or remove {path} if nobody waits for it")
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"state": ASKED, "steps": steps})
    try:
        return _await(path, learner_id)
    finally:
        path.unlink(missing_ok=True)


def _await(path: Path, learner_id: str) -> Mapping[str, Any]:
    while True:
        try:
            order, told_s_ago = read_object(path, "state"), time.time() - path.stat().st_mtime
        except FileNotFoundError:
            raise ValueError(f"{learner_id} has started again, and forgot the order; ask again") from None
        if order["state"] == DONE:
            return {**order, "folder": str(path.parent / order["folder"])}
        if order["state"] == FAILED:
            raise ValueError(f"{learner_id} could not be profiled, and trains on: {order['reason']}")
        if told_s_ago > SILENCE_S:
            raise ValueError(f"{learner_id} made no step for {SILENCE_S:g} s; see `diloco status {path.parent.parent}`")
        time.sleep(LOOK_S / 2)


def _check_running(run_dir: Path, learner_id: str) -> None:
    """Raise ValueError unless this learner makes steps, as far as one can see on this machine."""
    if (run_dir / STATUS_FILE).exists():
        status = read_status(str(run_dir))
        if status["state"] in (*DEAD, *ENDED):
            raise ValueError(f"the run in {run_dir} is {status['state']}: no steps are made that could be profiled")
        states = {row["learner"]: row["state"] for row in status["learners"]}
    else:  # the folder of a learner whose syncer is elsewhere
        states = {path.name.rsplit(".", 2)[0]: "active" for path in (run_dir / TAPES).glob("*.jsonl")}
    if learner_id not in states:
        raise ValueError(
            f"{run_dir} has no island {learner_id!r}; there are: {', '.join(sorted(states)) or 'none yet'}"
        )
    if states[learner_id] == "gone":
        raise ValueError(f"{learner_id} has left, and makes no steps; `diloco status {run_dir}` says why")
