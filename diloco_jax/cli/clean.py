"""Subcommand for what a run has left in a bucket."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import show

if TYPE_CHECKING:
    from diloco_jax.transport.link import TransportConfig
    from diloco_jax.transport.store.leftovers import Left


def _clean_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="address of the bucket, folder of the run, or its YAML file")
    parser.add_argument("--config", help="YAML file whose transport section has the token, for an address")
    parser.add_argument("--dry-run", action="store_true", help="show what is left, and delete nothing")
    parser.add_argument("--force", action="store_true", help="delete although a syncer may be alive; do not look")


@command("clean", "Delete what an ended run has left in its bucket.", _clean_options)
def clean(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.store.leftovers import LIFE_S, delete_left, find_left, is_alive

    config = _bucket_of(arguments.run, arguments.config)
    left = find_left(config)
    facts = _facts(config, left)
    if not (arguments.dry_run or arguments.force or arguments.json) and left.ours:
        print(f"waiting up to {LIFE_S:.0f} s for a sign of life of a syncer", file=sys.stderr, flush=True)
    if left.ours and not (arguments.dry_run or arguments.force) and is_alive(config):
        raise ValueError(
            f"a syncer is alive at {config.address}: stop the run first, or use --force, which makes its islands "
            "connect again"
        )
    facts["deleted"] = 0 if arguments.dry_run else delete_left(config)
    show(arguments, facts, _describe)
    return 0


def _bucket_of(run: str, given: str | None) -> TransportConfig:
    """Return the settings that reach a bucket, named by its address, by a run's folder or by a config.

    Raises:
        ValueError: There is no such folder or config, or its address is not a bucket.
    """
    from dataclasses import replace

    from diloco_jax.runtime.records.files import CONFIG_FILE
    from diloco_jax.runtime.records.status import is_address, known_address
    from diloco_jax.settings.packed import find_config
    from diloco_jax.settings.text import load
    from diloco_jax.transport.link import TransportConfig, bucket_scheme, check_address

    if is_address(run):
        check_address(run, "the address")
        config = replace(load(given).transport if given else TransportConfig(), address=run)
    else:
        folder = Path(run)
        loaded = load(given or (folder / CONFIG_FILE if folder.is_dir() else find_config(run)))
        address = known_address(folder, loaded) if folder.is_dir() else loaded.transport.address
        config = replace(loaded.transport, address=address)
    if not bucket_scheme(config.address):
        raise ValueError(f"the address of {run} is {config.address}, not a bucket: its run leaves nothing to delete")
    return config


def _facts(config: TransportConfig, left: Left) -> dict[str, Any]:
    return {
        "address": config.address,
        "objects": len(left.ours),
        "copied": left.copied,
        "others": left.others,
        "epoch": left.epoch,
        "run": None if left.leader is None else left.leader.run_id,
        "sign_s_ago": None if left.sign_s_ago is None else round(left.sign_s_ago, 1),
    }


def _describe(facts: dict[str, Any]) -> str:
    from diloco_jax.runtime.figures.forms import format_duration

    lines = [f"{facts['address']} has objects of a run: {facts['objects']:,}"]
    if facts["epoch"] is not None:
        run = (
            f"run {facts['run']!r}" if facts["run"] else "a run that this token does not open (--config names another)"
        )
        lines.append(f"leader: the syncer of epoch {facts['epoch']} of {run}")
    if facts["sign_s_ago"] is not None:
        lines.append(f"newest sign of life: {format_duration(facts['sign_s_ago'])} ago")
    if facts["copied"]:
        lines.append(f"of them, the copy of a tape and snapshots, which a standby needs: {facts['copied']:,}")
    if facts["others"]:
        lines.append(f"other objects, which stay: {facts['others']:,}")
    if facts["objects"]:
        lines.append(f"deleted: {facts['deleted']:,}" if facts["deleted"] else "nothing was deleted (--dry-run)")
    return "\n".join(lines)
