"""The subcommand `diloco follow`: keep the newest global model of a run in a folder."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.cli.inference import watch_parameters
from diloco_jax.cli.parser import Parser, command
from diloco_jax.runtime.records.signals import INTERRUPTED

if TYPE_CHECKING:
    from diloco_jax.transport.link import TransportConfig

LOCAL_ADDRESS = "127.0.0.1:0"


def _follow_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per model")
    parser.add_argument("run", help="host:port of the syncer, or folder of a run on this machine")
    parser.add_argument("--out", metavar="DIR", help="folder for the models; DIR/newest is always a whole model")
    parser.add_argument(
        "--serve",
        nargs="?",
        const=LOCAL_ADDRESS,
        metavar="HOST:PORT",
        help="serve the models over HTTP, without a password; default: 127.0.0.1, any free port",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="global steps between two models; default: 1")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="models that stay in DIR; default: 2")
    parser.add_argument(
        "--format", choices=["hf", "orbax", "npz"], default="hf", help="as for export; hf (default): for transformers"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="type of hf's tensors; default: float32"
    )
    parser.add_argument("--merged", action="store_true", help="for a run with model.lora: write the whole model")
    parser.add_argument(
        "--call", metavar="MODULE:FUNCTION", help="call this function with the folder of each new model (a Path)"
    )
    # `name` is the name of the command.
    parser.add_argument(
        "--name",
        dest="subscriber",
        default="",
        metavar="NAME",
        help="name of this subscriber; with certificates, the name in its certificate",
    )
    parser.add_argument("--config", help="YAML file whose transport section has the credentials")
    parser.add_argument(
        "--allow-plaintext", action="store_true", help="connect and serve unencrypted beyond this machine"
    )


@command(
    "follow",
    "Keep the newest global model of a run, while it trains, in a folder for other programs.",
    _follow_options,
    example="diloco follow 127.0.0.1:50051 --out model --every 24",
)
def follow(arguments: argparse.Namespace) -> int:
    """Receive the global model until the run is complete, and write it every N global steps."""
    import tempfile

    from diloco_jax.runtime.records.log_lines import show_lines
    from diloco_jax.runtime.records.signals import stop_on_signals
    from diloco_jax.runtime.subscriber.subscription import Subscription, default_name, find_run
    from diloco_jax.tools.export.files import ModelWriter
    from diloco_jax.tools.export.kept import KeptModels, describe
    from diloco_jax.tools.export.serving import ModelServer
    from diloco_jax.training.named import load_named

    if not (arguments.out or arguments.serve):
        raise ValueError("neither --out nor --serve is given; name a folder for the models, or serve them")
    if arguments.every < 1:
        raise ValueError(f"--every is {arguments.every}; use at least 1")
    call: Callable[[Path], object] = load_named("--call", arguments.call) if arguments.call else lambda _: None
    show_lines()
    stop, name, transport = stop_on_signals(), arguments.subscriber or default_name(), _transport(arguments)
    with ExitStack() as held:
        out = Path(arguments.out or held.enter_context(tempfile.TemporaryDirectory(prefix="diloco-follow-")))
        run = find_run(transport, name, stop)
        if run is None:
            return INTERRUPTED
        config = run.resolved.config
        writer = ModelWriter(config, arguments.format, arguments.dtype, whole_model=arguments.merged)
        kept = held.enter_context(KeptModels(out, run, writer, arguments.format, arguments.keep))
        if arguments.serve:
            server = held.enter_context(ModelServer(out, arguments.serve, allow_plaintext=arguments.allow_plaintext))
            _tell(arguments, {"serves": server.url}, f"the models are at {server.url}")
        subscription = Subscription(transport, run, name, stop, arguments.every)
        for model in subscription.models():
            began_s = time.monotonic()
            folder = kept.put(model, watch_parameters)
            took_s = time.monotonic() - began_s
            call(folder)
            newest = "" if model.exact else ", fragments of different ages"
            told = f"global step {model.global_step}{newest}: {folder}, written in {took_s:.1f} s"
            _tell(arguments, {**describe(model), "folder": str(folder), "took_s": round(took_s, 3)}, told)
    if subscription.complete:
        _tell(arguments, {"complete": True}, "the run is complete, and this is its final model")
    return INTERRUPTED if stop.is_set() else 0


def _transport(arguments: argparse.Namespace) -> TransportConfig:
    """Return address and credentials of the syncer."""
    from dataclasses import replace

    from diloco_jax.cli.shared import run_config
    from diloco_jax.runtime.records.status import is_address, syncer_at
    from diloco_jax.settings.text import load
    from diloco_jax.transport.link import TransportConfig

    config = arguments.config or (None if is_address(arguments.run) else run_config(arguments.run))
    known = TransportConfig() if config is None else load(config).transport
    found = syncer_at(arguments.run, known, allow_plaintext=arguments.allow_plaintext)
    return replace(found, connect_timeout_s=known.connect_timeout_s)


def _tell(arguments: argparse.Namespace, result: dict[str, Any], words: str) -> None:
    print(json.dumps(result) if arguments.json else words, flush=True)
