"""One training on a simulated schedule, in one process: `python -m experiments.taped CONFIG SCHEDULE FOLDER`.

The protocol's machines run on virtual time. Tapes record each step of each learner, the values that a round merges, and
the adoption of its result. Then real parameters are trained from the tapes, as in the paper's study of failures
(App. E.1). So all arms of a seed have equal schedules on any machine, and no time is spent waiting.

The schedule has these settings: `delay` (of a message, in steps), `step_noise`, `speed_spread` (as shares of a step);
`chips` and `hardware` (as for `diloco simulate`) for chips that fail or differ; `extra` (further learners as a share)
and `after` (the share of the tokens that is trained when they join); `away` (a fault of the last learner: `kind`,
`steps`, and the share of the tokens `after` which it begins); `instead` (instead.py).
"""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_jax.core import codec
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.fingerprint import own_corpus
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.goodput.hardware import Hardware, Slices, cluster, goodput
from diloco_jax.sim.network import LinkFaults, NetworkOptions
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.tapes import LearnerTapes
from diloco_jax.tools.replay.replay import Replay
from diloco_jax.tools.replay.script import LearnerIncarnation, MergedRound, as_simulated
from diloco_jax.training.data.corpus import load_source
from experiments.instead import payload_bytes, put_in_place
from experiments.records import thinned

# Largest number of global steps, as a multiple of those that all learners together would need.
STEPS_FACTOR = 8
STEP_S = 1.0


