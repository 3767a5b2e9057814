"""Subcommands for what comes before a run: certificates, slices, machines, and the way between them."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from diloco_jax.cli.shared import COMPILER, FAILED, learner_dir, load_config, show


def certs(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.trust.certificates import describe, make, settings

    folder = Path(arguments.folder)
    made = make(folder, [name for name in arguments.learners.split(",") if name], days=arguments.days)
    if arguments.json:
        written, kept = [str(path) for path in made.written], [str(path) for path in made.kept]
        print(json.dumps({"written": written, "kept": kept, "settings": settings(folder)}))
    else:
        print(describe(folder, made))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.signals import stop_on_signals
    from diloco_jax.runtime.records.status import known_address
    from diloco_jax.tools.doctor.examine import as_dict, describe, examine, serve

    config = load_config(arguments)
    if arguments.listen:
        serve(config, stop_on_signals(), lambda line: print(line, flush=True))
        return 0
    run_dir = learner_dir(arguments, config)
    address = arguments.syncer or known_address(run_dir, config)
    checks = examine(config, run_dir, island=arguments.island or "", address=address, seconds=arguments.seconds)
    result = as_dict(checks)
    show(arguments, result, lambda _: describe(checks))
    return 0 if result["ok"] else FAILED


def launch(arguments: argparse.Namespace) -> int:
    from functools import partial

    from diloco_jax.tools.launch.needs import describe_needs, needs_of
    from diloco_jax.tools.launch.write import WAYS, check_tools, describe, run, write

    config = load_config(arguments)
    plan = WAYS[arguments.way].plan(config)
    if arguments.run:
        check_tools(plan)
    target = arguments.out or (arguments.run and str(Path(config.runs_dir) / f"{config.name}-{arguments.way}"))
    paths = write(plan, Path(target), force=arguments.force) if target else []
    needs: dict[str, Any] | None = None
    try:
        needs = needs_of(config)
        told = "\n".join(describe_needs(config, needs))
    except ValueError as error:  # the model may be in the image alone
        told = f"what the machines need is not known here: {error}"
    if arguments.run:
        say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
        say(told)
        run(plan, Path(target), say)
    if arguments.json:
        texts = {} if target else plan.files
        written = {"out": target or None, "files": [str(path) for path in paths] or list(plan.files), "texts": texts}
        ran = {"commands": plan.create, "ran": arguments.run, "needs": needs}
        print(json.dumps({"way": arguments.way, **written, **ran}))
    elif not target:
        print(f"{describe(plan)}\n\n{told}")
    elif not arguments.run:
        print(f"{told}\n{len(paths)} files in {target}; read {target}/README.md, then run {target}/create.sh")
    return 0


def preflight(arguments: argparse.Namespace) -> int:
    from concurrent.futures import Future

    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.tools.preflight.judge import preflight
    from diloco_jax.tools.preflight.report import describe

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
    show(arguments, finite(result), lambda _: describe(result))
    return 0 if result["ok"] else FAILED
