"""Subcommands about the model of a run: evaluate it, sample text from it, import and export it."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_jax.cli.parser import Parser, command
from diloco_jax.cli.shared import run_config, show, watched
from diloco_jax.protocol.releases import install_hint

if TYPE_CHECKING:
    import numpy as np

    from diloco_jax.settings.run import RunConfig
    from diloco_jax.tools.inference.language import Language
    from diloco_jax.tools.inference.writer import Writing

Item = TypeVar("Item")

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
# Other temperatures overflow float32.
TEMPERATURES = (1e-6, 1e6)
# The prompt is the start of a line.
PROMPT, TEMPERATURE = "\n", 0.7


def _evaluate_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run; or a config, for the model that its run would start with")
    parser.add_argument("--batches", type=int, help="most batches; default: train.final_eval_batches")
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, separated by commas, in place of the data")
    parser.add_argument("--tasks-folder", metavar="DIR", help="folder with your own tasks; nothing is downloaded then")
    parser.add_argument("--limit", type=int, help="most questions per task; default: all")


@command("eval", "Evaluate the global model of a run on its held-out data, or on public tasks.", _evaluate_options)
def evaluate(arguments: argparse.Namespace) -> int:
    """Print the loss of the newest checkpoint on the held-out data, or its scores in tasks."""
    from diloco_jax.runtime.model.evaluation import Evaluator
    from diloco_jax.runtime.records.telemetry import finite
    from diloco_jax.tools.terminal.words import scores_text

    for name in ("batches", "limit"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}; use at least 1")
    if arguments.tasks is not None:
        return _ask(arguments)
    config, parameters, step = _newest(arguments.run)
    batches = arguments.batches or config.train.final_eval_batches
    result = Evaluator(config).evaluate(parameters, batches, step)
    names = {f"{name} {key}" for name, row in result["sets"].items() for key in row}
    text = f"global step {step}: {_measured(result)}"
    text += scores_text({name: value for name, value in result["scores"].items() if name not in names})
    text += "".join(f"\n  {name}: {_measured(row)}" for name, row in result["sets"].items())
    show(arguments, finite({**result, "global_step": step}), lambda _: text)
    return 0


def _measured(row: Mapping[str, Any]) -> str:
    bits = f", {row['bits_per_byte']:.4f} bits per byte" if row["bits_per_byte"] is not None else ""
    return f"loss {row['loss']:.4f}{bits} on {row['tokens']} tokens"


def _ask(arguments: argparse.Namespace) -> int:
    from diloco_jax.runtime.records.telemetry import finite

    folder = None if arguments.tasks_folder is None else Path(arguments.tasks_folder)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--tasks-folder {folder} is not a folder; give one with lm-eval's YAML files")
    # The libraries read these variables when they are imported; the first forbids them to fork.
    for name in ("DISABLE_MULTIPROC", *(OFFLINE if folder else ())):
        os.environ.setdefault(name, "1")
    try:
        from diloco_jax.tools.inference.harness import ask_tasks
    except ImportError as error:
        raise ValueError(f"--tasks needs lm-eval ({error}); {install_hint('eval')}") from error
    language, step = _language(arguments.run)
    scores = ask_tasks(language, arguments.tasks.split(","), folder, arguments.limit)
    lines = [f"global step {step}:"]
    for task, row in scores.items():
        errors = {name.replace("_stderr", ""): value for name, value in row.items() if "_stderr" in name}
        for name, value in row.items():
            if "_stderr" not in name:
                lines.append(f"  {task} {name} {value:.4f}" + (f" +- {errors[name]:.4f}" if name in errors else ""))
    show(arguments, finite({"global_step": step, "tasks": scores}), lambda _: "\n".join(lines))
    return 0


def _sample_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run; or a config, for the model that its run would start with")
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue; several --prompt are continued at once; default: the start of a line, or nothing with "
        "--image",
    )
    parser.add_argument(
        "--image",
        nargs="+",
        default=[],
        metavar="FILE",
        help="images for a model with a vision tower; they come before the prompt, unless the prompt has <|image|> "
        "once for each",
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens to print; default: 200")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="0: always the likeliest token (greedy), 1: the model's own probabilities; default: 0.7",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens that together have this probability; default: 1, all",
    )
    parser.add_argument("--top-k", type=int, default=0, help="draw from this number of likeliest tokens; default: all")
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="draw from the tokens that have at least this share of the likeliest one's probability; default: all",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws; default: 0")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk to the model in the text of its chat template: each --prompt is a user's turn; without any, "
        "each line of the standard input",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the turn before the first one of the user")


@command("sample", "Print text from the global model of a run.", _sample_options)
def sample(arguments: argparse.Namespace) -> int:
    """Print text from the newest checkpoint, token by token."""
    how = _writing(arguments)
    if arguments.system is not None and not arguments.chat:
        raise ValueError(f"--system is {arguments.system!r}, which only a conversation has; add --chat, or remove it")
    if arguments.chat:
        return _talk(arguments, how)
    images = [Path(name) for name in arguments.image]
    prompts = arguments.prompt or [("" if images else PROMPT)]
    if not all(prompts) and not images:
        raise ValueError("--prompt is ''; use a prompt of at least one character")
    if len(prompts) > 1 and images:
        raise ValueError(f"there are {len(prompts)} --prompt with --image; give one prompt, or leave the images out")
    language, step = _language(arguments.run)
    if len(prompts) > 1:
        texts = [_harmless(text) for text in language.write_all(prompts, arguments.tokens, how)]
        rows = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        told = "\n\n".join(row["prompt"] + row["text"] for row in rows)
        show(arguments, {"texts": rows, "global_step": step}, lambda _: told)
        return 0
    pieces = map(_harmless, language.write(prompts[0], arguments.tokens, how, images))
    if arguments.json:
        show(arguments, {"prompt": prompts[0], "text": "".join(pieces), "global_step": step}, str)
        return 0
    for piece in chain([prompts[0]], pieces, ["\n"]):
        print(piece, end="", flush=True)
    return 0


def _talk(arguments: argparse.Namespace, how: Writing) -> int:
    """Print the model's answers to the turns of a user."""
    from diloco_jax.tools.inference.chat import Chat

    if arguments.image:
        raise ValueError("--image is not read in conversations; leave --chat or --image out")
    language, step = _language(arguments.run)
    chat = Chat(language, arguments.system or "")
    shows = sys.stdin is not None and sys.stdin.isatty() and not arguments.json
    for text in arguments.prompt or _lines(shows):
        pieces = map(_harmless, chat.answer(text, arguments.tokens, how))
        if arguments.json:
            deque(pieces, maxlen=0)
            continue
        for piece in chain(pieces, ["\n"]):
            print(piece, end="", flush=True)
    if arguments.json:
        show(arguments, {"messages": chat.messages, "global_step": step}, str)
    return 0