def simulate(config: RunConfig, schedule: Mapping[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Write the tapes of a schedule, and return its figures, which the training does not know.

    Raises:
        ValueError: the run does not end, or the schedule has an unknown setting.
    """
    known = {"delay", "step_noise", "speed_spread", "chips", "hardware", "extra", "after", "away", "instead"}
    if unknown := sorted(set(schedule) - known):
        raise ValueError(f"the schedule has '{unknown[0]}'; use {', '.join(sorted(known))}")
    learners, sequences = config.islands.count, config.island("").batch_size
    steps = config.planned_steps
    extra = round(schedule.get("extra", 0) * learners)
    paces: dict[str, Slices] | None = None
    step_s = STEP_S
    faults: tuple[Fault, ...] = ()
    names = [f"island-{number}" for number in range(learners + extra)]
    if extra:
        faults = (Fault(schedule.get("after", 0.5) * steps * STEP_S, "join", tuple(names[learners:])),)
    if away := schedule.get("away"):
        begins_s, lasts_s = away["after"] * steps * STEP_S, away["steps"] * STEP_S
        faults += (Fault(begins_s, away["kind"], (names[-1],), lasts_s, notice_s=0.0),)
    if "hardware" in schedule or "chips" in schedule:
        hardware = Hardware(**{"step_s": STEP_S, **schedule.get("hardware", {})})
        chips = float(schedule.get("chips", hardware.slices))
        paces = dict(zip(names, cluster(hardware, learners, chips, seed), strict=True))
        step_s = hardware.step_s
    scenario = Scenario(
        config=config.protocol,
        learners=learners + extra,
        total_steps=STEPS_FACTOR * steps,
        network=NetworkOptions(delay_s=schedule.get("delay", 0.05) * step_s, faults=LinkFaults()),
        tokens=config.train.tokens,
        sample_tokens=sequences * config.train.seq_len,
        step_s=step_s,
        step_noise=schedule.get("step_noise", 0.05),
        speed_spread=schedule.get("speed_spread", 0.1),
        faults=faults,
        corpora=tuple(config.of_island(name).data.corpus for name in names),
        seed=seed,
    )
    run = Cluster(scenario, paces=paces)
    recorder = LearnerTapes(run)
    run.watch(recorder)
    run.run(100.0 * STEPS_FACTOR * steps * step_s)
    if not run.complete:
        raise ValueError(
            f"{config.train.tokens} tokens are not merged in {STEPS_FACTOR * steps} global steps; let fewer chips fail"
        )
    recorder.save(folder)
    found = {"virtual_s": round(run.finished_s, 3)}
    if paces is not None:
        for part in paces.values():
            part.finish(run.end_s)
        found["goodput"] = round(goodput(list(paces.values()), run.end_s), 4)
    return found


def trained(config: RunConfig, tapes: Path) -> RunConfig:
    """Return the config of the training; its warm-up keeps its tokens if there are more learners."""
    found = as_simulated(config, tapes)
    share = config.islands.count / found.islands.count
    warmup = round(config.optimizer.warmup_steps * share)
    return replace(found, optimizer=replace(config.optimizer, warmup_steps=warmup))


def flight_steps(tapes: Path) -> float:
    """Return the mean number of steps between sending a value and adopting the result of its merge."""
    gaps = []
    for path in sorted((tapes / "tapes").glob("*.jsonl")):
        step, sent = 0, {}
        for line in path.read_text(encoding="utf-8").splitlines():
            match json.loads(line):
                case ["step", local_step, *_]:
                    step = local_step
                case ["sent", fragment, global_step, local_step]:
                    sent[fragment, global_step] = local_step
                case ["adopt", fragment, version, *_] if (fragment, version) in sent:
                    gaps.append(step - sent.pop((fragment, version)))
    return round(statistics.fmean(gaps), 3) if gaps else 0.0


class Training(Replay):
    """A replay that keeps the losses of all steps and counts the bytes on the wire."""

    def __init__(self, config: RunConfig, tapes: Path, bits: int = 0) -> None:
        super().__init__(config, tapes, compare=False)
        for incarnation, told in self.script.corpora.items():
            # Simulated islands have texts that do not exist; these are trained on those of the config.
            island = config.of_island(incarnation.learner_id)
            here = load_source(island.data, island.train.seq_len).corpus
            self.script.corpora[incarnation] = own_corpus(island, here, told.corpus_samples, told.tokenizer)
        self._formats = config.wire
        self._sizes = {
            way: [
                payload_bytes(each.num_elements, bits)
                if bits
                else codec.encoded_size((shape for _, shape in each.keys_shapes), format)
                for each in self.trainer.fragments
            ]
            for way, format in (("up", self._formats.up), ("down", self._formats.down))
        }
        self.step_tokens = config.island("").batch_size * config.train.seq_len
        self.losses: list[float] = []
        self.up_bytes = self.down_bytes = self.parts = 0

    @property
    def peak_to_mean(self) -> float:
        """Return the largest payload of a round over the mean one."""
        return max(self._sizes["up"]) / statistics.fmean(self._sizes["up"])

    def on_loss(self, incarnation: LearnerIncarnation, step: Any, loss: float) -> None:
        self.losses.append(loss)

    def take(self, name: Any) -> Any:
        self.down_bytes += self._sizes["down"][name.fragment_id]
        return super().take(name)

    def count(self, event: MergedRound) -> None:
        """Count the values of a round."""
        self.parts += len(event.order.contributions)
        self.up_bytes += len(event.order.contributions) * self._sizes["up"][event.order.fragment_id]


def main() -> None:
    """Train, and write result.json."""
    config, schedule = load(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[3])
    # The number of a class's fragments depends on the model.
    if config.protocol.by_class:
        model = Evaluator(config)
        config = resolve(config, model.shapes, model.kinds).config
    shutil.rmtree(tapes := folder / "tapes", ignore_errors=True)
    began_s = time.monotonic()
    found = simulate(config, schedule, config.seed, tapes)
    simulated_s = time.monotonic() - began_s
    instead = schedule.get("instead", {})
    put_in_place(instead)
    training = Training(trained(config, tapes), tapes, instead.get("bits", 0))
    began_s, written_s = time.monotonic(), 0.0
    events = training.script.events
    for number, event in enumerate(events):
        training.repeat(event)
        if isinstance(event, MergedRound):
            training.count(event)
        if time.monotonic() - written_s > 1.0:
            written_s = time.monotonic()
            (folder / "progress").write_text(f"{(number + 1) / len(events):.4f}", encoding="utf-8")
    batches = config.train.final_eval_batches
    result = training.evaluator.evaluate(training.model.parameters(), batches, training.script.global_step)
    tokens = len(training.losses) * training.step_tokens
    curve = thinned(((n + 1) * training.step_tokens, loss) for n, loss in enumerate(training.losses))
    found |= {
        "loss": result["loss"] if math.isfinite(result["loss"]) else None,
        "scores": result["scores"],
        "curve": curve,
        "tokens": tokens,
        "steps": training.script.global_step,
        "up_bytes": training.up_bytes,
        "down_bytes": training.down_bytes,
        "contributors": round(training.parts / max(1, training.merged_rounds), 3),
        "flight_steps": flight_steps(tapes),
        "peak_to_mean": round(training.peak_to_mean, 3),
        "parameters": training.evaluator.num_parameters,
        "seconds": round(time.monotonic() - began_s + simulated_s, 1),
    }
    (folder / "result.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
