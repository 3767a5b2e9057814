"""A profile of some steps of an island, on demand: `diloco profile` writes an order into the run's folder.

RUN/profiles/NAME.json   {"steps": N} while `diloco profile` waits; the learner adds "folder" or "failed" at the end
RUN/profiles/NAME-STEP/  the trace of the steps after STEP by jax.profiler, for xprof and TensorBoard

On Pathways the traces are below islands.profiles instead, because pathwaysutils' profiler writes to gs:// only.

The learner looks for orders between two steps, so its process needs no port. A failing profiler never stops it.
"""

import contextlib
import logging
import time
from pathlib import Path

import jax

from diloco_jax.runtime.records.files import PROFILES, TAPES
from diloco_jax.runtime.records.tape_file import last_line
from diloco_jax.runtime.records.telemetry import read_object, write_json
from diloco_jax.settings.islands import GS
from diloco_jax.settings.run import RunConfig

# Viewers cannot open longer traces.
STEPS_MAX = 1000
# Pause between two looks for an order or its result, in seconds.
LOOK_S = 0.5
# A learner without a step for this long does not make any.
SILENCE_S = 120.0

log = logging.getLogger(__name__)


class Profiling:
    """The learner's side of a profile; only the thread that steps may call it."""

    def __init__(self, run_dir: Path, learner_id: str, config: RunConfig) -> None:
        self._name, self._islands = config.name, config.islands
        self._path = _order_path(run_dir, learner_id)
        # Steps that remain to be profiled.
        self._left = 0
        self._folder = ""
        self._mark = contextlib.ExitStack()
        self._look_at_s = 0.0
        with contextlib.suppress(OSError):
            # The file is an order to an earlier incarnation.
            self._path.unlink(missing_ok=True)

    def step_done(self, local_step: int) -> None:
        """Start, continue or end a profile after the step `local_step`, as an order says."""
        try:
            self._mark.close()
            if self._left:
                self._left -= 1
                if not self._left:
                    jax.profiler.stop_trace()
                    self._tell("folder", self._folder)
            elif time.monotonic() >= self._look_at_s:
                self._look_at_s = time.monotonic() + LOOK_S
                if self._path.exists():
                    self._begin(local_step)
            if self._left:
                self._mark.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=local_step + 1))
        # Profiler and disk raise many kinds of errors.
        except Exception as error:
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
        self._folder = f"{self._path.stem}-{local_step}"
        target = str(self._path.with_name(self._folder))
        if self._islands.pathways:
            if not self._islands.profiles:
                raise ValueError(
                    "Pathways writes profiles to Cloud Storage only; set islands.profiles to a gs:// folder"
                )
            target = self._folder = f"{self._islands.profiles.rstrip('/')}/{self._name}/{self._folder}"
        options = jax.profiler.ProfileOptions()
        # Tracing every Python call would slow the measured steps.
        options.python_tracer_level = 0
        jax.profiler.start_trace(target, profiler_options=options)
        self._left = steps

    def _tell(self, key: str, value: str) -> None:
        log.info(f"profile: {key} {value}")
        if self._path.exists():  # diloco profile waits
            write_json(self._path, {"steps": 0, key: value})


def _order_path(run_dir: Path, learner_id: str) -> Path:
    return run_dir / PROFILES / f"{learner_id}.json"


def check_steps(steps: object) -> int:
    """Return the number of steps of an order; ValueError if it is out of range."""
    if not isinstance(steps, int) or not 1 <= steps <= STEPS_MAX:
        raise ValueError(f"--steps is {steps!r}; use 1 to {STEPS_MAX}")
    return steps


def ask_profile(run_dir: Path, learner_id: str, steps: int) -> str:
    """Let a learner profile its next steps, and return the profile's folder, a path or a URL.

    Raises:
        ValueError: There is no profile, and why.
    """
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
            # Checked first, because a learner that leaves ends its profile before its tape.
            gone = _ended(tape)
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
    return order["folder"] if GS in order["folder"] else str(path.with_name(order["folder"]))


def _ended(tape: Path) -> bool:
    """Return whether the learner of this tape has left, or has made no step for long."""
    return (last_line(tape) or b"").startswith(b'["end"') or time.time() - tape.stat().st_mtime > SILENCE_S
