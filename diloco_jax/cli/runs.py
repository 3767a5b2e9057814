"""Subcommands that train: a whole local run, or one of its processes."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import learner_dir, load_config, show
from diloco_jax.runtime.local.machine import AT_INPUT, CONTROLLER
from diloco_jax.runtime.records.files import PAGE_TOKEN, nothing_to_do
from diloco_jax.runtime.records.liveness import loop_name, tell_phase
from diloco_jax.runtime.records.log_lines import formatter
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, ended_at_once, without_collections

if TYPE_CHECKING:
    from diloco_jax.runtime.island.join import Hosts
    from diloco_jax.runtime.model.evaluation import Evaluator
    from diloco_jax.runtime.model.offered import OfferedModel
    from diloco_jax.runtime.records.folder_lock import LearnerLock
    from diloco_jax.runtime.records.pulse import Pulse
    from diloco_jax.runtime.slices.process import SlicePlace
    from diloco_jax.settings.run import RunConfig

PAGE_END_S = 5.0
CHAOS_LEARNER = "chaos-learner"
IMPORTING = "importing JAX and the program"

log = logging.getLogger(__name__)


def _tell_number(name: str, first: Path, chosen: Path) -> None:
    """Print one line to stderr if a new run got another folder than the name of its config, because that one exists."""
    if chosen == first:
        return
    folder = shlex.quote(str(first))
    options = {"train": f"--run-dir {folder} --resume", "syncer": f"--run-dir {folder}"}.get(name)
    remedy = f"; to resume the run of {first}, stop and start with {options}" if options else ""
    print(f"{first} exists, so this new run gets the folder {chosen}{remedy}", file=sys.stderr, flush=True)


@contextmanager
def _naming(run_dir: Path) -> Iterator[None]:
    """Let errors of a disk name the run's folder, because a failed write does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
            raise OSError(error.errno, error.strerror, str(run_dir)) from error
        raise


@contextmanager
def _run_folder(arguments: argparse.Namespace, config: RunConfig) -> Iterator[tuple[Path, RunConfig]]:
    """Create the run's folder with the full config in it, yield both, and hold the folder's lock.

    Nothing in the folder changes before the lock is held.
    """
    from diloco_jax.runtime.local.resume import (
        check_no_run,
        check_resumable,
        check_same_run,
        config_of_run,
        raise_limits,
    )
    from diloco_jax.runtime.records.files import (
        CONFIG_FILE,
        SUPERVISOR_LOCK,
        SYNCER_LOCK,
        TAPE_FILE,
        check_history,
        has_begun,
        new_run_dir,
        newest_run_dir,
    )
    from diloco_jax.runtime.records.folder_lock import FolderLock, refuse_if_locked
    from diloco_jax.runtime.records.signals import PARENT_ENV
    from diloco_jax.settings.text import as_begun, load, save

    supervises, resume = arguments.name in ("train", "chaos"), arguments.name == "train" and arguments.resume
    choose = newest_run_dir if resume else new_run_dir
    run_dir = Path(arguments.run_dir) if arguments.run_dir else choose(Path(config.runs_dir), config.name)
    target = run_dir / CONFIG_FILE
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"--run-dir {run_dir} is a file; name a folder")
    own_lock = SUPERVISOR_LOCK if supervises else SYNCER_LOCK
    if PARENT_ENV not in os.environ:
        refuse_if_locked(run_dir, SUPERVISOR_LOCK)
    refuse_if_locked(run_dir, SYNCER_LOCK)
    # A syncer of release 0.2.0 locks its tape instead.
    refuse_if_locked(run_dir, TAPE_FILE)
    rewinds = resume or (arguments.name == "syncer" and arguments.rewind)
    if resume:
        check_resumable(run_dir, config)
    elif supervises or arguments.name == "baseline":
        check_no_run(run_dir)
    elif not getattr(arguments, "standby", False):
        check_history(run_dir, rewinds=rewinds)
    began = config_of_run(run_dir) if target.exists() and has_begun(run_dir) else None
    if began is not None:
        config = as_begun(config, began)
        program = "syncer" if arguments.name == "syncer" else "train"
        check_same_run(began, config, run_dir, rewinds=rewinds, program=program)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (arguments.run_dir or resume):
        _tell_number(arguments.name, Path(config.runs_dir) / config.name, run_dir)
    with _naming(run_dir), FolderLock(run_dir, own_lock):
        if rewinds and began is not None:
            raise_limits(run_dir, began.limits, config.limits)
        # An unchanged file is not written again, since the disk may be full.
        unchanged = began == config
        if began is None and target.exists() and target.samefile(arguments.config):
            unchanged = load(target) == config
        if not unchanged:
            save(config, target)
        yield run_dir, config


