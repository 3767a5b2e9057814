"""Subcommands about an existing run: watch it, drain, ban or admit a learner, report, compare, replay, audit."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import run_config, show, watched
from diloco_jax.runtime.records.files import CONFIG_FILE
from diloco_jax.runtime.records.signals import FAILED, without_collections

if TYPE_CHECKING:
    from diloco_jax.settings.run import RunConfig
    from diloco_jax.transport.link import TransportConfig


def load(path: str | Path) -> RunConfig:
    """Load a config. The import takes a second, so it happens only here."""
    from diloco_jax.settings.text import load

    return load(path)


def _status_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("--watch", action="store_true", help="show the live view until the run ends, or Ctrl-C")
    parser.add_argument("run", help="folder of the run, or host:port of its syncer")
    parser.add_argument("--config", help="YAML file whose transport section has the credentials for host:port")
    parser.add_argument(
        "--allow-plaintext", action="store_true", help="connect unencrypted to an address that is not loopback"
    )


@command("status", "Show what a run does now, and what it waits for.", _status_options)
def status(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.liveness import DEAD, read_phases
    from diloco_jax.runtime.records.status import read_status
    from diloco_jax.tools.terminal.words import describe
    from diloco_jax.transport.link import TransportConfig

    own = Path(arguments.run) / CONFIG_FILE
    chosen = arguments.config or (own if own.exists() else None)

    @cache
    def config() -> RunConfig | None:
        return load(chosen) if chosen else None

    def transport() -> TransportConfig:
        found = config()
        return found.transport if found is not None else TransportConfig()

    if arguments.config or arguments.watch:
        config()

    read = partial(
        read_status, arguments.run, _ask_syncer, allow_plaintext=arguments.allow_plaintext, transport=transport
    )
    if arguments.watch:
        found = _watch(arguments, own.parent if own.exists() else None, read) or read()
    else:
        starting = read_phases(own.parent) if own.exists() else []
        show(arguments, found := read(), lambda read: describe(read, starting))
    return FAILED if found.get("state") in DEAD else 0


def _ask_syncer(config: TransportConfig) -> str:
    # The import of gRPC takes longer than everything else, and most statuses are in a folder.
    from diloco_jax.transport.session.calls import ask_status

    return ask_status(config)


def _watch(
    arguments: argparse.Namespace, folder: Path | None, read: Callable[[], dict[str, Any]]
) -> Mapping[str, Any] | None:
    """Show the live view of a run until the run, Ctrl-C or SIGTERM ends it; return the last status."""
    from rich.console import Console

    from diloco_jax.runtime.records.liveness import read_phases
    from diloco_jax.runtime.records.signals import stop_on_signals
    from diloco_jax.tools.terminal.view import LOOK_S, WATCH_S, LiveView, Run, show_cursor

    if arguments.json:
        raise ValueError("--watch draws for people, --json is for machines; give one of them")
    # Without a folder the syncer must answer. A folder may still be empty.
    if folder is None:
        read()
    console = Console()
    stop = stop_on_signals(lambda: show_cursor(console))
    run = Run(read, lambda: [] if folder is None else read_phases(folder))
    with LiveView(run, console, every_s=WATCH_S) as view:
        while not (stop.is_set() or view.ended.is_set()):
            stop.wait(LOOK_S)
    return view.status


def _operator_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("learner", help="name of the learner, such as island-0")
    parser.add_argument("run", help="folder of the run, or host:port of its syncer")
    parser.add_argument("--config", help="YAML file whose transport section has the credentials for host:port")
    parser.add_argument(
        "--allow-plaintext", action="store_true", help="connect unencrypted to an address that is not loopback"
    )


def _ban_options(parser: Parser) -> None:
    _operator_options(parser)
    parser.add_argument("--why", default="", metavar="TEXT", help="reason, which the banned learner gets; required")


@command("drain", "Let one learner leave after its current step; the others continue.", _operator_options)
def drain(arguments: argparse.Namespace) -> int:
    return _operate(arguments)


@command("ban", "Expel one learner, and refuse its name until it is admitted again.", _ban_options)
def ban(arguments: argparse.Namespace) -> int:
    from diloco_jax.protocol.bans import wrong_reason

    if wrong := wrong_reason(arguments.why):
        raise ValueError(wrong)
    return _operate(arguments, arguments.why)


@command("admit", "Lift the ban of one learner, so that it may join again.", _operator_options)
def admit(arguments: argparse.Namespace) -> int:
    return _operate(arguments)


def _operate(arguments: argparse.Namespace, why: str = "") -> int:
    """Send the request of the command's name to the syncer, and print its answer."""
    from diloco_jax.runtime.records.status import is_address, syncer_at
    from diloco_jax.transport.link import TransportConfig
    from diloco_jax.transport.session.calls import ask_operator
    from diloco_jax.transport.session.operator_requests import OperatorRequest

    run, config = arguments.run, arguments.config
    if config is None and not is_address(run):
        config = run_config(run)
    known = TransportConfig() if config is None else load(config).transport
    address = syncer_at(run, known, allow_plaintext=arguments.allow_plaintext)
    ok, message = ask_operator(address, OperatorRequest(arguments.name, arguments.learner, why))
    if arguments.json:
        print(json.dumps({"learner": arguments.learner, "ok": ok, "message": message}))
    else:
        print(message if ok else f"diloco {arguments.name}: {message}", file=sys.stdout if ok else sys.stderr)
    return 0 if ok else FAILED


