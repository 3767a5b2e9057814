"""The `diloco` command. Each subcommand imports what it needs, so that the light ones start fast.

Exit status: 0 done, 1 the run failed, 2 wrong input (one message, no traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.runtime.settings import RunConfig

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

OVERRIDES = "settings of the config may follow as --section.name value; `CONFIG --settings` lists them all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    known.overrides = rest
    try:
        return int(known.command(known))
    except ConnectionError as error:  # may work at the next attempt, so a supervisor may start us again
        print(f"diloco {known.name}: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError) as error:  # OSError: files and connections, with their names in the message
        print(f"diloco {known.name}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one model on islands that never wait for each other (Decoupled DiLoCo in JAX).",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *, config: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=OVERRIDES if config else None)
        sub.set_defaults(command=command, name=name, takes_overrides=config)
        if config:
            sub.add_argument("config", help="YAML file, see configs/")
            sub.add_argument("--settings", action="store_true", help="list all settings with their meaning, and exit")
            sub.add_argument("--run-dir", help="folder of the run; default: a new one below runs_dir")
        return sub

    train = add("train", _train, "A whole run on this machine: syncer and islands, live view, report.", config=True)
    train.add_argument("--json", action="store_true", help="print summary.json at the end, no live view")
    train.add_argument("--quiet", action="store_true", help="no live view")
    add("syncer", _syncer, "The syncer alone, for real machines.", config=True)
    learner = add("learner", _learner, "One learner alone, for real machines.", config=True)
    learner.add_argument("--island", required=True, help="name of the learner, unique in the run")
    learner.add_argument("--syncer", help="host:port of the syncer; default: transport.address")
    learner.add_argument("--incarnation", type=int, help="number that grows with every start; default: the time")
    add("baseline", _baseline, "The data-parallel baseline in this process, for `train`.", config=True)
    status = add("status", _status, "What a run does now, and what it waits for.")
    status.add_argument("run", help="folder of the run, or host:port of its syncer")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.add_argument("--allow-plaintext", action="store_true", help="ask an address that is not loopback")
    evaluate = add("eval", _eval, "Evaluate the global model of a run on its held-out data.")
    evaluate.add_argument("run", help="folder of the run")
    evaluate.add_argument("--batches", type=int, help="batches at most; default: train.final_eval_batches")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    report = add("report", _report, "Write report.html of a run.")
    report.add_argument("run", help="folder of the run")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


# ---- runs -----------------------------------------------------------------------------------------------------------


def _load(arguments: argparse.Namespace) -> RunConfig:
    from diloco_jax.config import load

    overrides = ["--help"] if arguments.settings else arguments.overrides
    return load(arguments.config, overrides, prog=f"diloco {arguments.name} {arguments.config}")


def _run_dir(arguments: argparse.Namespace, config: RunConfig) -> Path:
    """The run's folder with the resolved config in it."""
    from diloco_jax.config import dump
    from diloco_jax.runtime.files import CONFIG_FILE, METRICS_FILE, new_run_dir

    run_dir = Path(arguments.run_dir) if arguments.run_dir else new_run_dir(Path(config.runs_dir), config.name)
    if arguments.name == "train" and (run_dir / METRICS_FILE).exists():
        raise ValueError(f"{run_dir} holds a run already; choose another --run-dir, or remove that folder")
    run_dir.mkdir(parents=True, exist_ok=True)
    target = run_dir / CONFIG_FILE
    if not (target.exists() and target.samefile(arguments.config)):
        target.write_text(dump(config), encoding="utf-8")
    return run_dir


def _train(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.train import train_locally

    config = _load(arguments)
    run_dir = _run_dir(arguments, config)
    summary = train_locally(config, run_dir, live=not (arguments.json or arguments.quiet), quiet=arguments.json)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir), **summary}))
    if not summary:
        return FAILED
    return 0 if summary["complete"] else INTERRUPTED


def _syncer(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    run_dir = _run_dir(arguments, config)
    stop = _begin_process()
    from diloco_jax.runtime.run_syncer import SyncerRun

    summary = SyncerRun(config, run_dir, stop).run()
    return 0 if summary["complete"] or stop.is_set() else FAILED


def _learner(arguments: argparse.Namespace) -> int:
    import time

    config = _load(arguments)
    stop = _begin_process()
    from diloco_jax.runtime.run_learner import LearnerRun

    incarnation = arguments.incarnation if arguments.incarnation is not None else int(time.time() * 1000)
    address = arguments.syncer or config.transport.address
    reason = LearnerRun(config, arguments.island, incarnation, address, stop).run()
    print(f"{arguments.island}: {reason}", flush=True)
    return INTERRUPTED if stop.is_set() else 0  # 0 only when the syncer ended the run


def _baseline(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    run_dir = _run_dir(arguments, config)
    stop = _begin_process()
    from diloco_jax.runtime.data_parallel import DataParallelRun

    DataParallelRun(config, run_dir, stop).run()
    return 0


def _begin_process() -> Any:
    import logging

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    logging.getLogger("absl").setLevel(logging.WARNING)
    from diloco_jax.runtime.processes import die_with_parent, stop_on_signals

    die_with_parent()
    return stop_on_signals()


# ---- looking at runs ------------------------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.live import describe
    from diloco_jax.runtime.status import read_status

    status = read_status(arguments.run, allow_plaintext=arguments.allow_plaintext)
    print(json.dumps(status) if arguments.json else describe(status))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import load
    from diloco_jax.runtime.checkpoint import latest, load_parameters
    from diloco_jax.runtime.evaluation import Evaluator
    from diloco_jax.runtime.files import CHECKPOINTS, CONFIG_FILE
    from diloco_jax.runtime.telemetry import finite

    run_dir = Path(arguments.run)
    checkpoint = latest(run_dir / CHECKPOINTS)
    if checkpoint is None:
        raise ValueError(f"{run_dir} holds no checkpoint; give the folder of a run that has ended, such as runs/NAME")
    config = load(run_dir / CONFIG_FILE)
    if arguments.batches is not None and arguments.batches < 1:
        raise ValueError(f"--batches is {arguments.batches}; use at least 1")
    parameters, meta = load_parameters(checkpoint)
    result = Evaluator(config).evaluate(parameters, arguments.batches or config.train.final_eval_batches)
    if arguments.json:
        print(json.dumps(finite({**result, "global_step": meta["global_step"]})))
    else:
        bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] is not None else ""
        print(f"global step {meta['global_step']}: loss {result['loss']:.4f}{bits} on {result['tokens']} tokens")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.report import write_report

    path = write_report(Path(arguments.run))
    print(json.dumps({"report": str(path)}) if arguments.json else path)
    return 0
