"""`wan vs_data_parallel`: islands beside a synchronous job with the same model, data, tokens and links."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from lab.expected import ring_bytes
from lab.network import Lab, Wan
from lab.results import result, rounded
from lab.run import SETTINGS_FILE, WanRun, spawn_python
from lab.traffic import add_run_words, decoder_job, formats, island_names
from recovery_jobs import Tail

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.text import load

PORT = 7500
LIMIT_S = 3600.0


def add_words(parser: argparse.ArgumentParser) -> None:
    add_run_words(parser, "1m", rate_mbit=4.0, steps=500, batch_size=8, seq_len=128)
    parser.add_argument("--timed-steps", type=int, default=6, help="steps of the baseline over the narrow links")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the seconds per token of both over links of one rate, and the evaluation loss after equal tokens.

    The baseline makes all of its steps over fast links, because its loss does not depend on the links. Then its seconds
    per step are measured over narrow links, and its whole time is projected from their median.
    """
    optimizer = {
        "name": "adamw",
        "learning_rate": arguments.learning_rate,
        "warmup_steps": min(50, arguments.steps // 5),
    }
    train = {"steps": arguments.steps, "eval_batch_size": 16, "final_eval_batches": 64}
    settings = decoder_job(arguments, train, optimizer=optimizer) | {"seed": arguments.seed}
    rate = 1e6 * arguments.rate_mbit
    ours = _islands(arguments, settings, rate, folder)
    steps = round(ours["tokens"] / (settings["train"]["batch_size"] * arguments.seq_len))
    theirs = _baseline(arguments, settings, rate, folder, steps)
    ratios = [second / ours["step_s"] for second in theirs.pop("seconds")]
    loss = theirs["eval_loss"]
    rows = [rounded({"what": "islands", **ours}), rounded({"what": "data parallel", **theirs})]
    return result(
        "wan_vs_data_parallel",
        ratios,
        "times faster to the same tokens than synchronous data parallel (its time projected from measured steps)",
        rows=rows,
        loss_difference_percent=round(100 * (ours["eval_loss"] / loss - 1), 2),
        ratio_if_the_baseline_filled_its_link=round(theirs["ideal_step_s"] / ours["step_s"], 2),
        baseline_compute_share=round(1 - theirs["exchange_s"] / theirs["step_s"], 4),
        rate_mbit=arguments.rate_mbit,
        **formats(load(folder / "islands" / SETTINGS_FILE)),
        seed=arguments.seed,
    )


def _islands(arguments: argparse.Namespace, settings: dict[str, Any], rate: float, folder: Path) -> dict[str, Any]:
    """Join over fast links, then train over narrow ones."""
    with Lab(island_names(arguments), Wan()) as lab:
        run = WanRun(lab, folder / "islands", settings)
        run.start()
        run.await_everybody()
        lab.shape(rate)
        begin = run.mark()
        summary = run.await_end(LIMIT_S)
        window = run.window(begin, begin._replace(t=summary["wall_s"]))
    # The window counts the steps of all islands together.
    step_s = window.seconds * arguments.islands / window.inner_steps
    return {
        "step_s": step_s,
        "exchange_s": 0.0,
        "eval_loss": summary["eval_loss"],
        "tokens": summary["tokens"],
        "seconds": step_s * summary["tokens"] / (arguments.islands * arguments.batch_size * arguments.seq_len),
        "contributors": window.contributors,
        "utilisation": statistics.mean(window.utilisation.values()),
        "parameters": summary["num_parameters"],
    }


def _baseline(
    arguments: argparse.Namespace, settings: dict[str, Any], rate: float, folder: Path, steps: int
) -> dict[str, Any]:
    """Make all steps over fast links, then some steps over narrow links, and return the figures."""
    folder = folder / "data_parallel"
    folder.mkdir()
    with Lab(island_names(arguments), Wan()) as lab:
        tail = _start_baseline(arguments, lab, folder, steps)
        lab.wait_for(lambda: any("trained" in record for record in tail.look()), LIMIT_S, "the baseline's last step")
        lab.shape(rate)
        (folder / "slow").touch()
        lab.wait_for(
            lambda: any("ended" in record for record in tail.look()), LIMIT_S, "the baseline's last timed step"
        )
    # The first step over the narrow links found idle links, so it does not count.
    timed = [record for record in tail.look() if record.get("step", 0) > steps]
    fast = [record["step_s"] for record in tail.look() if 0 < record.get("step", 0) < steps]
    config = folder.parent / "islands" / SETTINGS_FILE
    evaluator = Evaluator(load(config))
    with np.load(folder / "parameters.npz") as arrays:
        evaluated = evaluator.evaluate(dict(arrays), settings["train"]["final_eval_batches"])
    seconds = [record["step_s"] for record in timed]
    exchange_s = statistics.median(record["exchange_s"] for record in timed)
    step_s = statistics.median(seconds)
    ideal_s = 8 * ring_bytes(evaluator.num_parameters, arguments.islands).up / rate
    return {
        "step_s": step_s,
        "exchange_s": exchange_s,
        "eval_loss": evaluated["loss"],
        "tokens": steps * settings["train"]["batch_size"] * arguments.seq_len,
        "seconds (projected)": step_s * steps,
        "fast_step_s": statistics.median(fast),
        "ideal_step_s": ideal_s + step_s - exchange_s,
        "timed_steps": len(seconds),
        "seconds": seconds,
    }


def _start_baseline(arguments: argparse.Namespace, lab: Lab, folder: Path, steps: int) -> Tail:
    config_file = folder.parent / "islands" / SETTINGS_FILE
    config = load(config_file)
    for index, name in enumerate(lab.islands):
        words = {
            "config": str(config_file),
            "coordinator": f"{lab.address(lab.islands[0])}:{PORT}",
            "index": index,
            "count": len(lab.islands),
            "steps": steps,
            "timed_steps": arguments.timed_steps + 1,
            "folder": str(folder),
        }
        program = Path(__file__).with_name("data_parallel.py")
        spawn_python(lab, config, name, name, [program, json.dumps(words)], folder)
    return Tail(folder / f"{lab.islands[0]}.jsonl")
