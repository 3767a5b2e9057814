"""A profile of some steps of an island, on demand: `diloco profile` leaves an order in the run's folder.

RUN/profiles/NAME.json   {"steps": N}, as long as somebody waits; the learner adds "folder" or "failed" in the end
RUN/profiles/NAME-STEP/  what jax.profiler wrote of the steps after STEP: xprof and TensorBoard open it

The learner looks for orders between two steps, so its process needs no port. A profiler that fails never stops it.
"""

import contextlib
import logging
import time
from pathlib import Path

import jax

from diloco_jax.runtime.records.files import PROFILES, TAPES
from diloco_jax.runtime.records.tape_file import last_line
from diloco_jax.runtime.records.telemetry import read_object, write_json

STEPS_MAX = 1000  # a trace of so many steps is as large as viewers take
LOOK_S = 0.5  # between two looks for an order, or for what became of it
SILENCE_S = 120.0  # a learner that made no step for so long makes none

log = logging.getLogger(__name__)


class Profiling:
    """The learner's side. Only the thread that steps may call it."""

    def __init__(self, run_dir: Path, learner_id: str) -> None:
        self._path = _order_path(run_dir, learner_id)
        self._left = 0  # steps that are still to be profiled
        self._folder = Path()
        self._mark = contextlib.ExitStack()
        self._look_at_s = 0.0
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)  # an order to an earlier life

    def step_done(self, local_step: int) -> None:
        """Begin, go on with or end a profile, as an order says; `local_step` is the step that is done."""
        try:
            self._mark.close()
            if self._left:
                self._left -= 1
                if not self._left:
                    jax.profiler.stop_trace()
                    self._tell("folder", self._folder.name)
            elif time.monotonic() >= self._look_at_s:
                self._look_at_s = time.monotonic() + LOOK_S
                if self._path.exists():
                    self._begin(local_step)
            if self._left:
                self._mark.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=local_step + 1))
        except Exception as error:  # of the profiler, or of the disk
            log.warning(f"no profile: {error}")
            with contextlib.suppress(Exception):
                if self._left:
                    self._left = 0
                    jax.profiler.stop_trace()
            with contextlib.suppress(OSError):
                self._tell("failed", str(error))

    def close(self) -> None:
        if self._left:
            self._left = 1
            self.step_done(0)

    def _begin(self, local_step: int) -> None:
        order = read_object(self._path, "steps")
        if "folder" in order or "failed" in order:
            return
        steps = check_steps(order["steps"])
        self._folder = self._path.with_name(f"{self._path.stem}-{local_step}")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would slow the steps that are measured
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._left = steps

    def _tell(self, key: str, value: str) -> None:
        log.info(f"profile: {key} {value}")
        if self._path.exists():  # somebody waits
            write_json(self._path, {"steps": 0, key: value})


def _order_path(run_dir: Path, learner_id: str) -> Path:
    return run_dir / PROFILES / f"{learner_id}.json"


def check_steps(steps: object) -> int:
    """Return the number of steps of an order; raise ValueError if it is none."""
    if not isinstance(steps, int) or not 1 <= steps <= STEPS_MAX:
        raise ValueError(f"--steps is {steps!r}; use 1 to {STEPS_MAX}")
    return steps


def ask_profile(run_dir: Path, learner_id: str, steps: int) -> Path:
    """Let a learner profile its next steps, and return the profile's folder; ValueError, with the reason, if not."""
    check_steps(steps)
    tapes = sorted((run_dir / TAPES).glob("*.jsonl"), key=lambda tape: tape.stat().st_mtime)
    newest = {tape.name.rsplit(".", 2)[0]: tape for tape in tapes}
    if learner_id not in newest:
        there = ", ".join(sorted(newest)) or "none yet"
        raise ValueError(
            f"{run_dir} has no island {learner_id!r}; there are: {there}; name one, and the run's folder on its machine"
        )
    path, tape = _order_path(run_dir, learner_id), newest[learner_id]
    if path.exists():
        raise ValueError(f"{learner_id} is being profiled already; wait, or remove {path} if nobody waits for it")
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"steps": steps})
    try:
        while True:
            gone = _ended(tape)  # asked first: a learner that leaves ends its profile before its tape
            if (order := read_object(path)).keys() & {"folder", "failed"}:
                break
            if gone:
                raise ValueError(f"{learner_id} makes no steps; `diloco status {run_dir}` may say why")
            time.sleep(LOOK_S / 2)
    except FileNotFoundError:
        raise ValueError(f"{learner_id} has started again, and forgot the order; ask again") from None
    finally:
        path.unlink(missing_ok=True)
    if "failed" in order:
        raise ValueError(f"{learner_id} could not be profiled, and trains on: {order['failed']}")
    return path.with_name(order["folder"])


def _ended(tape: Path) -> bool:
    """Return whether the learner of this tape has left, or has made no step for long."""
    return (last_line(tape) or b"").startswith(b'["end"') or time.time() - tape.stat().st_mtime > SILENCE_S
