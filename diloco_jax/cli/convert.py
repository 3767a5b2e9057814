"""Subcommands for models in and out: a config that begins with public weights, a run's model for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_jax.cli.shared import run_config, show

if TYPE_CHECKING:
    import numpy as np


def begin(arguments: argparse.Namespace) -> int:
    """Write a config that begins with the weights of a public model."""
    from diloco_jax.settings.packed import find_config
    from diloco_jax.tools.export.files import begin_with

    folder = Path(arguments.folder)
    base = Path(find_config(arguments.config)) if arguments.config else None
    out = Path(arguments.out or f"{folder.resolve().name}.yaml")
    result = begin_with(folder, base, out, _watch)
    told = f"{result['parameters']:,} parameters checked; {out} begins with them, next: diloco train {out}"
    show(arguments, result, lambda _: told)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write a run's newest model for other programs."""
    from diloco_jax.settings.text import load
    from diloco_jax.tools.export.files import export

    config, run_dir, out = load(run_config(arguments.run)), Path(arguments.run), Path(arguments.out)
    result = export(config, run_dir, arguments.format, out, arguments.dtype, _watch)
    told = f"{out} holds the model of global step {result['global_step']}: {', '.join(result['files'])}"
    show(arguments, result, lambda _: told)
    return 0


def _watch(parameters: Iterable[tuple[str, np.ndarray]], count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Pass parameters on; on a terminal a bar shows how many came."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("parameters", total=count)
        for item in parameters:
            yield item
            del item  # before the next one is read
            bar.advance(task)
