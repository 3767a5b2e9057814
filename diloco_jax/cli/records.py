"""Subcommands about a run that is there: look at it, let a learner leave, evaluate it, do it again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.shared import FAILED, run_config, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from diloco_jax.settings.run import RunConfig

PROMPT = "\n"  # the beginning of a line


def status(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.files import CONFIG_FILE
    from diloco_jax.runtime.records.liveness import DEAD
    from diloco_jax.runtime.records.status import read_status
    from diloco_jax.settings.text import load
    from diloco_jax.tools.report.live import describe

    own = Path(arguments.run) / CONFIG_FILE
    config = arguments.config or (own if own.exists() else None)
    transport = load(config).transport if config else None
    found = read_status(arguments.run, allow_plaintext=arguments.allow_plaintext, transport=transport)
    show(arguments, found, describe)
    return FAILED if found.get("state") in DEAD else 0


def drain(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.status import is_address, syncer_at
    from diloco_jax.settings.text import load
    from diloco_jax.transport.link import TransportConfig
    from diloco_jax.transport.questions import ask_drain

    run, config = arguments.run, arguments.config
    if config is None and not is_address(run):
        config = run_config(run)
    known = TransportConfig() if config is None else load(config).transport
    syncer = syncer_at(run, known, allow_plaintext=arguments.allow_plaintext)
    ok, message = ask_drain(syncer, arguments.learner)
    if arguments.json:
        print(json.dumps({"learner": arguments.learner, "ok": ok, "message": message}))
    else:
        print(message if ok else f"diloco drain: {message}", file=sys.stdout if ok else sys.stderr)
    return 0 if ok else FAILED


def profile(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.learner.profiling import ask_profile

    folder = ask_profile(Path(arguments.run), arguments.island, arguments.steps)
    show(arguments, {"profile": str(folder)}, lambda _: f"a profile of {arguments.island}: xprof --logdir {folder}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    from diloco_jax.settings.text import load
    from diloco_jax.tools.report.page import write_report
    from diloco_jax.tools.report.perfetto import write_perfetto

    if arguments.perfetto is not None:
        config, path = load(run_config(arguments.run)), Path(arguments.perfetto) if arguments.perfetto else None
        trace = write_perfetto(Path(arguments.run), config.protocol, config.train.steps, config.budget, path)
        show(arguments, {"perfetto": str(trace)}, lambda _: f"{trace}: open it in ui.perfetto.dev")
        return 0
    show(arguments, {"report": str(write_report(Path(arguments.run)))}, lambda result: result["report"])
    return 0


def replay(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.files import CONFIG_FILE, new_run_dir
    from diloco_jax.settings.text import dump, load
    from diloco_jax.tools.replay.process import run_as_island
    from diloco_jax.tools.replay.scenario import as_simulated

    config = as_simulated(load(arguments.config or run_config(arguments.run)), Path(arguments.run))
    code = run_as_island(config, arguments)
    if code is not None:
        return code
    from diloco_jax.tools.replay.replay import describe, replay_run, replay_synthetic

    if arguments.config:
        out = Path(arguments.out) if arguments.out else new_run_dir(Path(config.runs_dir), config.name)
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
        result = {"run_dir": str(out), **replay_synthetic(config, Path(arguments.run), out, arguments.until)}
    else:
        result = replay_run(config, Path(arguments.run), arguments.until)
    show(arguments, result, describe)
    return 0 if result.get("identical", True) else FAILED


def audit(arguments: argparse.Namespace) -> int:
    from diloco_jax.settings.text import load
    from diloco_jax.tools.replay.audit import audit as audit_run
    from diloco_jax.tools.replay.audit import describe
    from diloco_jax.tools.replay.scenario import read_scenario

    run_dir = Path(arguments.run)
    scenario = read_scenario(run_dir) if arguments.config is None else None
    if scenario is not None:
        result = audit_run(run_dir, scenario.protocol, scenario.total_steps, scenario.budget)
    else:
        config = load(arguments.config or run_config(arguments.run))
        result = audit_run(run_dir, config.protocol, config.train.steps, config.budget)
    show(arguments, result, describe)
    return FAILED if result["violations"] else 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the loss of the newest checkpoint, or of a config's initial model, on the held-out data."""
    from diloco_jax.runtime.model.evaluation import Evaluator
    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.tools.report.live import scores_text

    config, parameters, meta = _newest(arguments.run)
    if arguments.batches is not None and arguments.batches < 1:
        raise ValueError(f"--batches is {arguments.batches}; use at least 1")
    batches = arguments.batches or config.train.final_eval_batches
    result = Evaluator(config).evaluate(parameters, batches, meta["global_step"])
    bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] is not None else ""
    told = f"global step {meta['global_step']}: loss {result['loss']:.4f}{bits} on {result['tokens']} tokens"
    told += scores_text(result["scores"])
    show(arguments, finite({**result, "global_step": meta["global_step"]}), lambda _: told)
    return 0


def sample(arguments: argparse.Namespace) -> int:
    """Print what the newest checkpoint writes."""
    if arguments.bytes < 1 or arguments.temperature < 0 or not arguments.prompt:
        raise ValueError(
            f"--bytes is {arguments.bytes}, --temperature {arguments.temperature:g}, --prompt {arguments.prompt!r}; "
            "use at least one byte, a temperature of at least 0, and a prompt of at least one character"
        )
    text, step = written(arguments.run, arguments.bytes, arguments.prompt, arguments.temperature, arguments.seed)
    result = {"prompt": arguments.prompt, "text": text, "global_step": step}
    show(arguments, result, lambda _: arguments.prompt + text)
    return 0


def written(run: str, count: int, prompt: str = PROMPT, temperature: float = 0.7, seed: int = 0) -> tuple[str, int]:
    """Let the newest checkpoint of a run continue a prompt.

    Returns:
        The text without the prompt, with nothing in it that a terminal would obey; and the checkpoint's global step.

    Raises:
        ValueError: there is no checkpoint that can be read, or its model cannot write.
    """
    from diloco_jax.runtime.model.evaluation import Evaluator, Writing

    config, parameters, meta = _newest(run)
    raw = Evaluator(config).write(prompt.encode(), parameters, count, Writing(temperature, seed))
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in raw.decode(errors="replace")
    )
    return text, meta["global_step"]


def _newest(run: str) -> tuple[RunConfig, Mapping[str, np.ndarray], Mapping[str, Any]]:
    from diloco_jax.runtime.model.evaluation import Evaluator
    from diloco_jax.runtime.records.checkpoint import load_parameters, newest_readable
    from diloco_jax.runtime.records.files import CHECKPOINTS
    from diloco_jax.settings.text import load

    if Path(run).is_file():
        config = load(run)
        return config, Evaluator(config).initial_parameters(), {"global_step": 0}
    found = newest_readable(Path(run) / CHECKPOINTS, load_parameters)
    if found is None:
        raise ValueError(f"{run} holds no checkpoint that can be read; give the folder of a run, such as runs/NAME")
    return load(run_config(run)), *found[1]
