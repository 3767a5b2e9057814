"""Subcommands about data: text to a token store, and what a run will read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from diloco_jax.cli.shared import load_config, show


def tokenize(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from diloco_jax.training.data.documents import TextSource
    from diloco_jax.training.data.store import read_facts
    from diloco_jax.training.data.tokenizing import build_store

    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; use 1 or more, or leave it out for one per core")
    source = TextSource(arguments.source, "", tuple(arguments.patterns), arguments.field)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("listing", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        out = build_store(source, arguments.tokenizer, Path(arguments.out), arguments.workers or 0, tell)
    facts = read_facts(out)
    told = {name: facts[name] for name in ("tokens", "documents", "bytes", "vocab_size", "tokenizer")}
    show(arguments, {"out": str(out), **told, "files": len(facts["files"])}, _describe)
    return 0


def _describe(result: dict[str, Any]) -> str:
    return (
        f"{result['tokens']:,} tokens of {result['documents']:,} documents, {result['bytes'] / result['tokens']:.2f} "
        f"bytes per token, {result['vocab_size']:,} ids: {result['out']}"
    )


def data(arguments: argparse.Namespace) -> int:
    from diloco_jax.tools.report.reading import describe, reading

    show(arguments, reading(load_config(arguments)), describe)
    return 0
