"""The words of the `diloco` command: its subcommands, their arguments and help texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields

from diloco_jax.sim.assumptions import Assumptions

Command = Callable[[argparse.Namespace], int]
Add = Callable[..., argparse.ArgumentParser]
CHAOS_LEARNER, MERGE_SHARD = "chaos-learner", "merge-shard"
OVERRIDES = "settings of the config may follow as --section.name value; `CONFIG --settings` lists them all"


def make_parser(run: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The command line's parser; `run` has the function of each command."""
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one model on islands that never wait for each other (Decoupled DiLoCo in JAX).",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, config: bool = False, folder: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=OVERRIDES if config else None)
        sub.set_defaults(command=run[name], name=name, takes_overrides=config)
        if config:
            sub.add_argument("config", help="YAML file, see configs/")
            sub.add_argument("--settings", action="store_true", help="list all settings with their meaning, and exit")
            if folder:
                sub.add_argument("--run-dir", help="folder of the run; default: a new one below runs_dir")
        return sub

    train = add("train", "A whole run on this machine: syncer and islands, live view, report.", config=True)
    train.add_argument("--json", action="store_true", help="print summary.json at the end, no live view")
    train.add_argument("--quiet", action="store_true", help="no live view")
    train.add_argument(
        "--resume", action="store_true", help="go on with a run that ended early: --run-dir, or the last"
    )
    syncer = add("syncer", "The syncer alone, for real machines; in a run's folder it goes on.", config=True)
    syncer.add_argument("--rewind", action="store_true", help="nobody is alive: go on from the newest snapshot alone")
    learner = add("learner", "One learner alone, for real machines.", config=True)
    learner.add_argument("--island", required=True, help="name of the learner, unique in the run")
    learner.add_argument("--syncer", help="host:port of the syncer; default: that of the run's folder, or the config's")
    learner.add_argument("--incarnation", type=int, help="number that grows with every start; default: the time")
    learner.add_argument("--host", type=int, help="which of the island's islands.hosts processes this is; 0 leads")
    learner.add_argument("--coordinator", metavar="HOST:PORT", default="", help="where host 0 of the island listens")
    learner.add_argument(
        "--preemption",
        metavar="gce|FILE",
        help="leave politely when Google Cloud's metadata server, "
        "or the existence of FILE, says that this machine will be taken away; SIGTERM always says so",
    )
    islands = add("islands", "All islands in this process, for one controller of several slices.", config=True)
    islands.add_argument("--syncer", help="host:port of the syncer; default: that of the run's folder, or the config's")
    unlisted = commands.add_parser(CHAOS_LEARNER, parents=[learner], add_help=False)  # what `chaos` starts
    unlisted.set_defaults(command=run[CHAOS_LEARNER], name=CHAOS_LEARNER, takes_overrides=True)
    shard = commands.add_parser(MERGE_SHARD)  # what a syncer with syncer.shards starts
    shard.set_defaults(command=run[MERGE_SHARD], name=MERGE_SHARD, takes_overrides=False)
    shard.add_argument("config")
    shard.add_argument("--shard", type=int, required=True)
    shard.add_argument("--connection", type=int, required=True)
    _chaos_words(add("chaos", "A local run under a schedule of faults: what came back, when.", config=True))
    _doctor_words(add("doctor", "Check this machine and its way to the syncer, before or during a run.", config=True))
    _launch_words(add("launch", "Manifests and commands that start a run on Google Cloud."))
    _plan_words(add("plan", "Links, memory, goodput and cost of a config, before it runs, and what to change."))
    _simulate_words(add("simulate", "Goodput of a cluster whose chips fail, without one: chips, learners, methods."))
    add("baseline", "The data-parallel baseline in this process, for `train`.", config=True)
    _looking_words(add)
    preflight = add(
        "preflight", "Compile for TPU slices, without a TPU: what fits, what it takes.", config=True, folder=False
    )
    preflight.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="SLICE",
        help="such as v5p:4x4x8 or v6e:16x16, also several times; default: the slices of the config's islands",
    )
    preflight.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _looking_words(add: Add) -> None:
    """Commands about a run that is there."""
    status = add("status", "What a run does now, and what it waits for.")
    status.add_argument("run", help="folder of the run, or host:port of its syncer")
    status.add_argument("--config", help="YAML file whose transport section has the credentials for host:port")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.add_argument("--allow-plaintext", action="store_true", help="ask an address that is not loopback")
    drain = add("drain", "Let one learner leave after its current step; the others go on.")
    drain.add_argument("learner", help="name of the learner, such as island-0")
    drain.add_argument("run", help="folder of the run, or host:port of its syncer")
    drain.add_argument("--config", help="YAML file whose transport section has the credentials for host:port")
    drain.add_argument("--allow-plaintext", action="store_true", help="ask an address that is not loopback")
    drain.add_argument("--json", action="store_true", help="print one JSON object")
    certs = add("certs", "Make certificates and a token for a run: a test authority, syncer, learners.")
    certs.add_argument("folder", help="where the files go; what is there already stays as it is")
    certs.add_argument("--learners", default="", help="names of learners, separated by commas: island-0,island-1")
    certs.add_argument("--days", type=int, default=365, help="how long the certificates are valid; default: 365")
    certs.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate = add("eval", "Evaluate the global model of a run on its held-out data.")
    evaluate.add_argument("run", help="folder of the run")
    evaluate.add_argument("--batches", type=int, help="batches at most; default: train.final_eval_batches")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    report = add("report", "Write report.html of a run.")
    report.add_argument("run", help="folder of the run")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    replay = add("replay", "Train a run again from its tapes, and compare the result bit for bit.")
    replay.add_argument("run", help="folder of the run; with --config, of a simulation's tapes")
    replay.add_argument(
        "--until", type=int, help="stop after the first merged round of this global step or a later one"
    )
    replay.add_argument("--config", help="train as a simulation's tapes say: YAML file with model, data, optimizer")
    replay.add_argument("--out", help="with --config: folder for the result; default: a new one below runs_dir")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    audit = add("audit", "What became of every sample that a run handed out, from its tapes.")
    audit.add_argument("run", help="folder of the run, or of a simulation's tapes")
    audit.add_argument("--config", help="YAML file with the protocol's settings; default: config.yaml of the run")
    audit.add_argument("--json", action="store_true", help="print one JSON object")


