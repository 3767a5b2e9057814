"""The words of the `diloco` command: its subcommands, their arguments and help texts."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import NoReturn

from diloco_jax.protocol.releases import RELEASE
from diloco_jax.settings.packed import packed
from diloco_jax.sim.goodput.assumptions import Assumptions

Command = Callable[[argparse.Namespace], int]
Add = Callable[..., "Parser"]
UNLISTED = CHAOS_LEARNER, MERGE_SHARD, COMPILE = "chaos-learner", "merge-shard", "compile"
JSON, SUMMARY = "print one JSON object", "print summary.json at the end, no live view"
CONFIG = "YAML file, or a config of the package, such as quickstart"
SYNCER = "host:port of the syncer; default: that of the run's folder, or the config's"
OVERRIDES = "settings of the config may follow as --section.name value; `CONFIG --settings` lists them all"


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += _nearest(found[1], re.findall(r"[^', ]+", found[2]))
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says more\n")

    def near_option(self, word: str) -> str:
        """Say which option people may have meant; "" if none is like it."""
        word = word.partition("=")[0]
        near = _nearest(word, self._option_string_actions)
        return near and f"there is no option {word}{near}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""


class _Versions(argparse.Action):
    """The answer to --version, looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"diloco-jax {RELEASE}, jax {version('jax')}, Python {platform.python_version()}")
        raise SystemExit(0)


def check_command(parser: Parser, words: Sequence[str], run: Mapping[str, Command]) -> None:
    """End with a word about what people may have meant, unless the first word is a command; some are not listed."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None and not {"-h", "--help", "--version"} & set(words):
        parser.error("name a command, such as train")
    if name is not None and name not in run:
        parser.error(f"there is no command {name!r}{_nearest(name, [known for known in run if known not in UNLISTED])}")


def make_parser(run: Mapping[str, Command]) -> Parser:
    """Make the command line's parser; `run` has the function of each command."""
    parser = Parser(
        prog="diloco",
        description="Train one model on islands that never wait for each other (Decoupled DiLoCo in JAX).",
    )
    parser.add_argument("--version", action=_Versions, nargs=0, help="show the versions of this package and of JAX")
    parser.set_defaults(sub=parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, config: bool = False, folder: bool = True, json: str = JSON) -> Parser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run[name], name=name, takes_overrides=False, sub=sub)
        if config:
            _config_words(sub)
            if folder:
                sub.add_argument("--run-dir", help="folder of the run; default: a new one below runs_dir")
        if json:
            sub.add_argument("--json", action="store_true", help=json)
        return sub

    _first_words(add, parser)
    _data_words(add)
    train = add(
        "train", "A whole run on this machine: syncer and islands, live view, report.", config=True, json=SUMMARY
    )
    train.add_argument("--quiet", action="store_true", help="no live view")
    train.add_argument(
        "--resume", action="store_true", help="go on with a run that ended early: --run-dir, or the last"
    )
    syncer = add("syncer", "The syncer alone, for real machines; in a run's folder it goes on.", config=True, json="")
    syncer.add_argument("--rewind", action="store_true", help="nobody is alive: go on from the newest snapshot alone")
    learner = add("learner", "One learner alone, for real machines.", config=True, json="")
    learner.add_argument("--island", required=True, help="name of the learner, unique in the run")
    learner.add_argument("--syncer", help=SYNCER)
    learner.add_argument("--incarnation", type=int, help="number that grows with every start; default: the time")
    learner.add_argument("--host", type=int, help="which of the island's islands.hosts processes this is; 0 leads")
    learner.add_argument("--coordinator", metavar="HOST:PORT", default="", help="where host 0 of the island listens")
    learner.add_argument(
        "--preemption",
        metavar="gce|FILE",
        help="leave politely when Google Cloud's metadata server, "
        "or the existence of FILE, says that this machine will be taken away; SIGTERM always says so",
    )
    islands = add("islands", "All islands in this process, for one controller of several slices.", config=True, json="")
    islands.add_argument("--syncer", help=SYNCER)
    _unlisted_words(commands, learner, run)
    _chaos_words(add("chaos", "A local run under a schedule of faults: what came back, when.", config=True))
    _doctor_words(add("doctor", "Check this machine and its way to the syncer, before or during a run.", config=True))
    _launch_words(add("launch", "Manifests and commands that start a run on a cloud or a cluster."))
    _plan_words(add("plan", "Links, memory, goodput and cost of a config, before it runs, and what to change."))
    _simulate_words(add("simulate", "Goodput of a cluster whose chips fail, without one: chips, learners, methods."))
    add("baseline", "The data-parallel baseline in this process, for `train`.", config=True, json="")
    _looking_words(add)
    _convert_words(add)
    about = "Compile for TPU slices, without a TPU: what fits, what it takes."
    _preflight_words(add("preflight", about, config=True, folder=False))
    return parser


