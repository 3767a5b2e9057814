"""Subcommands before a run: certificates, checks of machines and links, TPU slices, forecasts."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.parser import CONFIG_HELP, Parser, command
from diloco_jax.cli.shared import learner_dir, load_config, show
from diloco_jax.runtime.records.signals import FAILED

if TYPE_CHECKING:
    pass


def _certs_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("folder", help="folder for the files; existing files stay unchanged")
    parser.add_argument("--learners", default="", help="names of learners, separated by commas: island-0,island-1")
    parser.add_argument(
        "--subscribers", default="", help="names of subscribers, which may only follow the model (diloco follow)"
    )
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid; default: 365")
    parser.add_argument(
        "--renew",
        type=int,
        default=0,
        metavar="DAYS",
        help="renew certificates that expire within DAYS days; processes need no restart",
    )


@command("certs", "Make certificates and a token for a run: authority, syncer, learners, subscribers.", _certs_options)
def certs(arguments: argparse.Namespace) -> int:
    from diloco_jax.transport.trust.certificates import describe, make, settings

    folder = Path(arguments.folder)
    learners, subscribers = (
        [name for name in names.split(",") if name] for names in (arguments.learners, arguments.subscribers)
    )
    made = make(folder, learners, subscribers, days=arguments.days, renew_days=arguments.renew)
    files = {name: [str(path) for path in paths] for name, paths in made._asdict().items()}
    show(arguments, {**files, "settings": settings(folder)}, lambda _: describe(folder, made))
    return 0


def _doctor_options(parser: Parser) -> None:
    parser.takes_config(
        f"{CONFIG_HELP}; default: quickstart, to check this machine alone", nargs="?", default="quickstart"
    )
    parser.takes_run_dir()
    parser.takes_json()
    parser.add_argument("--island", help="the learner of this machine; default: this is the machine of the syncer")
    parser.add_argument("--syncer", help="host:port of the syncer; default: from the run's folder, or the config")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each throughput test; default: 3")
    parser.add_argument(
        "--listen", action="store_true", help="on the syncer's machine before a run: answer `doctor` on the islands"
    )


@command(
    "doctor",
    "Check this machine and its link to the syncer, before or during a run.",
    _doctor_options,
    example="diloco doctor                               check this machine for the quickstart",
)
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


def _launch_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument(
        "way",
        choices=["gke", "pathways", "gce", "tpu-vm", "slurm", "sky"],
        help="Kubernetes (two ways), Compute Engine or Cloud TPU API of Google Cloud; Slurm or SkyPilot for GPUs. The "
        "syncer is there, and all islands without islands.each.NAME.provider",
    )
    parser.takes_config("YAML file, or a packaged config such as quickstart; its cloud section names the place")
    parser.add_argument("--out", metavar="DIR", help="folder to write the files to; without it they are only printed")
    parser.add_argument("--force", action="store_true", help="overwrite the files of an earlier launch in --out")
    parser.add_argument(
        "--run", action="store_true", help="also run the commands; default for --out: RUNS_DIR/NAME-WAY"
    )


@command("launch", "Write manifests and commands that start a run on a cloud or a cluster.", _launch_options)
def launch(arguments: argparse.Namespace) -> int:
    from functools import partial

    from diloco_jax.tools.launch.needs import describe_needs, needs_of
    from diloco_jax.tools.launch.sites import check_sites, plan_sites
    from diloco_jax.tools.launch.write import check_tools, describe, run, write
    from diloco_jax.transport.link import bucket_scheme

    config = load_config(arguments)
    if bucket_scheme(config.transport.address):
        raise ValueError(
            f"transport.address is {config.transport.address}, a bucket, and `diloco launch` gives the syncer a port; "
            "leave transport.address out, or start `diloco syncer` and `diloco learner` yourself (docs/bucket.md)"
        )
    # Errors in the slices are reported before the model is loaded.
    check_sites(config, arguments.way)
    needs: dict[str, Any] | None = None
    try:
        needs, needs_text = needs_of(config), ""
    except ValueError as error:
        # Only the image may have the model.
        needs_text = f"the needs of the machines are unknown here: {error}"
    plan = plan_sites(config, arguments.way, needs)
    needs_text = needs_text or "\n".join(describe_needs(config, needs))
    if arguments.run:
        check_tools(plan)
    target = arguments.out or (arguments.run and str(Path(config.runs_dir) / f"{config.name}-{arguments.way}"))
    paths = write(plan, Path(target), force=arguments.force) if target else []
    if arguments.run:
        say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
        say(needs_text)
        run(plan, Path(target), say)
    if arguments.json:
        texts = {} if target else plan.files
        written = {"out": target or None, "files": [str(path) for path in paths] or list(plan.files), "texts": texts}
        ran = {"commands": plan.create, "ran": arguments.run, "needs": needs}
        print(json.dumps({"way": arguments.way, **written, **ran}))
    elif not target:
        print(f"{describe(plan)}\n\n{needs_text}")
    elif not arguments.run:
        print(f"{needs_text}\n{len(paths)} files in {target}; read {target}/README.md, then run {target}/create.sh")
    return 0


def _preflight_options(parser: Parser) -> None:
    parser.takes_config()
    parser.takes_json()
    parser.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="SLICE",
        help="slice such as v5p:4x4x8 or v6e:16x16; may be repeated; default: the slices of the config's islands",
    )
    parser.add_argument(
        "--search",
        metavar="FILE",
        help="try remat policies, micro-batches and mesh splits; a repeated search continues from the results in FILE",
    )
    parser.add_argument(
        "--compiles", type=int, default=12, metavar="N", help="most programs that a search compiles; default: 12"
    )
    parser.add_argument("--write", metavar="CONFIG", help="file for the config with the cheapest settings found")


@command("preflight", "Compile for TPU slices without a TPU: memory, FLOPs, time of a step.", _preflight_options)
def preflight(arguments: argparse.Namespace) -> int:
    from concurrent.futures import Future

    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.tools.preflight.judge import cases_of, preflight
    from diloco_jax.tools.preflight.report import describe
    from diloco_jax.tools.preflight.search import best_config, describe_search, search

    config = load_config(arguments)
    record, written = _path("--search", arguments.search), _path("--write", arguments.write)
    if written is not None and (record is None or written.exists()):
        wrong = "needs --search" if record is None else f"names {written}, which exists already; choose another"
        raise ValueError(f"--write {wrong}")
    done: Future[dict[str, Any]] = Future()

    def compile_all() -> None:
        try:
            if record is None:
                done.set_result(preflight(config, arguments.topology, _tell))
            else:
                there, kind = cases_of(config, arguments.topology)[0]
                done.set_result(search(there, kind, arguments.compiles, record, _tell))
        except Exception as error:
            done.set_exception(error)

    # Ctrl-C need not wait for a daemon thread.
    threading.Thread(target=compile_all, name="compile", daemon=True).start()
    result = done.result()
    if record is not None and written is not None and result["best"]:
        written.write_text(best_config(config, result["best"]), encoding="utf-8")
    show(arguments, finite(result), lambda _: (describe if record is None else describe_search)(result))
    return 0 if result["ok"] else FAILED


def _simulate_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument(
        "--methods",
        nargs="+",
        help="rigid, elastic (both data parallel), sync (DiLoCo in lockstep), decoupled; default: all",
    )
    parser.add_argument("--learners", type=int, nargs="+", help="default: 2 4 8 16")
    parser.add_argument("--chips", nargs="+", help="chips of all learners together; default: 150k 300k 600k 1.2m 2.4m")
    parser.add_argument("--hours", type=float, help="simulated hours; default: a day")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random draws; default: 0")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    parser.add_argument("--fast", action="store_true", help="leave out the protocol's machines: no rounds, much faster")
    parser.add_argument("--tapes", metavar="DIR", help="folder for the tapes of one run, for `diloco replay`")
    parser.takes_settings(
        "settings may follow as --hardware.name value, --wan.name value and --protocol.name value",
        "list all settings with their sources, and exit",
    )


@command("simulate", "Simulate the goodput of a cluster whose chips fail, for each method.", _simulate_options)
def simulate(arguments: argparse.Namespace) -> int:
    from concurrent.futures.process import BrokenProcessPool

    from diloco_jax.sim.goodput.settings import describe
    from diloco_jax.sim.goodput.simulate import SECTIONS, Options, run

    if arguments.settings:
        print(describe(SECTIONS))
        return 0
    words = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    options = Options(**words | {"tapes": _path("--tapes", arguments.tapes)})
    try:
        result, text = run(options, _tell)
    except BrokenProcessPool:
        message = "a process that simulates was killed, perhaps because memory ran out; try fewer --workers"
        print(f"diloco simulate: {message}", file=sys.stderr)
        return FAILED
    show(arguments, result, lambda _: text)
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _path(option: str, text: str | None) -> Path | None:
    if text == "":
        raise ValueError(f"{option} is empty; name a path, or leave it out")
    return None if text is None else Path(text)


def _plan_options(parser: Parser) -> None:
    parser.takes_json()
    parser.takes_config(nargs="?")
    parser.add_argument("--why", action="store_true", help="print why settings stay as they are, too")
    _assumption_options(parser)


def _assumption_options(parser: Parser, *without: str) -> None:
    from diloco_jax.sim.goodput.settings import Assumptions

    for each in fields(Assumptions):
        if each.name in without:
            continue
        text, source = each.metadata["help"], each.metadata["source"]
        if each.default:
            text += f"; default: {each.default:g}" + (f" ({source})" if source else "")
        kind = int if isinstance(each.default, int) else float
        option = f"--{each.name.replace('_', '-')}"
        parser.add_argument(option, type=kind, metavar="N", help=text.replace("%", "%%"))


@command("plan", "Forecast links, memory, goodput and cost of a config, and advise changes.", _plan_options)
def plan(arguments: argparse.Namespace) -> int:
    if not arguments.config:
        raise ValueError("no config is named; give a YAML file, or quickstart")
    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.sim.goodput.settings import Assumptions
    from diloco_jax.tools.plan.advice import advise
    from diloco_jax.tools.plan.case import case_of
    from diloco_jax.tools.plan.forecast import forecast
    from diloco_jax.tools.plan.report import describe

    config = load_config(arguments)
    case = case_of(config, Assumptions(**_given(arguments, fields(Assumptions))))
    result = forecast(case, advise(case))
    show(arguments, finite(result), lambda _: describe(result, arguments.why))
    return 0


def _given(arguments: argparse.Namespace, options: Iterable[Field[Any]], *without: str) -> dict[str, Any]:
    """Return the values of options that were given, by name."""
    values = {each.name: getattr(arguments, each.name) for each in options if each.name not in without}
    return {name: value for name, value in values.items() if value is not None}


def _stage_options(parser: Parser) -> None:
    parser.takes_json()
    parser.takes_config()
    parser.add_argument("--sites", type=int, metavar="M", help="sites now, an island at each; default: islands.count")
    parser.add_argument(
        "--run", default="", metavar="RUN", help="folder of a run, or host:port of its syncer, whose figures are judged"
    )
    parser.add_argument(
        "--baseline", default="", metavar="RUN", help="folder of a finished data-parallel run, for the loss of --run"
    )
    _assumption_options(parser, "sites")


@command("stage", "Show what a run must reach before it gets more sites, and judge a run by it.", _stage_options)
def stage(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.status import read_status
    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.sim.goodput.settings import Assumptions
    from diloco_jax.tools.stage.report import describe
    from diloco_jax.tools.stage.stage import facts_of
    from diloco_jax.tools.stage.stage import stage as stage_of

    word = arguments.config
    if arguments.baseline and not arguments.run:
        raise ValueError(f"--baseline {arguments.baseline} is compared with a run; add --run RUN")
    config = load_config(arguments)

    def read(run: str) -> dict[str, Any]:
        from diloco_jax.transport.session.calls import ask_status

        plain = config.transport.allow_plaintext
        return read_status(run, ask_status, allow_plaintext=plain, transport=lambda: config.transport)

    facts = facts_of(arguments.run, arguments.baseline, read) if arguments.run else None
    assumed = Assumptions(**_given(arguments, fields(Assumptions), "sites"))
    sites = config.islands.count if arguments.sites is None else arguments.sites
    link_given = arguments.link_gbit_per_s is not None
    result = stage_of(config, word, sites, assumed, arguments.run, facts, link_given=link_given)
    show(arguments, finite(result), lambda _: describe(result))
    return FAILED if result["ready"] is False else 0
