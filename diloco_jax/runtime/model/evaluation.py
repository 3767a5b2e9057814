"""The initial model, and evaluation of global parameters on the held-out split, in one process without a mesh."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx

from diloco_jax.core.kinds import inverse, with_order
from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.leases import COMMON
from diloco_jax.settings.run import EvaluationConfig, RunConfig
from diloco_jax.training.base import read_base
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.corpus import Source, load_source, united
from diloco_jax.training.data.order import check_source
from diloco_jax.training.examiner import Examiner
from diloco_jax.training.named import failure, make_named
from diloco_jax.training.sharding import MeshConfig, put_array
from diloco_jax.training.state import Params, Variables

NAMES_MAX = 32  # user's scores
NAME_MAX = 64  # characters

log = logging.getLogger(__name__)


class Scorer:
    """The user's scores (`evaluation.module`), which no run depends on; ValueError if the module is not usable."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._module, self._timeout_s, self.alarms = config.module, config.timeout_s, list[str]()
        self._object = make_named("evaluation", config.module, config.args) if config.module else None
        if config.module and not callable(self._object):
            kind = f"a {type(self._object).__name__} without __call__(self, model, step)"
            raise ValueError(f"evaluation.module '{config.module}' makes {kind}, which returns numbers by name; add it")

    def scores(self, model: Callable[[], nnx.Module], global_step: int) -> dict[str, float | None]:
        """Return the user's scores of a model, None for non-finite ones; empty if the scorer fails or hangs."""
        if self._object is None:
            return {}
        score, found, errors = self._object, list[dict[str, float | None]](), list[BaseException]()

        def call() -> None:
            try:
                found.append(_checked(score(model(), global_step)))
            except (Exception, SystemExit) as error:
                errors.append(error)

        # A daemon, because a scorer that hangs must not delay the end of the run.
        thread = threading.Thread(target=call, name="scores", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if found:
            return found[0]
        if not errors:
            # Its thread may still run.
            self._object = None
        why = f"evaluation.module '{self._module}' took more than evaluation.timeout_s = {self._timeout_s:g} s"
        if not self.alarms:
            told = failure("evaluation.module", self._module, errors[0]) if errors else why
            self.alarms.append(f"{told}; the run continues without its numbers")
            log.warning(self.alarms[0], exc_info=errors[0] if errors else None)
        return {}


def _checked(found: Any) -> dict[str, float | None]:
    if not isinstance(found, Mapping) or len(found) > NAMES_MAX:
        raise TypeError(f"it returned {str(found)[:NAME_MAX]}; return a dict of at most {NAMES_MAX} numbers by name")
    for name in found:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_MAX):
            raise TypeError(f"it named a number {str(name)[:NAME_MAX]!r}; use 1 to {NAME_MAX} printable characters")
    values = {name: float(value) for name, value in found.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class RunModel:
    """The model of a run on one device of this process: for its initial values, and for text generation.

    Between two calls it holds no array. It reads the run's data only for a model whose other state, such as batch
    statistics, is computed from data.

    Raises:
        ValueError: The model cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        if config.model.own:
            raise ValueError(
                "the run's model is the islands' own (model.module: own), so only their programs can evaluate or "
                "repeat it; evaluate a snapshot there (docs/join.md, for MaxText docs/maxtext.md), or name a model "
                "with the same parameters in model.module if there is one"
            )
        self._config = config
        device = jax.local_devices(backend="cpu")[0]
        self._blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), [device], seed=config.seed)
        self.shapes, self.kinds = self._blueprint.shapes, self._blueprint.kinds
        self._examiner = examiner_of(
            config, self._blueprint, lambda: self._source, lambda: read_base(self._blueprint).values
        )

    @cached_property
    def _source(self) -> Source:
        return run_source(self._config)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initial_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Draw the initial parameters, or read those of model.weights: (path, new float32 array) by ascending path.

        With adapters, only they are parameters, so they are drawn. The arrays are canonical tensors (core/kinds.py).

        A caller that frees each array before it takes the next one holds the model at most once.

        Raises:
            ValueError: The weights are damaged, or belong to another model.
        """
        if self._config.model.initial:
            # The table of public families takes long to read.
            from diloco_jax.training.convert.weights import Weights

            yield from Weights(self._config.model.initial).read(self._config.model)
            return
        drawn = self._blueprint.draw()
        for path in sorted(drawn):
            yield path, np.array(with_order(drawn.pop(path), self._blueprint.orders[path]), np.float32)

    def place(self, parameters: Mapping[str, np.ndarray]) -> tuple[Params, Variables]:
        """Put parameters on the device in the model's dtypes, with its other variables; raises as `evaluate`."""
        if different := sorted({*parameters} ^ {*self.shapes}):
            raise ValueError(
                f"parameters {different[:3]} are only in the model, or only in the evaluated parameters; were these "
                "saved from another model?"
            )
        placed: dict[str, jax.Array] = {}
        for path, tensor in self._blueprint.tensors.items():
            value = parameters[path]
            if value.shape != self.shapes[path]:
                raise ValueError(
                    f"parameter '{path}' has shape {value.shape}, the model needs {self.shapes[path]}; was it saved "
                    "from another model?"
                )
            stored = with_order(value, inverse(self._blueprint.orders[path]))
            placed[path] = put_array(stored.astype(tensor.dtype, copy=False), tensor.sharding)
        return placed, self._examiner.settled(placed)

    def model(self, params: Params, other: Variables) -> nnx.Module:
        """Build the model in the mode of an evaluation; call it inside a program."""
        return self._blueprint.model(params, other)


def run_source(config: RunConfig) -> Source:
    """Return the data of a run; of islands with separate corpora, equal shares, with an evaluation set for each.

    Raises:
        ValueError: This machine cannot read a corpus; the message names it.
    """
    corpora = config.corpora
    if list(corpora) == [COMMON]:
        return load_source(config.data, config.train.seq_len)
    parts = {name or RUN: load_source(each.data, config.train.seq_len) for name, each in sorted(corpora.items())}
    return united(parts, (1.0,) * len(parts))


class Evaluator(RunModel):
    """The model of a run with its data, for evaluation.

    During an evaluation it holds the parameters once, without optimizer state. Data from another machine is fetched at
    the first evaluation, because a syncer evaluates nothing and needs no copy.

    Raises:
        ValueError: Model or data cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.scorer = Scorer(config.evaluation)
        # A wrong source raises now instead of at the first evaluation. Only islands have separate corpora.
        if config.shares_corpus and not config.data.remote:
            check_source(config.data, config.train.seq_len, config.train.eval_batch_size)
            _ = self.corpus

    @cached_property
    def corpus(self) -> str:
        """Return the description of the run's corpus, so that processes can compare it; "" if no island reads it."""
        config = self._config
        if not config.shares_corpus:
            return ""
        return (self._source if len(config.corpora) == 1 else load_source(config.data, config.train.seq_len)).corpus

    def evaluate(self, parameters: Mapping[str, np.ndarray], max_batches: int, global_step: int = 0) -> dict[str, Any]:
        """Compute the mean held-out loss of these parameters.

        Args:
            parameters: float32 arrays by path, canonical tensors.
            max_batches: Number of batches of train.eval_batch_size sequences; fewer when the split is smaller.

        Returns:
            A dict: loss in nats per token, bits_per_byte (None if the text of the tokens is unknown) and tokens; the
            same by name of each further set (sets); and scores, numbers by name: the model's metrics, those of the sets
            such as "books loss", and those of evaluation.module.

        Raises:
            ValueError: Paths or shapes are not those of the model.
        """
        placed, other = self.place(parameters)
        result = self._examiner.examine(placed, other, max_batches)
        result["scores"] |= self.scorer.scores(lambda: self.model(placed, other), global_step)
        return result


def examiner_of(
    config: RunConfig, blueprint: Blueprint, source: Callable[[], Source], frozen: Callable[[], Variables]
) -> Examiner:
    """Return the evaluation of a blueprint's model on the config's held-out data.

    Args:
        config: the run.
        blueprint: the model.
        source: opens the data at its first use.
        frozen: as in `Examiner`.
    """
    train, seed = config.train, config.data.shuffle_seed + config.seed
    return Examiner(blueprint, source, train.eval_batch_size, train.settle_batches, seed, frozen)
