"""Subcommands for what comes before a run: certificates, slices, machines, and the way between them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from diloco_jax.cli_config import COMPILER, FAILED, learner_dir, load_config


def certs(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.certificates import describe, make, settings

    folder = Path(arguments.folder)
    made = make(folder, [name for name in arguments.learners.split(",") if name], days=arguments.days)
    if arguments.json:
        written, kept = [str(path) for path in made.written], [str(path) for path in made.kept]
        print(json.dumps({"written": written, "kept": kept, "settings": settings(folder)}))
    else:
        print(describe(folder, made))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # shapes need no accelerator, and to look at one would take it from a run
    from diloco_jax.runtime.doctor import as_dict, describe, examine, serve
    from diloco_jax.runtime.processes import stop_on_signals
    from diloco_jax.runtime.status import known_address

    config = load_config(arguments)
    if arguments.listen:
        serve(config, stop_on_signals(), lambda line: print(line, flush=True))
        return 0
    run_dir = learner_dir(arguments, config)
    address = arguments.syncer or known_address(run_dir, config)
    checks = examine(config, run_dir, island=arguments.island or "", address=address, seconds=arguments.seconds)
    result = as_dict(checks)
    print(json.dumps(result) if arguments.json else describe(checks))
    return 0 if result["ok"] else FAILED


def launch(arguments: argparse.Namespace) -> int:
    from functools import partial

    from diloco_jax.config import dump
    from diloco_jax.launch.launch import WAYS, check_tools, describe, run, write

    config = load_config(arguments)
    plan = WAYS[arguments.way](config, dump)
    if arguments.run:
        check_tools(plan)
    target = arguments.out or (arguments.run and str(Path(config.runs_dir) / f"{config.name}-{arguments.way}"))
    paths = write(plan, Path(target), force=arguments.force) if target else []
    if arguments.run:
        run(plan, Path(target), partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True))
    if arguments.json:
        texts = {} if target else plan.files
        written = {"out": target or None, "files": [str(path) for path in paths] or list(plan.files), "texts": texts}
        print(json.dumps({"way": arguments.way, **written, "commands": plan.create, "ran": arguments.run}))
    elif not target:
        print(describe(plan))
    elif not arguments.run:
        print(f"{len(paths)} files in {target}; read {target}/README.md, then run {target}/create.sh")
    return 0


def preflight(arguments: argparse.Namespace) -> int:
    from concurrent.futures import Future

    from diloco_jax.launch.preflight import preflight
    from diloco_jax.launch.preflight_report import describe
    from diloco_jax.runtime.telemetry import finite

    config = load_config(arguments)
    done: Future[dict[str, Any]] = Future()

    def compile_all() -> None:
        try:
            done.set_result(
                preflight(config, arguments.topology, lambda line: print(line, file=sys.stderr, flush=True))
            )
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=compile_all, name=COMPILER, daemon=True).start()  # Ctrl-C need not wait for a compiler
    result = done.result()
    print(json.dumps(finite(result)) if arguments.json else describe(result))
    return 0 if result["ok"] else FAILED