def _lines(shows: bool) -> Iterator[str]:
    """Yield the lines of the standard input that have text; ask for each if a person writes them."""
    while True:
        print("> " * shows, end="", flush=True)
        # A process may have no standard input.
        if sys.stdin is None or not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text


def _writing(arguments: argparse.Namespace) -> Writing:
    """Return the options for drawing tokens; ValueError if one is out of range."""
    from diloco_jax.tools.inference.writer import Writing

    how = Writing(arguments.temperature, arguments.top_p, arguments.seed, arguments.top_k, arguments.min_p)
    cold_or_hot = not (how.temperature == 0 or TEMPERATURES[0] <= how.temperature <= TEMPERATURES[1])
    if arguments.tokens < 1 or cold_or_hot or not 0 < how.top_p <= 1:
        raise ValueError(
            f"--tokens is {arguments.tokens}, --temperature {how.temperature:g}, --top-p {how.top_p:g}; use at least "
            f"one token, a temperature of 0 or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}, and a probability "
            "above 0 and at most 1"
        )
    if how.top_k < 0 or not 0 <= how.min_p <= 1:
        raise ValueError(
            f"--top-k is {how.top_k}, --min-p {how.min_p:g}; use a number of tokens of at least 0, and a share from 0 "
            "to 1"
        )
    if not 0 <= how.seed < 2**31:
        raise ValueError(f"--seed is {how.seed}; it must be in [0, 2^31)")
    return how