def _profile_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run, on the machine of the island")
    parser.add_argument("--island", required=True, help="name of the learner, such as island-0")
    parser.add_argument("--steps", type=int, default=10, help="inner steps to profile, 1 to 1000; default: 10")


@command("profile", "Profile some steps of an island while it trains, for xprof and TensorBoard.", _profile_options)
def profile(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.learner.profiling import ask_profile

    folder = ask_profile(Path(arguments.run), arguments.island, arguments.steps)
    show(arguments, {"profile": str(folder)}, lambda _: f"a profile of {arguments.island}: xprof --logdir {folder}")
    return 0


def _report_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument(
        "--baseline", metavar="RUN", help="folder of a run to compare with, such as a run of `diloco baseline`"
    )
    parser.add_argument(
        "--perfetto",
        nargs="?",
        const="",
        metavar="FILE",
        help="instead, write all islands on one timeline for ui.perfetto.dev; default: RUN/perfetto.json.gz",
    )


@command("report", "Write report.html of a run: its current page in one file.", _report_options)
def report(arguments: argparse.Namespace) -> int:
    if arguments.perfetto is not None:
        from diloco_jax.tools.replay.perfetto import write_perfetto

        config, path = load(run_config(arguments.run)), Path(arguments.perfetto) if arguments.perfetto else None
        trace = write_perfetto(Path(arguments.run), config.protocol, config.train.steps, config.budget, path)
        show(arguments, {"perfetto": str(trace)}, lambda _: f"{trace}: open it in ui.perfetto.dev")
        return 0
    with without_collections():
        from diloco_jax.tools.page.page import write_report

    baseline = Path(arguments.baseline) if arguments.baseline else None
    written = write_report(Path(arguments.run), baseline)
    show(arguments, {"report": str(written)}, lambda result: result["report"])
    return 0


def _view_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", nargs="+", help="folder of a run")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: 127.0.0.1, any free port"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token of the address, created if missing, so that the address stays the same; default: a "
        "new token",
    )
    parser.add_argument(
        "--allow-plaintext", action="store_true", help="serve without encryption at an address that is not loopback"
    )


@command("view", "Serve the page of one or several runs, finished or running, for your browser.", _view_options)
def view(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.signals import die_with_parent
    from diloco_jax.tools.page.board import Board
    from diloco_jax.tools.page.feed import RunFeed
    from diloco_jax.tools.page.server import PageServer, read_token

    die_with_parent()
    feeds = [RunFeed(Path(run)) for run in arguments.run]
    if arguments.json:
        print(json.dumps(Board(feeds).state()))
        return 0
    transport = feeds[0].config.transport if feeds[0].config is not None else None
    token = read_token(Path(arguments.token_file)) if arguments.token_file else ""
    plain = arguments.allow_plaintext
    server = PageServer(feeds, arguments.listen, transport=transport, allow_plaintext=plain, token=token)
    print(f"the page is at {server.url}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def _compare_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", nargs="+", help="folder of a run")


@command("compare", "Compare the results of several runs, and the settings that differ.", _compare_options)
def compare(arguments: argparse.Namespace) -> int:
    from diloco_jax.tools.page.compare import compare as compare_runs
    from diloco_jax.tools.page.compare import describe

    width = shutil.get_terminal_size((120, 0)).columns
    show(arguments, compare_runs([Path(run) for run in arguments.run]), lambda found: describe(found, width))
    return 0


def _replay_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run; with --config: folder of a simulation's tapes")
    parser.add_argument(
        "--until", type=int, help="stop after the first merged round of this global step or a later one"
    )
    parser.add_argument("--config", help="YAML file (model, data, optimizer): train as a simulation's tapes prescribe")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=PATH",
        help="where a separate corpus of an island is on this machine, if not where the config says; repeat it",
    )
    parser.add_argument("--out", help="with --config: folder for the result; default: a new one below runs_dir")