def _preflight_words(preflight: Parser) -> None:
    preflight.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="SLICE",
        help="such as v5p:4x4x8 or v6e:16x16, also several times; default: the slices of the config's islands",
    )
    preflight.add_argument(
        "--search",
        metavar="FILE",
        help="try policies of remat, micro-batches and mesh splits; FILE keeps what was found, a search goes on there",
    )
    preflight.add_argument(
        "--compiles", type=int, default=12, metavar="N", help="programs that a search compiles at most; default: 12"
    )
    preflight.add_argument(
        "--write", metavar="CONFIG", help="where to write the config with the cheapest settings found"
    )


def _first_words(add: Add, parser: Parser) -> None:
    init = add("init", "Write a config to begin with, and its schema for your editor.", json="")
    names = ", ".join(packed())
    init.add_argument("config", nargs="?", default="quickstart", choices=tuple(packed()), metavar="NAME", help=names)
    init.add_argument("--dir", default=".", help="folder for them; default: this one")
    add("schema", "Print the JSON Schema of a config, for editors.", json="")
    completion = add("completion", "Print a script that makes a shell complete this command.", json="")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(parser=parser)


def _data_words(add: Add) -> None:
    tokenize = add(
        "tokenize", "Text to a token store, which runs read; the same command goes on after an interruption."
    )
    about = "file, folder or URL (gs://, s3://) of text, JSONL, Parquet, Arrow or ArrayRecord, as the names say"
    tokenize.add_argument("source", help=about)
    about = "folder with Hugging Face's tokenizer.json, train:SIZE for a new one of so many ids, or bytes"
    tokenize.add_argument("--tokenizer", required=True, metavar="FOLDER|train:SIZE|bytes", help=about)
    tokenize.add_argument("--out", required=True, metavar="DIR", help="folder of the store")
    tokenize.add_argument("--field", default="text", help="column or key with the text; default: text")
    tokenize.add_argument("--patterns", nargs="+", default=["*"], help="which files of a folder, such as *.py")
    tokenize.add_argument("--workers", type=int, help="processes; default: one on each core")
    add("data", "What a run will read: sources, tokens, epochs, samples as text.", config=True, folder=False)


def _config_words(sub: Parser, **config: str) -> None:
    """Add the words of a command that takes a config, and settings after it."""
    sub.set_defaults(takes_overrides=True)
    sub.epilog = OVERRIDES
    sub.add_argument("config", **{"help": CONFIG} | config)  # type: ignore[arg-type]
    sub.add_argument("--settings", action="store_true", help="list all settings with their meaning, and exit")


def _unlisted_words(commands: argparse._SubParsersAction[Parser], learner: Parser, run: Mapping[str, Command]) -> None:
    """Add the commands and words with which processes of a run start others."""
    learner.add_argument("--standby", action="store_true", help=argparse.SUPPRESS)
    unlisted = commands.add_parser(CHAOS_LEARNER, parents=[learner], add_help=False)  # what `chaos` starts
    unlisted.set_defaults(command=run[CHAOS_LEARNER], name=CHAOS_LEARNER, takes_overrides=True)
    shard = commands.add_parser(MERGE_SHARD)  # what a syncer with syncer.shards starts
    shard.set_defaults(command=run[MERGE_SHARD], name=MERGE_SHARD, takes_overrides=False)
    shard.add_argument("config")
    shard.add_argument("--shard", type=int, required=True)
    shard.add_argument("--connection", type=int, required=True)
    compiler = commands.add_parser(COMPILE)  # what `train` starts
    compiler.set_defaults(command=run[COMPILE], name=COMPILE, takes_overrides=False, settings=False)
    for word in ("config", "--island", "--run-dir"):
        compiler.add_argument(word)


