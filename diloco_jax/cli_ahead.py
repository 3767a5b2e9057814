"""Subcommands that look ahead: what a run would come to, without one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def simulate(arguments: argparse.Namespace) -> int:
    from diloco_jax.cli_like import like
    from diloco_jax.sim.simulate import Options, run, settings_text

    if arguments.like:
        return like(arguments)
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
        tapes=Path(arguments.tapes) if arguments.tapes else None,
        plot=Path(arguments.plot) if arguments.plot else None,
        choose=arguments.choose,
        penalty=arguments.penalty,
        parameters=arguments.parameters,
        loss_slope=arguments.loss_slope,
        overrides=arguments.overrides,
    )
    result, text = run(options, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result) if arguments.json else text)
    return 0