@command(
    "replay", "Train a run again from its tapes, and compare the result bit for bit.", _replay_options, trains=True
)
def replay(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.files import has_begun, new_run_dir
    from diloco_jax.settings.text import save
    from diloco_jax.tools.replay.script import as_simulated

    config = as_simulated(load(arguments.config or run_config(arguments.run)), Path(arguments.run))
    code = _replay_as_island(config, arguments)
    if code is not None:
        return code
    from diloco_jax.tools.replay.estimate import expected_time

    if not arguments.config and (text := expected_time(Path(arguments.run), arguments.until)):
        print(text, file=sys.stderr, flush=True)
    # The import takes seconds.
    from diloco_jax.tools.replay.replay import describe, replay_run, replay_synthetic

    watch = partial(watched, what="events of the tape, repeated")
    if arguments.config:
        out = Path(arguments.out) if arguments.out else new_run_dir(Path(config.runs_dir), config.name)
        if has_begun(out):
            raise ValueError(f"--out {out} holds a run, whose config and snapshots would be lost; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        save(config, out / CONFIG_FILE)
        result = {"run_dir": str(out), **replay_synthetic(config, Path(arguments.run), out, arguments.until, watch)}
    else:
        result = replay_run(config, Path(arguments.run), arguments.until, _paths_of(arguments.data), watch)
    show(arguments, result, describe)
    return 0 if result.get("identical", True) else FAILED


def _paths_of(words: Sequence[str]) -> dict[str, str]:
    """Return the paths of corpora by name from words such as french=/data/fr; ValueError if one has no name or path."""
    paths = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path:
            raise ValueError(f"--data is {word!r}; write CORPUS=PATH, such as french=/data/french")
        paths[name] = path
    return paths


def _replay_as_island(config: RunConfig, arguments: argparse.Namespace) -> int | None:
    """Replay in a process like an island's, and return its status; None if this process is like an island's.

    The devices of an island, and the thread pool of emulated devices, affect the arithmetic of a compiled program. Both
    are fixed when JAX starts. The cores of an island and the number of islands beside it have no effect
    (docs/replay.md).
    """
    from diloco_jax.runtime.local.machine import VISIBLE_GPUS
    from diloco_jax.runtime.local.run import child_environment

    environment = dict(child_environment(config, config.islands.names[0]))
    decisive = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC", VISIBLE_GPUS)
    if all(os.environ.get(name) == environment.get(name) for name in decisive):
        return None
    command = [sys.executable, "-m", "diloco_jax", "replay", arguments.run]
    for name in ("config", "out", "until"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    command += [part for word in arguments.data for part in ("--data", word)]
    return subprocess.run(command + ["--json"] * arguments.json, env=environment, check=False).returncode


def _audit_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run, or folder of a simulation's tapes")
    parser.add_argument("--config", help="YAML file with the settings of the protocol; default: config.yaml of the run")


@command("audit", "Show from the tapes what became of every sample that a run handed out.", _audit_options)
def audit(arguments: argparse.Namespace) -> int:
    from diloco_jax.tools.replay.audit import audit as audit_run
    from diloco_jax.tools.replay.audit import describe
    from diloco_jax.tools.replay.script import read_scenario

    run_dir = Path(arguments.run)
    scenario = read_scenario(run_dir) if arguments.config is None else None
    if scenario is not None:
        result = audit_run(run_dir, scenario.protocol, scenario.total_steps, scenario.budget)
    else:
        config = load(arguments.config or run_config(arguments.run))
        result = audit_run(run_dir, config.protocol, config.train.steps, config.budget)
    show(arguments, result, describe)
    return FAILED if result["violations"] else 0