def _looking_words(add: Add) -> None:
    """Add the commands about a run that is there."""
    status = add("status", "What a run does now, and what it waits for.")
    status.add_argument("--watch", action="store_true", help="show the live view until the run ends, q or Ctrl-C")
    drain = add("drain", "Let one learner leave after its current step; the others go on.")
    drain.add_argument("learner", help="name of the learner, such as island-0")
    for asks in (status, drain):
        asks.add_argument("run", help="folder of the run, or host:port of its syncer")
        asks.add_argument("--config", help="YAML file whose transport section has the credentials for host:port")
        asks.add_argument("--allow-plaintext", action="store_true", help="ask an address that is not loopback")
    profile = add("profile", "Profile some steps of an island, while it trains, for xprof and TensorBoard.")
    profile.add_argument("run", help="folder of the run, on the machine of the island")
    profile.add_argument("--island", required=True, help="name of the learner, such as island-0")
    profile.add_argument("--steps", type=int, default=10, help="how many, 1 to 1000; default: 10")
    certs = add("certs", "Make certificates and a token for a run: a test authority, syncer, learners.")
    certs.add_argument("folder", help="where the files go; what is there already stays as it is")
    certs.add_argument("--learners", default="", help="names of learners, separated by commas: island-0,island-1")
    certs.add_argument("--days", type=int, default=365, help="how long the certificates are valid; default: 365")
    about = "sign certificates anew that are valid for less than so many days; processes need no restart"
    certs.add_argument("--renew", metavar="DAYS", type=int, default=0, help=about)
    _inference_words(add)
    report = add("report", "Write report.html of a run: its page, as it is now, in one file.")
    report.add_argument("run", help="folder of the run")
    report.add_argument(
        "--baseline", metavar="RUN", help="folder of a run to hold it against, such as `diloco baseline`'s"
    )
    about = "instead, write all islands on one timeline for ui.perfetto.dev; default: RUN/perfetto.json.gz"
    report.add_argument("--perfetto", metavar="FILE", nargs="?", const="", help=about)
    view = add("view", "The page of a run in your browser, finished or under way; of several, side by side.")
    compare = add("compare", "What came of several runs, and the settings in which they differ.")
    for looks in (view, compare):
        looks.add_argument("run", nargs="+", help="folder of a run")
    view.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="default: 127.0.0.1, any free port")
    about = "file with the token, so that the address stays as it is; made if there is none. Default: a new token"
    view.add_argument("--token-file", metavar="FILE", help=about)
    about = "serve an address that is not loopback without encryption"
    view.add_argument("--allow-plaintext", action="store_true", help=about)
    replay = add("replay", "Train a run again from its tapes, and compare the result bit for bit.")
    replay.add_argument("run", help="folder of the run; with --config, of a simulation's tapes")
    replay.add_argument(
        "--until", type=int, help="stop after the first merged round of this global step or a later one"
    )
    replay.add_argument("--config", help="train as a simulation's tapes say: YAML file with model, data, optimizer")
    replay.add_argument("--out", help="with --config: folder for the result; default: a new one below runs_dir")
    audit = add("audit", "What became of every sample that a run handed out, from its tapes.")
    audit.add_argument("run", help="folder of the run, or of a simulation's tapes")
    audit.add_argument("--config", help="YAML file with the protocol's settings; default: config.yaml of the run")


def _inference_words(add: Add) -> None:
    """Add the commands about the model of a run."""
    evaluate = add("eval", "Evaluate the global model of a run on its held-out data, or on public tasks.")
    sample = add("sample", "Print what the global model of a run writes.")
    for asks in (evaluate, sample):
        asks.add_argument("run", help="folder of the run; or a config, for the model that its run would begin with")
    evaluate.add_argument("--batches", type=int, help="batches at most; default: train.final_eval_batches")
    evaluate.add_argument("--tasks", metavar="NAMES", help="of lm-eval, separated by commas, in place of the data")
    evaluate.add_argument("--tasks-folder", metavar="DIR", help="with tasks of your own; nothing is fetched then")
    evaluate.add_argument("--limit", type=int, help="questions per task at most; default: all")
    sample.add_argument("--prompt", default="\n", help="text to continue; default: the beginning of a line")
    sample.add_argument("--tokens", type=int, default=200, help="how many; default: 200")
    about = "0: always the likeliest token (greedy); default: 0.7, 1: as the model says"
    sample.add_argument("--temperature", type=float, default=0.7, help=about)
    about = "draw from the likeliest tokens that together have this probability; default: 1, all"
    sample.add_argument("--top-p", type=float, default=1.0, help=about)
    sample.add_argument("--seed", type=int, default=0, help="of what is drawn; default: 0")


