"""Find out whether a run can begin, before any of its processes starts: model, data, fragments, credentials.

Nothing is computed, no file of the corpus is read, and no accelerator is looked for: its processes will want it. Code
of the user's own is made once, as the processes will make it.
"""

import os
import shutil

import jax
import numpy as np

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.local.machine import check, look, need_proxy
from diloco_jax.runtime.model.arithmetic import make_setup
from diloco_jax.runtime.model.evaluation import Scorer
from diloco_jax.runtime.syncer.band import read_band
from diloco_jax.runtime.trackers.outlets import find_callbacks, find_trackers
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import OF_TOKENS, RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.data.corpus import image_ids, tokenizer_of
from diloco_jax.training.data.order import check_source, example
from diloco_jax.training.data.sample import batch_shapes
from diloco_jax.training.data.tokenizer import has_tokenizer, open_tokenizer
from diloco_jax.training.models.config import DECODER, MOE
from diloco_jax.training.named import failure, is_ours
from diloco_jax.training.optimizers import learning_rate
from diloco_jax.training.parts import check_no_other_state
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.transport.link import bucket_scheme, check_address, check_free, split_address
from diloco_jax.transport.session.calls import cannot_listen
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.trust.security import credentials


def check_input(config: RunConfig, *, resumes: bool = False) -> None:
    """Check everything that a whole run on this machine loads; ValueError with the setting and the remedy."""
    # Arrays of the user's code must not take memory of accelerators, which islands need.
    jax.config.update("jax_platforms", "cpu")
    if config.algorithm == "decoupled":
        _check_transport(config)
    if config.islands.pathways:
        need_proxy(os.environ.get("JAX_PLATFORMS", ""))
    if config.islands.ray:
        _check_islands_elsewhere(config)
    else:
        check(config, look(os.environ))
    check_parts(config)
    if config.evaluation.baseline and config.algorithm == "data_parallel":
        raise ValueError("evaluation.baseline is compared by a syncer, and algorithm data_parallel has none; remove it")
    # A run that has begun continues without it.
    if not resumes:
        read_band(config.evaluation)
    if config.model.own:
        if config.algorithm != "decoupled" or not config.islands.command:
            raise ValueError(
                "model.module is own, so the islands' own loops bring the model: name them in islands.command, or "
                "start `diloco syncer` and your loops yourself (docs/join.md)"
            )
        return
    _check_corpora(config)
    blueprint = _check_model(config)
    make_setup(resolve(config, blueprint.shapes, blueprint.kinds))
    Scorer(config.evaluation)


def _check_islands_elsewhere(config: RunConfig) -> None:
    """Check what a run needs whose islands are not on this machine."""
    if config.algorithm != "decoupled":
        raise ValueError("islands.ray is set, but algorithm data_parallel has no islands; leave one of them out")


def _check_corpora(config: RunConfig) -> None:
    """Check every corpus of the run, and that all have one tokenizer."""
    known: dict[str, str] = {}
    for name, each in config.corpora.items():
        check_source(each.data, config.train.seq_len, config.train.eval_batch_size)
        check_tokenizer(each)
        tokenizer = tokenizer_of(each.data)
        known |= {tokenizer.digest: name} if tokenizer else {}
    if len(known) > 1:
        one, other = [name or "the run" for name in [*known.values()][:2]]
        raise ValueError(
            f"the corpora of {one} and {other} have different tokenizers; tokenize both with one (`diloco tokenize`)"
        )


def check_parts(config: RunConfig, *, weights: bool = True) -> None:
    """Check programs, trackers, callbacks, the schedule and public weights: all of a run but model and data.

    Args:
        weights: whether this machine reads the weights.
    """
    if config.islands.command[:1] not in ((), ("python",)) and shutil.which(config.islands.command[0]) is None:
        raise ValueError(
            f"islands.command {config.islands.command[0]!r} is not a program here; name one, such as python"
        )
    # The syncer imports them.
    find_trackers(config.trackers, imports=False)
    find_callbacks(config.callbacks)
    if not config.model.own:
        learning_rate(config.optimizer, config.planned_steps)
    if config.model.weights and weights:
        Weights(config.model.weights).check(config.model)


