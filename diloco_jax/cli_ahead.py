"""Subcommands that look ahead: what a run will do, told before it begins."""

from __future__ import annotations

import argparse


def simulate(arguments: argparse.Namespace) -> int:
    from diloco_jax.cli_like import like

    if not arguments.like:
        raise ValueError("say what to simulate: --like RUN, the folder of a run of `diloco chaos`")
    return like(arguments)
