"""Subcommands for the first minutes: a config, its schema for editors, completion for shells, and the data."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import load_config, show
from diloco_jax.settings.packed import packed

# For each shell, a function that offers packaged configs and files.
CONFIGS = {
    "bash": '_diloco_configs() { compgen -W "%s" -- "$1"; compgen -f -X "!*.yaml" -- "$1"; compgen -d -- "$1"; }',
    "zsh": '_diloco_configs() { compadd -- %s; _files -g "*.yaml"; }',
    "fish": 'function _diloco_configs; printf "%%s\\n" %s; __fish_complete_suffix .yaml; end',
}


def _init_options(parser: Parser) -> None:
    parser.add_argument(
        "config", nargs="?", choices=tuple(packed()), default="quickstart", metavar="NAME", help=", ".join(packed())
    )
    parser.add_argument("--dir", default=".", help="folder for both; default: the current one")


@command("init", "Write a config to start with, and its schema for your editor.", _init_options)
def init(arguments: argparse.Namespace) -> int:
    """Write a config to start with, and the schema beside it."""
    from diloco_jax.settings.packed import SCHEMA_FILE, copy_config
    from diloco_jax.settings.schema import config_schema

    folder = Path(arguments.dir)
    target = copy_config(arguments.config, folder)
    (folder / SCHEMA_FILE).write_text(json.dumps(config_schema(), indent=1) + "\n", encoding="utf-8")
    print(f"{target} is yours to change, {folder / SCHEMA_FILE} is for your editor; next: diloco train {target}")
    return 0


@command("schema", "Print the JSON Schema of a config, for editors.")
def schema(_: argparse.Namespace) -> int:
    from diloco_jax.settings.schema import config_schema

    print(json.dumps(config_schema(), indent=1))
    return 0


def _completion_options(parser: Parser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="")


@command("completion", "Print a script that makes a shell complete this command.", _completion_options)
def completion(arguments: argparse.Namespace) -> int:
    """Print a script that completes commands, options, settings and configs."""
    import shtab

    from diloco_jax.settings.schema import config_schema, setting_names

    completers: dict[str, Any] = {"config": dict.fromkeys(CONFIGS, "_diloco_configs") | {"fish": "(_diloco_configs)"}}
    completers |= dict.fromkeys(("run", "run_dir", "folder", "dir", "out"), shtab.DIRECTORY)
    settings = [*setting_names(config_schema())]
    for sub in _commands(arguments.parser):
        if sub.get_default("takes_overrides") and sub.get_default("name") != "simulate":
            for name, text in settings:
                # A command may have an option with the name of a setting, such as --seed of `chaos`.
                if f"--{name}" not in sub._option_string_actions:
                    sub.add_argument(f"--{name}", help=" ".join(text.split(". ")[0].split()).replace("%", "%%"))
        for action in sub._actions:
            if action.choices is None and action.dest in completers:
                action.complete = completers[action.dest]  # type: ignore[attr-defined]
    preamble: Any = {arguments.shell: CONFIGS[arguments.shell] % " ".join(packed())}
    print(shtab.complete(arguments.parser, arguments.shell, preamble=preamble))
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _tokenize_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument(
        "source",
        help="file, folder or URL (gs://, s3://); suffixes show what it is: text, JSONL, Parquet, Arrow or ArrayRecord",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="FOLDER|train:SIZE|bytes",
        help="folder with Hugging Face's tokenizer.json, train:SIZE for a new tokenizer with SIZE ids, or bytes",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the store")
    parser.add_argument("--field", help="column or key with the text; default: text, with --chat messages")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations: messages, or prompt and completion; the tokenizer's chat template writes them",
    )
    parser.add_argument(
        "--loss-on",
        choices=("completion", "last", "all"),
        help="with --chat: train on the assistant's turns (completion, the default), the last one, or all tokens",
    )
    parser.add_argument("--patterns", nargs="+", default=["*"], help="names of files to read in a folder, such as *.py")
    parser.add_argument("--workers", type=int, help="processes, or tasks at a time; default: one on each core")
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: processes of this machine, the default; ray: tasks of a Ray cluster, which writes the same files",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT|auto",
        help="address of the Ray cluster; default: a new cluster on this machine, until the command ends",
    )


@command(
    "tokenize",
    "Convert text to a token store for runs; after an interruption the same command continues.",
    _tokenize_options,
)
def tokenize(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from diloco_jax.training.data.cluster import on_ray
    from diloco_jax.training.data.documents import MESSAGES, TEXT, TextSource
    from diloco_jax.training.data.store import read_facts
    from diloco_jax.training.data.tokenizing import build_store

    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; use 1 or more, or leave it out for one per core")
    if arguments.address and arguments.engine != "ray":
        raise ValueError(f"--address is {arguments.address}, but --engine is local; add --engine ray, or remove it")
    engine = on_ray(arguments.address or "", arguments.workers or 0) if arguments.engine == "ray" else None
    if arguments.loss_on and not arguments.chat:
        raise ValueError(f"--loss-on is {arguments.loss_on}, which only conversations have; add --chat, or remove it")
    field = arguments.field or (MESSAGES if arguments.chat else TEXT)
    loss_on: Any = (arguments.loss_on or "completion") if arguments.chat else None
    source = TextSource(arguments.source, "", tuple(arguments.patterns), field, loss_on)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    how: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, TimeRemainingColumn(), **how) as progress:
        task = progress.add_task("listing", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        out = build_store(source, arguments.tokenizer, Path(arguments.out), arguments.workers or 0, tell, engine)
    facts = read_facts(out)
    shown = {name: facts[name] for name in ("tokens", "documents", "bytes", "vocab_size", "tokenizer")}
    shown |= {
        name: facts[name] for name in ("rows_left_out", "documents_replaced", "loss_on", "trained") if name in facts
    }
    show(arguments, {"out": str(out), **shown, "files": len(facts["files"])}, _describe)
    return 0


def _describe(result: dict[str, Any]) -> str:
    lines = [
        f"{result['tokens']:,} tokens of {result['documents']:,} documents, {result['bytes'] / result['tokens']:.2f} "
        f"bytes per token, {result['vocab_size']:,} ids: {result['out']}"
    ]
    if "trained" in result:
        lines.append(f"{result['trained']:,} of these tokens are trained on (loss on {result['loss_on']})")
    if rows := result.get("rows_left_out"):
        empty = "no assistant's turn" if "trained" in result else "no text (null, or empty)"
        lines.append(f"{rows:,} rows have {empty} and are left out")
    if count := result.get("documents_replaced"):
        lines.append(f"{count:,} documents have U+FFFD, which replaces bytes that are not valid UTF-8")
    return "\n".join(lines)


def _data_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_json()


@command("data", "Show what a run will read: sources, tokens, epochs, samples as text.", _data_options)
def data(arguments: argparse.Namespace) -> int:
    from diloco_jax.tools.plan.reading import describe, reading

    show(arguments, reading(load_config(arguments)), describe)
    return 0