def _check_transport(config: RunConfig) -> None:
    for name in (SYNCER, *config.islands.names):
        credentials(config.transport, name)
    check_address(config.transport.address)
    if bucket_scheme(config.transport.address):
        Bucket(config.transport)
    else:
        check_listens(config.transport.address, "transport.address")
    check_listens(config.syncer.metrics, "syncer.metrics")
    check_listens(config.syncer.page, "syncer.page")


def check_listens(address: str, setting: str) -> None:
    """Check that this machine can listen at an address; "" passes. ValueError with setting and remedy."""
    if address and split_address(address, setting)[1]:
        try:
            check_free(address)
        except OSError as error:
            raise cannot_listen(address, error.strerror, setting) from error


def check_tokenizer(config: RunConfig) -> None:
    """Check that the model fits the tokens of the data; ValueError if it has another tokenizer or too few ids."""
    if config.data.module:
        return
    tokenizer, model = tokenizer_of(config.data), config.model
    have = model.args.get("vocab_size")
    if tokenizer and isinstance(have, int) and tokenizer.vocab_size > have:
        raise ValueError(
            f"model.args.vocab_size is {have}, but the data's tokenizer has ids below {tokenizer.vocab_size}; raise "
            "it, or tokenize the data with the model's"
        )
    for name, number in image_ids(config.data).items():
        if model.module in (DECODER, MOE):
            raise ValueError(
                f"the data has images, but model.module '{model.module}' reads only text; name a model that sees images"
            )
        if model.args.get(name, number) != number:
            raise ValueError(f"model.args.{name} is {model.args[name]}, but the data has id {number} there; set it so")
    weights = model.weights
    known = weights and has_tokenizer(weights)
    if tokenizer and known and open_tokenizer(weights).digest != tokenizer.digest:
        raise ValueError(
            f"the tokenizer of the data is not that of model.weights '{weights}'; make the data from text with "
            f"diloco tokenize --tokenizer {weights}"
        )


def _check_model(config: RunConfig) -> Blueprint:
    """Trace the model and an inner step with shapes alone."""
    # The samples of all corpora have one form.
    data = next(iter(config.corpora.values())).data
    batch = batch_shapes(example(data, config.train.seq_len), config.island("").batch_size)
    try:
        blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), 1, seed=config.seed)
        rate = jax.ShapeDtypeStruct((), np.float32)
        draw = jax.ShapeDtypeStruct((2,), np.uint32) if blueprint.streams.kinds else None
        jax.eval_shape(blueprint.step, blueprint.state_shapes, batch, rate, draw, blueprint.frozen)
    except Exception as error:
        # The user's model may raise anything.
        raise error if is_ours(error) else failure("model.module", config.model.module, error) from error
    if config.islands.slices > 1:
        check_no_other_state(blueprint)
    return blueprint


def memory_bytes() -> int:
    """Return the memory of this machine; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def oversized(config: RunConfig, have_bytes: int) -> str:
    """Return a warning if the largest array of a batch does not fit into this machine; "" if it fits.

    Only emulated islands with built-in models of text are checked. Their arrays share this machine's memory, and the
    shape of the largest one is known without the model. Other arrays need memory beside it.
    """
    here = not config.islands.ray and look(os.environ).emulates
    if not have_bytes or config.model.module not in OF_TOKENS or not here:
        return ""
    args, data_parallel = config.model.args, config.algorithm == "data_parallel"
    widths = [args.get("dim", 0), 0 if args.get("loss_chunk") else args.get("vocab_size", 256)]
    width = max(width for width in widths if isinstance(width, int))
    names = [""] if data_parallel else config.islands.names
    sequences = sum(config.island(name).batch_size for name in names)
    need_bytes = 4 * sequences * config.train.seq_len * width // config.optimizer.accumulate_steps
    if need_bytes <= have_bytes:
        return ""
    return (
        f"warning: a step of {sequences} sequences needs more than {need_bytes / 1e9:,.0f} GB for one of its arrays, "
        f"and this machine has {have_bytes / 1e9:,.0f} GB: lower train.batch_size or train.seq_len, or raise "
        "optimizer.accumulate_steps"
    )