def _train_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()
    parser.add_argument("--json", action="store_true", help="print summary.json at the end, no live view")
    parser.add_argument("--quiet", action="store_true", help="no live view")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue a run that ended early, or a complete run with more train.steps or train.tokens: the run in "
        "--run-dir, or the newest",
    )


@command(
    "train",
    "Train on this machine: syncer and islands, live view, report.",
    _train_options,
    example="diloco train quickstart --train.steps 200 --run-dir runs/mine",
    trains=True,
)
def train(arguments: argparse.Namespace) -> int:
    live = not (arguments.json or arguments.quiet)
    # Imports and checks take seconds before the live view starts.
    if live and sys.stdout.isatty() and not arguments.settings:
        print(f"{IMPORTING}, checking the config and this machine", flush=True)
    with without_collections():
        from diloco_jax.cli.train import train_locally
        from diloco_jax.runtime.local.check_input import check_input

    config = load_config(arguments)
    check_input(config, resumes=arguments.resume)
    with _run_folder(arguments, config) as (run_dir, config):
        summary = train_locally(config, run_dir, live=live, quiet=arguments.json, resume=arguments.resume)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir), **summary}))
    if not summary:
        return FAILED
    return 0 if summary["complete"] else INTERRUPTED


def _syncer_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()
    parser.add_argument(
        "--rewind", action="store_true", help="no process is alive: continue from the newest snapshot alone"
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait beside a run that has a bucket as address and syncer.standby, and take over if its syncer is lost",
    )