def _convert_words(add: Add) -> None:
    """Add the commands that bring models in and out."""
    begin = add("import", "Write a config whose run begins with the weights of a public model; checks them all.")
    begin.add_argument("folder", help="with config.json and *.safetensors, as Hugging Face's hub has them")
    begin.add_argument("--config", help=f"all but the model: {CONFIG}; default: the settings' defaults")
    begin.add_argument("--out", metavar="CONFIG", help="the config to write; default: the folder's name, .yaml")
    export = add("export", "Write the newest model of a run, finished or under way, for other programs.")
    export.add_argument("run", help="folder of the run")
    export.add_argument("--format", choices=("hf", "orbax", "npz"), default="hf", help="hf: for transformers; default")
    export.add_argument("--out", required=True, metavar="DIR", help="new folder for it")
    about = "of hf's tensors; default: float32, as the run has them"
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=about)


def _chaos_words(chaos: Parser) -> None:
    chaos.add_argument("--faults", type=int, default=20, help="how many; default: 20")
    chaos.add_argument("--seed", type=int, default=0, help="of the schedule; default: 0")
    chaos.add_argument("--kinds", help="kinds of faults, separated by commas; default: all")
    chaos.add_argument("--dry-run", action="store_true", help="print the schedule, and exit")


def _doctor_words(doctor: Parser) -> None:
    doctor.add_argument("--island", help="the learner that runs on this machine; default: this is the syncer's")
    doctor.add_argument("--syncer", help=SYNCER)
    doctor.add_argument("--seconds", type=float, default=3.0, help="to measure throughput each way; default: 3")
    doctor.add_argument(
        "--listen", action="store_true", help="on the syncer's machine before a run: answer the islands' doctors"
    )


def _launch_words(launch: Parser) -> None:
    ways = "Kubernetes, Compute Engine or Cloud TPU API of Google Cloud; GPU hosts of Slurm or SkyPilot"
    launch.add_argument("way", choices=("gke", "gce", "tpu-vm", "slurm", "sky"), help=ways)
    _config_words(launch, help=f"{CONFIG}; its cloud section says where")
    launch.add_argument("--out", metavar="DIR", help="write the files there; without it they are only printed")
    launch.add_argument("--force", action="store_true", help="overwrite the files of an earlier launch in --out")
    launch.add_argument("--run", action="store_true", help="run the commands too; default for --out: RUNS_DIR/NAME-WAY")


def _plan_words(plan: Parser) -> None:
    _config_words(plan, nargs="?")
    for each in fields(Assumptions):
        text, source = each.metadata["help"], each.metadata["source"]
        known = f"; default: {each.default:g}" if each.default else ""
        plan.add_argument(
            f"--{each.name.replace('_', '-')}",
            type=int if isinstance(each.default, int) else float,
            metavar="N",
            help=f"{text}{known}{f' ({source})' if source and known else ''}".replace("%", "%%"),
        )


def _simulate_words(simulate: Parser) -> None:
    simulate.set_defaults(takes_overrides=True)
    simulate.epilog = "settings may follow as --hardware.name value, --wan.name value and --protocol.name value"
    simulate.add_argument(
        "--methods",
        nargs="+",
        help="rigid, elastic (both data parallel), sync (DiLoCo in lockstep), decoupled; default: all",
    )
    simulate.add_argument("--learners", nargs="+", type=int, help="default: 2 4 8 16")
    simulate.add_argument("--chips", nargs="+", help="of all learners together; default: 150k 300k 600k 1.2m 2.4m")
    simulate.add_argument("--hours", type=float, help="simulated time; default: a day")
    simulate.add_argument("--seed", type=int, default=0, help="of everything that is drawn; default: 0")
    simulate.add_argument("--workers", type=int, help="processes; default: one on each core")
    simulate.add_argument("--fast", action="store_true", help="without the protocol's machines: no rounds, much faster")
    simulate.add_argument("--tapes", metavar="DIR", help="of one run: write its tapes there, for `diloco replay`")
    simulate.add_argument("--settings", action="store_true", help="list all settings with their sources, and exit")
