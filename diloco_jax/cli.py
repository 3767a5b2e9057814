"""The `diloco` command. Each subcommand imports what it needs, so that the light ones start fast.

Exit status: 0 done, 1 the run failed, 2 wrong input (one message, no traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli_ahead import plan, simulate
from diloco_jax.cli_before import certs, doctor, launch, preflight
from diloco_jax.cli_config import COMPILER, FAILED, INTERRUPTED, WRONG_INPUT, learner_dir, load_config
from diloco_jax.cli_words import CHAOS_LEARNER, MERGE_SHARD, Command, make_parser

if TYPE_CHECKING:
    from diloco_jax.runtime.settings import RunConfig

DISK_TROUBLE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)  # may be over at the next attempt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = make_parser(_commands())
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    known.overrides = rest
    known.leave = None
    try:
        status = _status_of(known)
    except Exception:
        if known.leave is None:
            raise
        traceback.print_exc()
        status = FAILED
    if (
        known.leave is not None
    ):  # one of several processes of an island: the interpreter's end would wait for the others
        known.leave(status)
    if any(thread.name == COMPILER for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(status)  # a compiler cannot be interrupted, and the interpreter aborts when it ends below one
    return status


def _status_of(known: argparse.Namespace) -> int:
    """Run the command; errors for people become one line and a status."""
    try:
        status = int(known.command(known))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `diloco status RUN | head`: whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConnectionError as error:  # may work at the next attempt, so a supervisor may start us again
        print(f"diloco {known.name}: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError) as error:  # OSError: files, with their names in the message
        print(f"diloco {known.name}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, OSError) and error.errno in DISK_TROUBLE else WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _commands() -> dict[str, Command]:
    return {
        "train": _train,
        "syncer": _syncer,
        "learner": _learner,
        "islands": _islands,
        CHAOS_LEARNER: _learner,
        MERGE_SHARD: _merge_shard,
        "chaos": _chaos,
        "simulate": simulate,
        "baseline": _baseline,
        "launch": launch,
        "status": _status,
        "drain": _drain,
        "certs": certs,
        "doctor": doctor,
        "eval": _eval,
        "report": _report,
        "replay": _replay,
        "audit": _audit,
        "preflight": preflight,
        "plan": plan,
    }


# ---- runs -----------------------------------------------------------------------------------------------------------


def _run_dir(arguments: argparse.Namespace, config: RunConfig) -> Path:
    """The run's folder with the resolved config in it."""
    from diloco_jax.config import dump, load
    from diloco_jax.runtime.files import CONFIG_FILE, METRICS_FILE, TAPE_FILE, new_run_dir, newest_run_dir
    from diloco_jax.runtime.resume import check_resumable, check_same_run

    resume = arguments.name == "train" and arguments.resume
    choose = newest_run_dir if resume else new_run_dir
    run_dir = Path(arguments.run_dir) if arguments.run_dir else choose(Path(config.runs_dir), config.name)
    target = run_dir / CONFIG_FILE
    if resume:
        check_resumable(run_dir)
    elif arguments.name in ("train", "chaos") and (run_dir / METRICS_FILE).exists():
        raise ValueError(
            f"{run_dir} holds a run already; go on with it (--resume), choose another --run-dir, or remove that folder"
        )
    if target.exists() and (run_dir / TAPE_FILE).exists():
        check_same_run(load(target), config, run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (target.exists() and target.samefile(arguments.config)):
        target.write_text(dump(config), encoding="utf-8")
    return run_dir


def _train(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.train import train_locally

    config = load_config(arguments)
    run_dir = _run_dir(arguments, config)
    live = not (arguments.json or arguments.quiet)
    summary = train_locally(config, run_dir, live=live, quiet=arguments.json, resume=arguments.resume)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir), **summary}))
    if not summary:
        return FAILED
    return 0 if summary["complete"] else INTERRUPTED