@command("syncer", "Run the syncer alone, for real machines; in the folder of a run it resumes.", _syncer_options)
def syncer(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    with _run_folder(arguments, config) as (run_dir, config):
        return _sync(config, run_dir, rewind=arguments.rewind, standby=arguments.standby)


def _sync(config: RunConfig, run_dir: Path, *, rewind: bool, standby: bool = False) -> int:
    tell_phase(run_dir, "syncer", IMPORTING)
    stop = _begin_process(run_dir)
    from diloco_jax.runtime.records.files import has_begun
    from diloco_jax.runtime.records.signals import PARENT_ENV, ended_at_once, give_memory_back

    def last_act() -> None:
        tell_phase(run_dir, "syncer", "")
        log.info(f"stopped before the run {'continued' if has_begun(run_dir) else 'began'}")

    with ended_at_once(last_act), without_collections():
        from diloco_jax.runtime.syncer.run import LATE_S, SyncerRun

    give_memory_back()

    model: Evaluator | OfferedModel | None
    if config.model.own:
        from diloco_jax.runtime.model.offered import offered_model

        model = offered_model(config, run_dir, stop)
        if model is None:
            return INTERRUPTED
    else:
        with ended_at_once(last_act):
            with without_collections():
                from diloco_jax.runtime.model.evaluation import Evaluator

            tell_phase(run_dir, "syncer", "loading the data and describing the model")
            model = Evaluator(config)
    page = _begin_page(config, run_dir)
    try:
        # A supervisor knows that its run is complete.
        late_s = 0.0 if PARENT_ENV in os.environ else LATE_S
        with ended_at_once(last_act):
            run = SyncerRun(config, run_dir, stop, model, rewind=rewind, late_s=late_s, standby=standby)
        summary = run.run(last_act)
    finally:
        if page is not None:
            page.terminate()
            try:
                page.wait(PAGE_END_S)
            except subprocess.TimeoutExpired:
                # The process is suspended, or hangs.
                page.kill()
                page.wait()
    # A standby had nothing to take over.
    if not summary:
        return INTERRUPTED if stop.is_set() else 0
    # A supervisor prints these lines itself.
    if PARENT_ENV not in os.environ:
        from diloco_jax.tools.terminal.closing import alarm_lines, ending, onward

        log.info(ending(summary, config))
        for text in filter(None, [*alarm_lines(summary, run_dir), onward(summary, config, run_dir, "syncer")]):
            log.info(text)
    return 0 if summary["complete"] or stop.is_set() else FAILED


def _begin_page(config: RunConfig, run_dir: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that serves the page, if the config has one; it prints the address to the syncer's log."""
    from diloco_jax.runtime.records.signals import PARENT_ENV

    if not config.syncer.page:
        return None
    words = [sys.executable, "-m", "diloco_jax", "view", str(run_dir), "--listen", config.syncer.page]
    words += ["--token-file", str(run_dir / PAGE_TOKEN)] + ["--allow-plaintext"] * config.transport.allow_plaintext
    return subprocess.Popen(words, env={**os.environ, PARENT_ENV: str(os.getpid())})


def _await_syncer(
    arguments: argparse.Namespace, run_dir: Path, config: RunConfig, stop: Event, names: Sequence[str]
) -> str:
    """Check the credentials of these learners, wait until the syncer listens, and return its address.

    Nothing is loaded or compiled before.
    """
    from contextlib import suppress
    from dataclasses import replace

    from diloco_jax.runtime.records.files import ADDRESS_FILE
    from diloco_jax.runtime.records.status import known_address
    from diloco_jax.transport.endpoints.reach import await_listener
    from diloco_jax.transport.link import check_address
    from diloco_jax.transport.trust.names import OutOfDate
    from diloco_jax.transport.trust.security import credentials

    address = arguments.syncer or known_address(run_dir, config)
    address_file = run_dir / ADDRESS_FILE
    setting = "--syncer" if arguments.syncer else str(address_file) if address_file.exists() else "transport.address"
    transport = replace(config.transport, address=address)
    check_address(address, setting)
    for name in names:
        # An expired certificate may be renewed before the connection.
        with suppress(OutOfDate):
            credentials(transport, name)
    await_listener(transport, setting, log.warning, stop)
    return address


def _learner_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()
    parser.add_argument("--island", required=True, help="name of the learner, unique in the run")
    parser.add_argument("--syncer", help="host:port of the syncer; default: from the run's folder, or the config")
    parser.add_argument("--incarnation", type=int, help="number that grows with every start; default: the time")
    parser.add_argument("--host", type=int, help="number of this process among islands.hosts processes; 0 leads")
    parser.add_argument(
        "--coordinator",
        default="",
        metavar="HOST:PORT",
        help="address where host 0 of the island, or of the slice, listens",
    )
    parser.add_argument("--slice", type=int, metavar="K", help="number of this process among islands.slices slices")
    parser.add_argument(
        "--slices",
        metavar="HOST:PORT,...",
        help="where each slice of the island listens for the others, in the order of their numbers; for a slice of "
        "several hosts: where its host with the number --host listens",
    )
    parser.add_argument(
        "--preemption",
        metavar="gce|FILE",
        help="leave the run when Google Cloud's metadata server, or the existence of FILE, announces the preemption of "
        "this machine; SIGTERM always has this effect",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="train on this file or folder, which stays on this machine: the syncer gets only its length and digests; "
        "--data.format and other settings of data say how to read it",
    )
    parser.add_argument("--standby", action="store_true", help=argparse.SUPPRESS)


@command("learner", "Run one learner alone, for real machines.", _learner_options, trains=True)
def learner(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.link import check_address, check_name

    if arguments.syncer and arguments.syncer != AT_INPUT:
        check_address(arguments.syncer, "--syncer")
    config = _with_own_data(load_config(arguments), arguments.island, arguments.data)
    _check_slice(arguments, config.islands.slices)
    run_dir, name = learner_dir(arguments, config), check_name(arguments.island)
    with ExitStack() as held:
        # A spare has no identity yet. Of several hosts only the first takes the lock, and each slice its own.
        if not (arguments.standby or arguments.host):
            own = name if arguments.slice is None else f"{name}.slice-{arguments.slice}"
            held.enter_context(_learner_lock(run_dir, own))
            # Another slice leads meanwhile, and the island has not started again.
            tell_phase(run_dir, name if arguments.slice is None else loop_name(name, 1 + arguments.slice), IMPORTING)
        return _learn(arguments, config, run_dir, held)


def _check_slice(arguments: argparse.Namespace, slices: int) -> None:
    """Check that the arguments name a slice of an island of several, or none; ValueError if not."""
    if slices == 1 and arguments.slice is not None:
        raise ValueError(
            f"--slice is {arguments.slice}, but islands.slices is 1; leave it out, or raise islands.slices"
        )
    if slices > 1 and (arguments.slice is None or not 0 <= arguments.slice < slices):
        raise ValueError(
            f"--slice is {arguments.slice}, but {arguments.island} has slices 0 to {slices - 1} (islands.slices); give "
            "each process its number"
        )
    addresses = arguments.slices.split(",") if arguments.slices else []
    if slices > 1 and len(addresses) != slices:
        raise ValueError(
            f"--slices names {len(addresses)} addresses, but islands.slices is {slices}; write "
            "HOST:PORT of each slice, separated by commas, the same on all of them"
        )


def _slice_place(arguments: argparse.Namespace, hosts: Hosts | None) -> SlicePlace:
    """Return the place of this process in an island of several slices."""
    from diloco_jax.runtime.slices.process import SlicePlace
    from diloco_jax.transport.link import listening_address

    own, addresses = arguments.slice, arguments.slices.split(",")
    addresses[own] = listening_address(addresses[own])
    return SlicePlace(own, tuple(addresses), hosts)


def _with_own_data(config: RunConfig, island: str, path: str | None) -> RunConfig:
    """Return the config of a learner: with the data that --data or islands.each names, if one of them does."""
    from dataclasses import replace

    from diloco_jax.settings.islands import IslandOverride
    from diloco_jax.training.data.config import OwnDataConfig

    own = config.islands.each.get(island, IslandOverride()).data
    if path is not None:
        return replace(config, data=replace(own or OwnDataConfig(), path=path).over(config.data, island))
    if own is not None and own.path is None and own.module is None:
        raise ValueError(f"islands.each.{island}.data names no path; name it on this machine with --data PATH")
    return config.of_island(island)


# A learner of `diloco chaos`. Other processes can inject faults into it.
chaos_learner = command(CHAOS_LEARNER, options=_learner_options, trains=True)(learner.function)


def _learner_lock(run_dir: Path, name: str) -> LearnerLock:
    from diloco_jax.runtime.records.folder_lock import LearnerLock

    return LearnerLock(run_dir, name)


def _learn(arguments: argparse.Namespace, config: RunConfig, run_dir: Path, held: ExitStack) -> int:
    stop = _begin_process(run_dir)
    waits = arguments.standby or arguments.syncer == AT_INPUT
    address = "" if waits else _await_syncer(arguments, run_dir, config, stop, [arguments.island])
    log.info(IMPORTING)
    with without_collections():
        from diloco_jax.protocol.messages import RUN_COMPLETE
        from diloco_jax.runtime.island.join import join, leave
        from diloco_jax.runtime.learner.joined import Joining, island_pulse
        from diloco_jax.runtime.learner.preemption import check_source, watch
        from diloco_jax.runtime.learner.run import LearnerRun, follow
        from diloco_jax.runtime.local.run import next_incarnation
        from diloco_jax.training.data.corpus import load_source

    make: Callable[..., LearnerRun] = LearnerRun
    pulse: Pulse | None = None
    if waits:
        from diloco_jax.runtime.local.loading import come_early, stand_by

        # From here on, a signal ends a process that waits or loads.
        if stop.is_set():
            return INTERRUPTED
        loads = arguments.name != CHAOS_LEARNER
        if arguments.standby:
            went = stand_by(config, run_dir, arguments.island, loads=loads)
        else:
            pulse = island_pulse(config, run_dir, arguments.island)
            came = come_early(config, arguments.island, pulse, loads=loads)
            went = None if came is None else (came[0], arguments.incarnation, came[1])
        if went is None:
            return 0
        address, arguments.incarnation, loaded = went
        if arguments.standby:
            held.enter_context(_learner_lock(run_dir, arguments.island))
        if loaded is not None:
            make = partial(LearnerRun, make_loop=lambda *_: loaded)
    if arguments.name == CHAOS_LEARNER:
        from diloco_jax.tools.chaos import learner as faulty

        make = faulty.chaos_learner(run_dir, arguments.island)
    incarnation = arguments.incarnation
    if incarnation is None:
        incarnation = next_incarnation(run_dir, arguments.island)
    if arguments.preemption:
        watch(check_source(arguments.preemption), stop)
    if config.island(arguments.island).hosts > 1:
        arguments.leave = leave

    def corpus() -> str:
        return load_source(config.data, config.train.seq_len).corpus

    hosts = join(config, arguments.island, incarnation, arguments.host, arguments.coordinator, corpus)
    if config.islands.slices > 1:
        from diloco_jax.runtime.slices.process import SliceProcess

        place, next_one = _slice_place(arguments, hosts), partial(next_incarnation, run_dir, arguments.island)
        return SliceProcess(config, arguments.island, place, address, run_dir, next_one, stop, make).run()
    incarnation = incarnation if hosts is None else hosts.incarnation
    pulse = pulse or island_pulse(config, run_dir, arguments.island, 0 if hosts is None else hosts.host)
    joining = Joining(config, arguments.island, incarnation, address, run_dir, pulse, hosts)
    if hosts is not None and hosts.host:
        return follow(joining, stop)
    run = make(joining, stop)
    reason = run.run()
    idle = reason == RUN_COMPLETE and not run.joined.machine.local_step
    print(nothing_to_do(arguments.island, run_dir) if idle else f"{arguments.island}: {reason}", flush=True)
    # The status is 0 only if the syncer ended the run.
    return INTERRUPTED if stop.is_set() else 0


def _islands_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()
    parser.add_argument("--syncer", help="host:port of the syncer; default: from the run's folder, or the config")


@command("islands", "Run all islands in this process, for one controller of slices.", _islands_options, trains=True)
def islands(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.link import check_address

    if arguments.syncer:
        check_address(arguments.syncer, "--syncer")
    config = load_config(arguments)
    run_dir = learner_dir(arguments, config)
    with ExitStack() as held:
        for name in config.islands.names:
            held.enter_context(_learner_lock(run_dir, name))
        return _control(arguments, config, run_dir)


def _control(arguments: argparse.Namespace, config: RunConfig, run_dir: Path) -> int:
    tell_phase(run_dir, CONTROLLER, IMPORTING)
    stop = _begin_process(run_dir)
    address = _await_syncer(arguments, run_dir, config, stop, config.islands.names)
    with without_collections():
        from diloco_jax.runtime.local.controller import IslandsRun
        from diloco_jax.runtime.local.pathways import use_pathways

    slices = use_pathways() if config.islands.pathways else None
    run = IslandsRun(config, run_dir, address, stop, slices=slices)
    # From now on each island reports its phase.
    tell_phase(run_dir, CONTROLLER, "")
    run.run()
    return INTERRUPTED if stop.is_set() else 0


def _chaos_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()
    parser.takes_json()
    parser.add_argument("--faults", type=int, default=20, help="number of faults; default: 20")
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule; default: 0")
    parser.add_argument("--kinds", help="kinds of faults, separated by commas; default: all that the run allows")
    parser.add_argument("--dry-run", action="store_true", help="print the schedule, and exit")


@command("chaos", "Train under a schedule of faults, and show what recovered and when.", _chaos_options, trains=True)
def chaos(arguments: argparse.Namespace) -> int:
    from diloco_jax.tools.chaos.schedule import draw_schedule, possible_kinds

    config = load_config(arguments)
    if config.islands.ray:
        raise ValueError("diloco chaos injects faults into islands of this machine; leave islands.ray out")
    given = arguments.kinds.split(",") if arguments.kinds else ()
    schedule = draw_schedule(
        arguments.seed,
        config.islands.names,
        faults=arguments.faults,
        steps=config.planned_steps,
        silence_s=config.protocol.silence_s,
        kinds=possible_kinds(config.transport.address, given, config.islands.slices, config.islands.count),
    )
    if arguments.dry_run:
        show(arguments, {"schedule": [str(fault) for fault in schedule]}, lambda result: "\n".join(result["schedule"]))
        return 0
    from diloco_jax.runtime.local.check_input import check_input
    from diloco_jax.tools.chaos.ledger import table
    from diloco_jax.tools.chaos.run import for_chaos, run_chaos

    config = for_chaos(config, len(schedule))
    check_input(config)
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    with _run_folder(arguments, config) as (run_dir, config):
        result = run_chaos(config, run_dir, schedule, say)
    show(arguments, {"run_dir": str(run_dir), "seed": arguments.seed, **result}, lambda _: table(result))
    return FAILED if result["problems"] else 0


def _baseline_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_run_dir()


@command("baseline", "Train the data-parallel baseline in this process, for `train`.", _baseline_options, trains=True)
def baseline(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    with _run_folder(arguments, config) as (run_dir, config):
        tell_phase(run_dir, "trainer", IMPORTING)
        stop = _begin_process(run_dir)
        from diloco_jax.runtime.local.baseline import DataParallelRun

        DataParallelRun(config, run_dir, stop).run()
    return 0


def _compile_ahead_options(parser: Parser) -> None:
    parser.add_argument("config")
    for name in ("--island", "--run-dir", "--set"):
        parser.add_argument(name)


@command("compile", options=_compile_ahead_options, trains=True)
def compile_ahead(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    report = partial(tell_phase, Path(arguments.run_dir), f"compiler-{arguments.island}")
    report(IMPORTING)
    _begin_process(Path(arguments.run_dir))
    with without_collections():
        from diloco_jax.runtime.local.loading import compiled_loop
        from diloco_jax.runtime.local.programs import keeping

    with ended_at_once(), keeping(arguments.set, Path(arguments.run_dir)):
        compiled_loop(config, arguments.island, report)
    report("")
    return 0


def _begin_log() -> None:
    # A library may have added a handler when it was imported. `force` replaces it.
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
    logging.getLogger().handlers[0].setFormatter(formatter())
    logging.getLogger("absl").setLevel(logging.WARNING)


def _begin_process(run_dir: Path) -> Any:
    _begin_log()
    from diloco_jax.runtime.records.files import PROGRAMS
    from diloco_jax.runtime.records.signals import die_with_parent, stop_on_signals
    from diloco_jax.settings.compiler import keep_programs

    die_with_parent()
    keep_programs(run_dir / PROGRAMS)
    return stop_on_signals()
