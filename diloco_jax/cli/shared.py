"""Steps that several subcommands share: load the config, find the folder of the run, print the result."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_jax.runtime.records.signals import without_collections

if TYPE_CHECKING:
    from diloco_jax.settings.run import RunConfig

Item = TypeVar("Item")

WIDTH_MAX = 100
# Where no terminal shows a bar, a line says how far a long command is.
SAY_EVERY_S = 15.0


def show(arguments: argparse.Namespace, result: Any, describe: Callable[[Any], object]) -> None:
    """Print a result: one JSON object with --json, else the text of `describe`."""
    print(json.dumps(result) if arguments.json else describe(result))


def watched(items: Iterable[Item], count: int, what: str) -> Iterator[Item]:
    """Yield the items, and show on stderr how many are done: a bar on a terminal, else a line now and then.

    Args:
        count: how many items there are.
        what: what the items are, such as parameters.
    """
    from rich.console import Console
    from rich.progress import Progress

    console, said_s = Console(stderr=True), time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=count)
        for done, item in enumerate(items, start=1):
            yield item
            # The memory is free before the next item is read.
            del item
            bar.advance(task)
            if not console.is_terminal and time.monotonic() - said_s > SAY_EVERY_S:
                print(f"{what}: {done} of {count}", file=sys.stderr, flush=True)
                said_s = time.monotonic()


def load_config(arguments: argparse.Namespace) -> RunConfig:
    """Load the config of a command line with the settings after it, and replace `arguments.config` by its path."""
    with without_collections():
        from diloco_jax.settings.packed import find_config
        from diloco_jax.settings.run import RunConfig
        from diloco_jax.settings.text import load

    command = f"diloco {arguments.name} {arguments.way}" if arguments.name == "launch" else f"diloco {arguments.name}"
    word = arguments.config
    arguments.config = find_config(word)
    if arguments.settings:
        from diloco_jax.settings.schema import describe_settings

        width = min(WIDTH_MAX, shutil.get_terminal_size().columns)
        every = arguments.all or arguments.name == "launch"
        print(describe_settings(load(arguments.config), f"{command} {word}", width, every=every))
        raise SystemExit(0)
    _check_content(Path(arguments.config))
    files = [word for word in arguments.overrides if word.endswith((".yaml", ".yml"))]
    if files and not Path(arguments.config).exists():
        raise ValueError(f"the config comes first, settings follow it: {command} {files[0]} --section.name value")
    for given in (each for each in arguments.overrides if each.startswith("--")):
        name = given.partition("=")[0].removeprefix("--").replace("-", "_")
        if "." not in name and name not in RunConfig.__slots__ and (near := arguments.sub.near_option(given)):
            arguments.sub.error(near)
    config = load(arguments.config)
    try:
        return load(arguments.config, arguments.overrides) if arguments.overrides else config
    except ValueError as error:
        raise ValueError(f"{error}; `{command} {word} --settings` lists all settings") from error


def run_config(run: str) -> Path:
    """Find the config in the folder of a run."""
    from diloco_jax.runtime.records.files import CONFIG_FILE

    path = Path(run) / CONFIG_FILE
    if not path.exists():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG_FILE}; give one, such as runs/NAME")
    _check_content(path)
    return path


def _check_content(path: Path) -> None:
    """Refuse an empty config in the folder of a run that has started: it would mean the defaults."""
    from diloco_jax.runtime.records.files import CONFIG_FILE, TAPE_FILE

    if path.name == CONFIG_FILE and (path.parent / TAPE_FILE).exists():
        from diloco_jax.runtime.local.resume import check_content

        check_content(path)


def learner_dir(arguments: argparse.Namespace, config: RunConfig) -> Path:
    """Return the run's folder. It is the same at every start of a learner, which finds its saved state there."""
    from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE

    path = Path(arguments.config)
    if arguments.run_dir:
        return Path(arguments.run_dir)
    if path.name == CONFIG_FILE and (path.parent / ADDRESS_FILE).exists():
        return path.parent
    return Path(config.runs_dir) / config.name
