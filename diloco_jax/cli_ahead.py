"""Subcommands that look ahead: what a run would come to, without one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from diloco_jax.cli_config import FAILED, load_config


def simulate(arguments: argparse.Namespace) -> int:
    from concurrent.futures.process import BrokenProcessPool

    from diloco_jax.cli_like import like
    from diloco_jax.sim.simulate import Options, run, settings_text

    if arguments.like is not None:
        return like(arguments)
    if arguments.calibrate:
        raise ValueError("--calibrate is for --like RUN, the run that is compared; name it, or leave --calibrate out")
    if arguments.settings:
        print(settings_text())
        return 0
    options = Options(
        preset=arguments.preset,
        methods=arguments.methods,
        learners=arguments.learners,
        chips=arguments.chips,
        hours=arguments.hours,
        seed=arguments.seed,
        workers=arguments.workers,
        fast=arguments.fast,
        tapes=_path("--tapes", arguments.tapes),
        plot=_path("--plot", arguments.plot),
        choose=arguments.choose,
        penalty=arguments.penalty,
        parameters=arguments.parameters,
        loss_slope=arguments.loss_slope,
        overrides=arguments.overrides,
    )
    try:
        result, text = run(options, lambda line: print(line, file=sys.stderr, flush=True))
    except BrokenProcessPool:
        message = "a process that simulates was killed, perhaps for want of memory; try fewer --workers"
        print(f"diloco simulate: {message}", file=sys.stderr)
        return FAILED
    print(json.dumps(result) if arguments.json else text)
    return 0


def _path(option: str, text: str | None) -> Path | None:
    if text == "":
        raise ValueError(f"{option} is empty; name a path, or leave it out")
    return None if text is None else Path(text)


def plan(arguments: argparse.Namespace) -> int:
    if arguments.preset:
        from diloco_jax.sim import table13

        assumed = [f"--{name.replace('_', '-')}" for name in _given(arguments)]
        if beside := [*filter(None, (arguments.config, *arguments.overrides)), *assumed]:
            raise ValueError(
                f"--preset {arguments.preset} has a model and links of its own; leave {beside[0]} out, or the preset"
            )
        print(json.dumps(table13.result()) if arguments.json else table13.describe())
        return 0
    if not arguments.config:
        raise ValueError("no config is named; give a YAML file, see configs/, or --preset table13")
    os.environ["JAX_PLATFORMS"] = "cpu"  # shapes need no accelerator, and to look at one would take it from a run
    from diloco_jax.launch.forecast import forecast
    from diloco_jax.launch.forecast_advice import advise
    from diloco_jax.launch.forecast_case import case_of
    from diloco_jax.launch.forecast_report import describe
    from diloco_jax.runtime.telemetry import finite
    from diloco_jax.sim.assumptions import Assumptions

    config = load_config(arguments)
    case = case_of(config, Assumptions(**_given(arguments)))
    result = forecast(case, advise(case))
    print(json.dumps(finite(result)) if arguments.json else describe(result))
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The assumptions that the command line names."""
    from diloco_jax.sim.assumptions import Assumptions

    said = {field.name: getattr(arguments, field.name) for field in fields(Assumptions)}
    return {name: value for name, value in said.items() if value is not None}
