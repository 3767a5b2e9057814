"""The commands `eval` and `sample`: the loss of a run's merged model, and text that it writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.shared import run_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from diloco_jax.settings.run import RunConfig

PROMPT = "\n"  # the beginning of a line


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the loss of the newest checkpoint on the held-out data."""
    from diloco_jax.runtime.model.evaluation import Evaluator
    from diloco_jax.runtime.records.telemetry import finite

    config, parameters, meta = _newest(arguments.run)
    if arguments.batches is not None and arguments.batches < 1:
        raise ValueError(f"--batches is {arguments.batches}; use at least 1")
    result = Evaluator(config).evaluate(parameters, arguments.batches or config.train.final_eval_batches)
    if arguments.json:
        print(json.dumps(finite({**result, "global_step": meta["global_step"]})))
    else:
        bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] is not None else ""
        print(f"global step {meta['global_step']}: loss {result['loss']:.4f}{bits} on {result['tokens']} tokens")
    return 0


def sample(arguments: argparse.Namespace) -> int:
    """Print what the newest checkpoint writes."""
    if arguments.bytes < 1 or arguments.temperature < 0 or not arguments.prompt:
        raise ValueError(
            f"--bytes is {arguments.bytes}, --temperature {arguments.temperature:g}, --prompt {arguments.prompt!r}; "
            "use at least one byte, a temperature of at least 0, and a prompt of at least one character"
        )
    text, step = written(arguments.run, arguments.bytes, arguments.prompt, arguments.temperature, arguments.seed)
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": text, "global_step": step}))
    else:
        print(arguments.prompt + text)
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
    from diloco_jax.runtime.records.checkpoint import load_parameters, newest_readable
    from diloco_jax.runtime.records.files import CHECKPOINTS
    from diloco_jax.settings.text import load

    found = newest_readable(Path(run) / CHECKPOINTS, load_parameters)
    if found is None:
        raise ValueError(f"{run} holds no checkpoint that can be read; give the folder of a run, such as runs/NAME")
    return load(run_config(run)), *found[1]
