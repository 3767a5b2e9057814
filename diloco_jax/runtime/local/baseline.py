"""The baseline: plain data parallel training in one process, with gradients summed in every step and no outer loop.

It has the island code, model, data order, batch per step and schedule of a run with islands, so that only the algorithm
differs. It writes the same files.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.protocol.watch.stats import goodput_of, step_overhead
from diloco_jax.protocol.watch.terms import WAITING
from diloco_jax.protocol.watch.time_left import TimeLeft
from diloco_jax.runtime.figures.facts import IslandFacts
from diloco_jax.runtime.figures.table import with_figures
from diloco_jax.runtime.island.built_in import LOADING, BuiltInLoop
from diloco_jax.runtime.island.host import DATA_WAIT
from diloco_jax.runtime.learner.run import metrics_of
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import save_parameters
from diloco_jax.runtime.records.files import CHECKPOINTS, STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.status import status_of
from diloco_jax.runtime.records.telemetry import Telemetry, write_json
from diloco_jax.runtime.trackers.outlets import Outlets
from diloco_jax.settings.run import RunConfig

NAME = "data-parallel"
STATUS_EVERY_S = 0.5


class DataParallelRun:
    """One run of the baseline: `islands.devices` devices share `train.batch_size` sequences per step."""

    def __init__(self, config: RunConfig, run_dir: Path, stop: threading.Event) -> None:
        self._pulse = Pulse(config.watchdog, "the trainer's loop", (run_dir, "trainer"))
        self._config = config
        self._run_dir = run_dir
        self._stop = stop
        self._pulse.phase(LOADING)
        self._evaluator = Evaluator(config)
        self._loop = BuiltInLoop(config, NAME)
        self._island = self._loop.island
        if config.model.initial:
            self._island.load(dict(self._evaluator.initial_parameters()))
        self._step_tokens = config.train.batch_size * config.train.seq_len
        self._metrics = metrics_of(config, NAME, self._island)
        self._telemetry = Telemetry(run_dir, Outlets(config, run_dir))
        self._began_s = time.monotonic()
        self._busy_s = self._waited_s = 0.0
        self._tokens = 0
        self._eval_loss: float | None = None
        self._eval_step: int | None = None
        self._last: dict[str, Any] = {}
        self._time_left = TimeLeft()

    def run(self) -> dict[str, Any]:
        """Train, evaluate, write the summary and return it."""
        config, loop = self._config, self._loop
        size, prefetch, steps = loop.batch_size, loop.prefetch, config.planned_steps
        loop.put_batch([(0, size)], [(size, (1 + prefetch) * size)])
        self._pulse.phase("compiling the step")
        began_s, step, told_s = self._now_s(), 0, 0.0
        while step < steps and not self._stop.is_set():
            step_began_s = self._now_s()
            handle = loop.step(step)
            step += 1
            after = (step + 1) * size
            loop.put_batch([(step * size, after)], [(after, after + prefetch * size)])
            metrics = {**loop.wait(handle), "learning_rate": loop.rate(step - 1)}
            self._count(step, metrics, self._now_s() - step_began_s)
            if config.train.eval_every and step % config.train.eval_every == 0 and step < steps:
                self._evaluate(step, config.train.eval_batches)
            if self._now_s() - told_s >= STATUS_EVERY_S:
                told_s = self._now_s()
                self._tell(step, "running")
        loop.close()
        return self._conclude(step, began_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _count(self, step: int, metrics: Mapping[str, float], step_s: float) -> None:
        self._pulse.beat(step_s)
        self._pulse.ready(True)
        self._time_left.step(self._now_s(), step)
        self._busy_s += step_s
        self._waited_s += metrics[DATA_WAIT]
        self._tokens += self._step_tokens
        told = {"loss": metrics["loss"], "step_s": step_s}
        self._last |= told
        record = {"t": self._now_s(), "learner": NAME, "incarnation": 1, "local_step": step, "global_step": step}
        self._telemetry.write({"kind": "step", **record, "tokens": self._tokens, **told})
        self._metrics.step(step, metrics, step_s, self._step_tokens)
        if (values := self._metrics.due(self._now_s())) is not None:
            self._last["metrics"] = values
            self._telemetry.write({"kind": "metrics", **record, "values": values})

    def _evaluate(self, step: int, batches: int) -> dict[str, Any]:
        self._pulse.rest()
        result = self._evaluator.evaluate(self._island.parameters(), batches, step)
        self._pulse.beat()
        self._eval_loss, self._eval_step = result["loss"], step
        record = {"kind": "eval", "t": self._now_s(), "global_step": step, "tokens": self._tokens}
        self._telemetry.write(record | {key: result[key] for key in ("loss", "bits_per_byte", "scores")})
        return result

    def _tell(self, step: int, state: str) -> None:
        island = IslandFacts(
            learner=NAME,
            state="active",
            condition="training",
            since_s=self._now_s(),
            local_step=step,
            tokens=self._tokens,
            tokens_per_s=self._step_tokens / max(self._last.get("step_s", 0.0), 1e-9),
            last_merged_round=step,
            participation=1.0,
            restarts=0,
            **self._last,
        )
        status = status_of(
            run=self._config.name,
            state=state,
            global_step=step,
            total_steps=self._config.planned_steps,
            left_s=self._time_left.left_s(self._now_s(), self._config.planned_steps),
            epoch=1,
            waiting_for="nothing",
            wall_s=self._now_s(),
            tokens=self._tokens,
            contributors_per_round=1.0,
            learners=[asdict(island)],
            alarms=[],
            eval_loss=self._eval_loss,
            eval_step=self._eval_step,
            wire={"up_bytes": 0, "down_bytes": 0},
            num_parameters=self._evaluator.num_parameters,
        )
        write_json(self._run_dir / STATUS_FILE, status)
        self._telemetry.flush()

    def _conclude(self, step: int, began_s: float) -> dict[str, Any]:
        ended_s = self._now_s()
        span_s = ended_s - began_s
        overhead = step_overhead(self._busy_s, span_s)
        result = self._evaluate(step, self._config.train.final_eval_batches)
        meta = {"global_step": step, "tokens": self._tokens, "run": self._config.name}
        save_parameters(self._run_dir / CHECKPOINTS, self._island.parameters(), meta)
        learner = {"local_steps": step, "tokens": self._tokens, "participation": 1.0, "restarts": 0}
        summary = {
            "eval_loss": result["loss"],
            "eval_bits_per_byte": result["bits_per_byte"],
            "eval_scores": result["scores"],
            "tokens": self._tokens,
            "merged_tokens": self._tokens,
            "wall_s": round(ended_s, 3),
            "global_steps": step,
            "goodput": round(goodput_of(self._busy_s - self._waited_s, span_s), 4),
            WAITING: round(self._waited_s / max(self._busy_s, 1e-9), 4),
            "uptime": round(1 - overhead, 4),
            "contributors_per_round": 1.0,
            "unmerged_fragments": [],
            "steps_per_round": 1.0,
            "alarms": [Alarm("evaluation", "", text).as_dict() for text in self._evaluator.scorer.alarms],
            "wire": {"up_bytes": 0, "down_bytes": 0, "data_parallel_bytes": 0},
            "learners": {NAME: {**learner, "step_overhead": round(overhead, 4)}},
            "complete": step >= self._config.planned_steps,
            "num_parameters": self._evaluator.num_parameters,
        }
        summary = with_figures("summary", summary)
        write_json(self._run_dir / SUMMARY_FILE, summary)
        self._tell(step, "complete" if summary["complete"] else "stopped")
        self._metrics.close()
        self._telemetry.close()
        self._pulse.close()
        return summary