def written(run: Path, count: int) -> str:
    """Let the newest checkpoint of a run write `count` tokens; return the text, "" if it is not of text alone."""
    from diloco_jax.tools.inference.chat import first_prompt
    from diloco_jax.tools.inference.language import Language
    from diloco_jax.tools.inference.writer import Writing

    try:
        config, parameters, _ = _newest(str(run))
        if config.data.with_images:
            return ""
        language = Language(config, parameters)
        prompt = first_prompt(config) if config.data.with_chat else []
        text = "".join(language.write(prompt or PROMPT, count, Writing(TEMPERATURE)))
    except ValueError:
        return ""
    # An answer makes no sense without its question.
    return _harmless(language.tokenizer.decode(prompt) + text)


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _language(run: str) -> tuple[Language, int]:
    from diloco_jax.tools.inference.language import Language

    config, parameters, global_step = _newest(run)
    return Language(config, parameters), global_step


def _newest(run: str) -> tuple[RunConfig, Mapping[str, np.ndarray], int]:
    """Return config, parameters and global step of a run's newest checkpoint, or of the start of a config's run."""
    from diloco_jax.runtime.model.evaluation import RunModel
    from diloco_jax.runtime.records.checkpoint import load_parameters, newest_readable
    from diloco_jax.runtime.records.files import CHECKPOINTS
    from diloco_jax.settings.text import load

    if Path(run).is_file():
        config = load(run)
        return config, dict(RunModel(config).initial_parameters()), 0
    found = newest_readable(Path(run) / CHECKPOINTS, load_parameters)
    if found is None:
        raise ValueError(f"{run} holds no checkpoint that can be read; give the folder of a run, such as runs/NAME")
    parameters, meta = found[1]
    return load(run_config(run)), parameters, meta["global_step"]


def _begin_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("folder", help="folder with config.json and *.safetensors from Hugging Face's hub")
    parser.add_argument(
        "--config",
        help="YAML file with the other settings, or a packaged config such as quickstart; default: the default "
        "settings, with text in the folder texts",
    )
    parser.add_argument("--out", metavar="CONFIG", help="the config to write; default: FOLDER.yaml")
    parser.add_argument(
        "--images", action="store_true", help="read Gemma 4's vision tower too; default: only the text model"
    )


@command(
    "import", "Check the weights of a public model, and write a config whose run starts with them.", _begin_options
)
def begin(arguments: argparse.Namespace) -> int:
    """Write a config whose run starts with the weights of a public model."""
    from diloco_jax.settings.packed import find_config
    from diloco_jax.tools.export.files import begin_with

    folder = Path(arguments.folder)
    base = Path(find_config(arguments.config)) if arguments.config else None
    out = Path(arguments.out or f"{folder.resolve().name}.yaml")
    result = begin_with(folder, base, out, watch_parameters, images=arguments.images)
    text = f"{result['parameters']:,} parameters checked; {out} starts with them, next: diloco train {out}"
    show(arguments, result, lambda _: text)
    return 0


def _export_options(parser: Parser) -> None:
    parser.takes_json()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument(
        "--format", choices=["hf", "orbax", "npz"], default="hf", help="hf (default): for transformers or PEFT"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the model")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="type of hf's tensors; default: float32, as in the run",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="for a run with model.lora: write the whole model with the adapters merged into it; default: only the "
        "adapters, in format hf for PEFT",
    )


@command("export", "Write the newest model of a run, finished or running, for other programs.", _export_options)
def export(arguments: argparse.Namespace) -> int:
    """Write a run's newest model for other programs."""
    from diloco_jax.settings.text import load
    from diloco_jax.tools.export.files import export

    config, run_dir, out = load(run_config(arguments.run)), Path(arguments.run), Path(arguments.out)
    how = {"whole_model": arguments.merged}
    result = export(config, run_dir, arguments.format, out, arguments.dtype, watch_parameters, **how)
    text = f"{out} holds the model of global step {result['global_step']}: {', '.join(result['files'])}"
    show(arguments, result, lambda _: text)
    return 0


def watch_parameters(parameters: Iterable[Item], count: int) -> Iterator[Item]:
    """Yield the items of the parameters, and show how many are done."""
    return watched(parameters, count, "parameters")