def _chaos_words(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument("--faults", type=int, default=20, help="how many; default: 20")
    chaos.add_argument("--seed", type=int, default=0, help="of the schedule; default: 0")
    chaos.add_argument("--kinds", help="kinds of faults, separated by commas; default: all")
    chaos.add_argument("--dry-run", action="store_true", help="print the schedule, and exit")
    chaos.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor_words(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--island", help="the learner that runs on this machine; default: this is the syncer's")
    doctor.add_argument("--syncer", help="host:port of the syncer; default: that of the run's folder, or the config's")
    doctor.add_argument("--seconds", type=float, default=3.0, help="to measure throughput each way; default: 3")
    doctor.add_argument(
        "--listen", action="store_true", help="on the syncer's machine before a run: answer the islands' doctors"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def _launch_words(launch: argparse.ArgumentParser) -> None:
    launch.set_defaults(takes_overrides=True)
    launch.epilog = OVERRIDES
    launch.add_argument("way", choices=("gke", "gce", "tpu-vm"), help="Kubernetes, Compute Engine, or Cloud TPU API")
    launch.add_argument("config", help="YAML file, see configs/; its cloud section says where")
    launch.add_argument("--settings", action="store_true", help="list all settings with their meaning, and exit")
    launch.add_argument("--out", metavar="DIR", help="write the files there; without it they are only printed")
    launch.add_argument("--force", action="store_true", help="overwrite the files of an earlier launch in --out")
    launch.add_argument("--run", action="store_true", help="run the commands too; default for --out: RUNS_DIR/NAME-WAY")
    launch.add_argument("--json", action="store_true", help="print one JSON object")


def _plan_words(plan: argparse.ArgumentParser) -> None:
    plan.set_defaults(takes_overrides=True)
    plan.epilog = OVERRIDES
    plan.add_argument("config", nargs="?", help="YAML file, see configs/")
    plan.add_argument("--settings", action="store_true", help="list all settings with their meaning, and exit")
    plan.add_argument("--preset", choices=("table13",), help="the paper's Table 13 beside ours, without a config")
    for each in fields(Assumptions):
        text, source = each.metadata["help"], each.metadata["source"]
        known = f"; default: {each.default:g}" if each.default else ""
        plan.add_argument(
            f"--{each.name.replace('_', '-')}",
            type=int if isinstance(each.default, int) else float,
            metavar="N",
            help=f"{text}{known}{f' ({source})' if source and known else ''}".replace("%", "%%"),
        )
    plan.add_argument("--json", action="store_true", help="print one JSON object")


def _simulate_words(simulate: argparse.ArgumentParser) -> None:
    simulate.set_defaults(takes_overrides=True)
    simulate.epilog = "settings may follow as --hardware.name value, --wan.name value and --protocol.name value"
    simulate.add_argument("--preset", choices=("table1", "table5", "day", "scale"), help="a known case, told beside it")
    simulate.add_argument(
        "--methods",
        nargs="+",
        help="rigid, elastic (both data parallel), sync (DiLoCo in lockstep), decoupled; default: all",
    )
    simulate.add_argument("--learners", nargs="+", type=int, help="default: 2 4 8 16")
    simulate.add_argument(
        "--chips",
        nargs="+",
        help="of all learners together; default: 150k 300k 600k 1.2m 2.4m",
    )
    simulate.add_argument("--hours", type=float, help="simulated time; default: a day, or what the preset says")
    simulate.add_argument("--seed", type=int, default=0, help="of everything that is drawn; default: 0")
    simulate.add_argument("--workers", type=int, help="processes; default: one on each core")
    simulate.add_argument("--fast", action="store_true", help="without the protocol's machines: no rounds, much faster")
    simulate.add_argument("--tapes", metavar="DIR", help="of one run: write its tapes there, for `diloco replay`")
    simulate.add_argument("--plot", metavar="FILE", help="goodput against chips: a drawing (.svg) or a page (.html)")
    simulate.add_argument(
        "--choose", action="store_true", help="which number of learners makes the most progress: goodput against loss"
    )
    simulate.add_argument(
        "--penalty",
        help="for --choose, what says how learners cost: scavenging, scaling-laws, scores, quickstart; "
        "default: scavenging",
    )
    simulate.add_argument("--parameters", help="of the model, for --penalty scaling-laws; default: 5g")
    simulate.add_argument(
        "--loss-slope",
        type=float,
        help="for --choose, relative fall of the loss per relative growth of the compute; default: the penalty's",
    )
    simulate.add_argument("--settings", action="store_true", help="list all settings with their sources, and exit")
    simulate.add_argument("--json", action="store_true", help="print one JSON object")
    _like_words(simulate)


def _like_words(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("--like", metavar="RUN", help="the faults of this run of `diloco chaos`, beside what it did")
    simulate.add_argument(
        "--calibrate",
        metavar="RUN",
        nargs="+",
        default=[],
        help="with --like: runs of the same config that tell how long things take, the first one without faults",
    )
    simulate.add_argument("--seeds", type=int, default=5, help="with --like: simulated runs of each kind; default: 5")