def _syncer(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    run_dir = _run_dir(arguments, config)
    stop = _begin_process(run_dir)
    from diloco_jax.runtime.run_syncer import SyncerRun

    summary = SyncerRun(config, run_dir, stop, rewind=arguments.rewind).run()
    return 0 if summary["complete"] or stop.is_set() else FAILED


def _learner(arguments: argparse.Namespace) -> int:
    import time

    config = load_config(arguments)
    run_dir = learner_dir(arguments, config)
    stop = _begin_process(run_dir)
    from diloco_jax.runtime.follower import Follower
    from diloco_jax.runtime.hosts import join, leave
    from diloco_jax.runtime.preemption import check_source, watch
    from diloco_jax.runtime.run_learner import LearnerRun
    from diloco_jax.runtime.status import known_address

    kind: type[LearnerRun] = LearnerRun
    if arguments.name == CHAOS_LEARNER:
        from diloco_jax.runtime.chaos_learner import ChaosLearnerRun

        kind = ChaosLearnerRun
    incarnation = arguments.incarnation if arguments.incarnation is not None else int(time.time() * 1000)
    address = arguments.syncer or known_address(run_dir, config)
    if arguments.preemption:
        watch(check_source(arguments.preemption), stop)
    if config.island(arguments.island).hosts > 1:
        arguments.leave = leave
    hosts = join(config, arguments.island, incarnation, arguments.host, arguments.coordinator)
    if hosts is not None and hosts.host:
        return Follower(config, arguments.island, address, stop, hosts).run()
    reason = kind(config, arguments.island, incarnation, address, run_dir, stop, hosts).run()
    print(f"{arguments.island}: {reason}", flush=True)
    return INTERRUPTED if stop.is_set() else 0  # 0 only when the syncer ended the run


def _islands(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    run_dir = learner_dir(arguments, config)
    stop = _begin_process(run_dir)
    from diloco_jax.runtime.controller import IslandsRun, use_pathways
    from diloco_jax.runtime.status import known_address

    if config.islands.pathways:
        use_pathways()
    address = arguments.syncer or known_address(run_dir, config)
    IslandsRun(config, run_dir, address, stop).run()
    return INTERRUPTED if stop.is_set() else 0


def _chaos(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.chaos_schedule import KINDS, draw_schedule

    config = load_config(arguments)
    schedule = draw_schedule(
        arguments.seed,
        config.islands.names,
        faults=arguments.faults,
        steps=config.train.steps,
        lease_s=config.protocol.lease_s,
        kinds=arguments.kinds.split(",") if arguments.kinds else KINDS,
    )
    if arguments.dry_run:
        print(json.dumps({"schedule": [str(f) for f in schedule]}) if arguments.json else "\n".join(map(str, schedule)))
        return 0
    from functools import partial

    from diloco_jax.runtime.chaos import for_chaos, run_chaos
    from diloco_jax.runtime.chaos_verdict import table

    config = for_chaos(config, len(schedule))
    run_dir = _run_dir(arguments, config)
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    result = run_chaos(config, run_dir, schedule, say)
    print(json.dumps({"run_dir": str(run_dir), "seed": arguments.seed, **result}) if arguments.json else table(result))
    return FAILED if result["problems"] else 0


def _baseline(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    run_dir = _run_dir(arguments, config)
    stop = _begin_process(run_dir)
    from diloco_jax.runtime.data_parallel import DataParallelRun

    DataParallelRun(config, run_dir, stop).run()
    return 0


def _merge_shard(arguments: argparse.Namespace) -> int:
    import socket

    _begin_log()
    from diloco_jax.config import load
    from diloco_jax.runtime.run_shard import ShardRun

    connection = socket.socket(fileno=arguments.connection)
    ShardRun(load(arguments.config), arguments.shard, connection).run()
    return 0


def _begin_log() -> None:
    import logging

    # force: a library has put a handler of its own there when it was imported
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout, force=True)
    logging.getLogger("absl").setLevel(logging.WARNING)


def _begin_process(run_dir: Path) -> Any:
    _begin_log()
    from diloco_jax.runtime.processes import die_with_parent, stop_on_signals
    from diloco_jax.runtime.programs import keep_programs

    die_with_parent()
    keep_programs(run_dir)
    return stop_on_signals()


# ---- looking at runs ------------------------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import load
    from diloco_jax.runtime.live import describe
    from diloco_jax.runtime.status import read_status

    transport = load(arguments.config).transport if arguments.config else None
    status = read_status(arguments.run, allow_plaintext=arguments.allow_plaintext, transport=transport)
    print(json.dumps(status) if arguments.json else describe(status))
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import load
    from diloco_jax.runtime.files import CONFIG_FILE
    from diloco_jax.runtime.status import is_address, syncer_at
    from diloco_jax.transport.link import TransportConfig
    from diloco_jax.transport.questions import ask_drain

    run, config = arguments.run, arguments.config
    if config is None and not is_address(run):
        config = Path(run) / CONFIG_FILE
    known = TransportConfig() if config is None else load(config).transport
    syncer = syncer_at(run, known, allow_plaintext=arguments.allow_plaintext)
    ok, message = ask_drain(syncer, arguments.learner)
    if arguments.json:
        print(json.dumps({"learner": arguments.learner, "ok": ok, "message": message}))
    else:
        print(message if ok else f"diloco drain: {message}", file=sys.stdout if ok else sys.stderr)
    return 0 if ok else FAILED


def _eval(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import load
    from diloco_jax.runtime.checkpoint import load_parameters, newest_readable
    from diloco_jax.runtime.evaluation import Evaluator
    from diloco_jax.runtime.files import CHECKPOINTS, CONFIG_FILE
    from diloco_jax.runtime.telemetry import finite

    run_dir = Path(arguments.run)
    found = newest_readable(run_dir / CHECKPOINTS, load_parameters)
    if found is None:
        raise ValueError(f"{run_dir} holds no checkpoint that can be read; give the folder of a run, such as runs/NAME")
    config = load(run_dir / CONFIG_FILE)
    if arguments.batches is not None and arguments.batches < 1:
        raise ValueError(f"--batches is {arguments.batches}; use at least 1")
    _, (parameters, meta) = found
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


# ---- doing runs again -----------------------------------------------------------------------------------------------


def _replay(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import dump, load
    from diloco_jax.runtime.files import CONFIG_FILE, new_run_dir
    from diloco_jax.runtime.replay_process import run_as_island
    from diloco_jax.runtime.replay_scenario import as_simulated

    config = as_simulated(load(arguments.config or Path(arguments.run) / CONFIG_FILE), Path(arguments.run))
    code = run_as_island(config, arguments)
    if code is not None:
        return code
    from diloco_jax.runtime.replay import describe, replay_run, replay_synthetic

    if arguments.config:
        out = Path(arguments.out) if arguments.out else new_run_dir(Path(config.runs_dir), config.name)
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
        result = {"run_dir": str(out), **replay_synthetic(config, Path(arguments.run), out, arguments.until)}
    else:
        result = replay_run(config, Path(arguments.run), arguments.until)
    print(json.dumps(result) if arguments.json else describe(result))
    return 0 if result.get("identical", True) else FAILED


def _audit(arguments: argparse.Namespace) -> int:
    from diloco_jax.config import load
    from diloco_jax.runtime.audit import audit, describe
    from diloco_jax.runtime.files import CONFIG_FILE
    from diloco_jax.runtime.replay_scenario import read_scenario

    run_dir = Path(arguments.run)
    scenario = read_scenario(run_dir) if arguments.config is None else None
    if scenario is not None:
        result = audit(run_dir, scenario.protocol, scenario.total_steps)
    else:
        config = load(arguments.config or run_dir / CONFIG_FILE)
        result = audit(run_dir, config.protocol, config.train.steps)
    print(json.dumps(result) if arguments.json else describe(result))
    return FAILED if result["violations"] else 0


# ---- before runs ----------------------------------------------------------------------------------------------------
