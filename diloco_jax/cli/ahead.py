"""Subcommands that look ahead: what a run would come to, without one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from diloco_jax.cli.shared import FAILED, load_config, show


def simulate(arguments: argparse.Namespace) -> int:
    from concurrent.futures.process import BrokenProcessPool

    from diloco_jax.sim.goodput.simulate import Options, run, settings_text

    if arguments.settings:
        print(settings_text())
        return 0
    words = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    paths = {name: _path(f"--{name}", words[name]) for name in ("tapes", "plot")}
    options = Options(**words | paths)
    try:
        result, text = run(options, lambda line: print(line, file=sys.stderr, flush=True))
    except BrokenProcessPool:
        message = "a process that simulates was killed, perhaps for want of memory; try fewer --workers"
        print(f"diloco simulate: {message}", file=sys.stderr)
        return FAILED
    show(arguments, result, lambda _: text)
    return 0


def _path(option: str, text: str | None) -> Path | None:
    if text == "":
        raise ValueError(f"{option} is empty; name a path, or leave it out")
    return None if text is None else Path(text)


def plan(arguments: argparse.Namespace) -> int:
    if arguments.preset:
        from diloco_jax.sim.goodput import table13

        assumed = [f"--{name.replace('_', '-')}" for name in _given(arguments)]
        if beside := [*filter(None, (arguments.config, *arguments.overrides)), *assumed]:
            raise ValueError(
                f"--preset {arguments.preset} has a model and links of its own; leave {beside[0]} out, or the preset"
            )
        print(json.dumps(table13.result()) if arguments.json else table13.describe())
        return 0
    if not arguments.config:
        raise ValueError("no config is named; give a YAML file, see configs/, or --preset table13")
    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.sim.goodput.assumptions import Assumptions
    from diloco_jax.tools.plan.advice import advise
    from diloco_jax.tools.plan.case import case_of
    from diloco_jax.tools.plan.forecast import forecast
    from diloco_jax.tools.plan.report import describe

    config = load_config(arguments)
    case = case_of(config, Assumptions(**_given(arguments)))
    result = forecast(case, advise(case))
    show(arguments, finite(result), lambda _: describe(result))
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the assumptions that the command line names."""
    from diloco_jax.sim.goodput.assumptions import Assumptions

    said = {field.name: getattr(arguments, field.name) for field in fields(Assumptions)}
    return {name: value for name, value in said.items() if value is not None}
