"""Subcommand that takes a stopped run back to an older snapshot."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import run_config, show


def _rewind_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument(
        "--to", type=int, metavar="STEP", help="global step of the snapshot to continue from; default: list them"
    )


@command("rewind", "List the snapshots of a run, or let a stopped run continue from an older one.", _rewind_options)
def rewind(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.local.rewind import go_back, list_snapshots
    from diloco_jax.runtime.records.files import resume_command, states_elsewhere
    from diloco_jax.settings.text import load

    path = run_config(arguments.run)
    run_dir = Path(arguments.run)
    if arguments.to is None:
        facts = [each._asdict() for each in list_snapshots(run_dir)]
        show(arguments, {"snapshots": facts}, _table)
        return 0
    config = load(path)
    elsewhere = states_elsewhere(config.checkpoints.states, config.name).removeprefix("file://")
    remote = elsewhere if "://" in elsewhere else ""
    moved = go_back(run_dir, arguments.to, Path(elsewhere).expanduser() if elsewhere and not remote else None)
    result = {"global_step": arguments.to, "moved_to": [str(folder) for folder in moved], "delete_in": remote}
    show(arguments, {**result, "resume": resume_command(run_dir)}, _describe)
    return 0


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'global step':>11}  {'written':<20}  evaluation loss up to then"]
    for each in result["snapshots"]:
        written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(each["written_unix_s"]))
        loss = "none" if each["loss"] is None else f"{each['loss']:.4f}"
        lines.append(f"{each['global_step']:>11}  {written:<20}  {loss}")
    return "\n".join(lines) if len(lines) > 1 else "no snapshot; protocol.snapshot_every decides when one is written"


def _describe(result: dict[str, Any]) -> str:
    step, folders = result["global_step"], " and ".join(result["moved_to"])
    lines = [f"everything newer than global step {step} is now in {folders}; delete it when you are sure"]
    if not folders:
        lines = [f"nothing is newer than the snapshot of global step {step}"]
    if where := result["delete_in"]:
        lines.append(
            f"before you continue, delete the states of later global steps in {where}: islands would load them"
        )
    lines.append(f"to continue from there: {result['resume']} (or diloco syncer, and each island)")
    return "\n".join(lines)
