"""Inner optimizers, and learning-rate schedules that follow the global step.

The learning rate is an argument of every inner step, not a function of the optimizer's own count. A learner that joins
late or returns must train at the rate of the whole run's progress. So `make_inner` builds a transformation for the
rate 1, and the train step multiplies its update by the current rate. Any optax transformation built with learning rate
1 works in its place.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from diloco_jax.core.kinds import Kind, Order, kind_of
from diloco_jax.training.named import check_choices, check_setting, make_transformation

OptimizerName = Literal["adamw", "muon"]
# From global step to learning rate; it runs on the CPU, so a step needs no device work for it.
Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The inner optimizer of every island, and its schedule."""

    module: str = ""
    """Your own function as package.module:Name, which returns an optax.GradientTransformation for learning rate 1. It
    replaces the settings from `name` to `adam_paths`, except the learning rates; the schedule stays too. Set it for
    another optimizer than adamw and muon. The file with the function must be on every machine of the run."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function. Set it if your function takes arguments; islands with other values are
    refused."""
    name: OptimizerName = "adamw"
    """adamw, or muon: orthogonalised momentum for matrices, separately for each layer and expert, and adam for all
    other parameters. Set it to muon for a lower loss after the same tokens; it needs another learning_rate, and its
    steps take longer. In our trials at 0.12M parameters its loss was about 2.6 % lower than that of adamw in data
    parallel, and 1.5 % lower with four islands (docs/results/muon.md, docs/results/merge.md)."""
    learning_rate: float = 1e-3
    """Peak rate; about 1e-3 for adamw, 2e-2 for muon at a few million parameters. Tune it first: training is slow with
    a small rate, and diverges with a large one. docs/settings.md has a rule for each merge."""
    adam_learning_rate: float = 3e-3
    """Peak rate of the tensors that muon leaves to adam; adamw does not use it. Tune it together with learning_rate."""
    b1: float = 0.9
    """Decay of adam's first moment, in [0, 1). With 0 the optimizer remembers no earlier gradient. Lower it, for
    example to 0.8 as the quickstart does, if fragments are merged often: after a merge the momentum still points where
    the island was, for about 1 / (1 - b1) steps."""
    b2: float = 0.95
    """Decay of adam's second moment, in [0, 1). Raise it if the scale of updates is noisy; it then follows changes
    later."""
    muon_beta: float = 0.95
    """Decay of muon's momentum (Nesterov), in [0, 1). With 0 there is no momentum. Lower it if the loss oscillates;
    updates are then noisier."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and other kernels, multiplied by the learning rate; 0 = none. Vectors, embeddings
    (first axis `vocab`) and stacks of these never decay. Lower it for fine-tuning, so that the weights stay near their
    initial values. Raise it if the training loss falls while the evaluation loss rises."""
    clip_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down; 0 = never. Lower it if single batches disturb the
    training."""
    adam_paths: tuple[str, ...] = ("*embed*",)
    """Patterns of paths; matching parameters are treated like embeddings, whatever their axes: no muon, no decay. Set
    it if muon or decay must not change certain matrices, such as the head or a table that few tokens use."""
    accumulate_steps: int = 1
    """Micro-batches of an inner step; they are computed in sequence, and their mean gradient makes one update, to save
    memory. Raise it if a step needs too much memory; the step then takes longer."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """wsd (warm up, stay, decay), cosine (warm up, then half a cosine), or constant (warm up, stay). Set it to cosine
    to compare with other work. Set it to constant if you may train longer later, because wsd and cosine decay towards
    the end of train.steps or train.tokens."""
    warmup_steps: int = 50
    """Global steps of linear warm-up; 0 = none. With train.tokens, the warm-up ends after this number times the tokens
    of one global step. Raise it if the loss jumps in the first steps."""
    decay_fraction: float = 0.2
    """Share of all global steps (or of train.tokens), at the end, during which wsd decays linearly; 0 = never, 1 = all.
    Lower it if the rate leaves its peak too early."""
    final_fraction: float = 0.1
    """Rate after the last step as a share of the peak; 0 = none. With 1 the rate does not decay. Lower it to 0 if you
    will not train the model further, and leave it above 0 otherwise."""

    def __post_init__(self) -> None:
        check_setting("optimizer", self.module, self.args)
        check_choices("optimizer", self)
        rules: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
            "be positive and finite": (lambda x: 0 < x < math.inf, ("learning_rate", "adam_learning_rate")),
            "be at least 1": (lambda x: x >= 1, ("accumulate_steps",)),
            "be in [0, 1)": (lambda x: 0 <= x < 1, ("b1", "b2", "muon_beta")),
            "not be negative": (lambda x: x >= 0, ("weight_decay", "clip_norm", "warmup_steps")),
            "be between 0 and 1": (lambda x: 0 <= x <= 1, ("decay_fraction", "final_fraction")),
        }
        for must, (fits, names) in rules.items():
            for name in names:
                if not fits(getattr(self, name)):
                    raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must {must}")


def learning_rate(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Return the schedule, a pure function from global step to learning rate.

    With peak r, warm-up w, final share f and the step t counted from 0, the rate is r (t + 1) / w while t < w. Then it
    follows the shape of the schedule. Shapes that decay end at r f when t = total_steps, and stay there.

    Raises:
      ValueError: warm-up and decay do not fit into the run.
    """
    decay_steps = round(config.decay_fraction * total_steps) if config.schedule == "wsd" else 0
    if total_steps < 1 or config.warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"optimizer.warmup_steps {config.warmup_steps} and {decay_steps} steps of decay do not fit into "
            f"{total_steps} global steps; train longer, or lower warmup_steps or decay_fraction"
        )
    peak, final, warmup = config.learning_rate, config.final_fraction, config.warmup_steps

    def rate(global_step: int) -> float:
        if global_step < warmup:
            return peak * (global_step + 1) / warmup
        left = max(total_steps - global_step, 0)
        if config.schedule == "cosine":
            progress = 1 - left / max(total_steps - warmup, 1)
            return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
        if config.schedule == "wsd" and left < decay_steps:
            return peak * (final + (1 - final) * left / decay_steps)
        return peak

    return rate


def make_inner(
    config: OptimizerConfig,
    params: Mapping[str, Array | jax.ShapeDtypeStruct],
    *,
    kinds: Mapping[str, Kind] | None = None,
    orders: Mapping[str, Order] | None = None,
) -> optax.GradientTransformation:
    """Build the inner optimizer for learning rate 1; the train step multiplies its update by the rate.

    AdamW's update is -(m / (sqrt(v) + eps) + decay * theta) with bias-corrected moments. Muon's update (arXiv
    2502.16982) is the Nesterov momentum of a matrix, orthogonalised by five Newton-Schulz steps, and scaled by
    sqrt(max(1, columns / rows)).

    Args:
      params: {path: array}; only paths and shapes are read.
      kinds: {path: kind}; for paths that are not listed, the kind that follows from the shape alone.
      orders: {path: stored axes in canonical order}; for paths that are not listed, the axes as they are stored.

    Raises:
      ValueError: the user's own function fails, or its transformation cannot train these parameters.
    """
    if config.module:
        return make_transformation("optimizer", config.module, config.args, params)
    known = {path: (kinds or {}).get(path, kind_of(value.shape)) for path, value in params.items()}
    matrices = {
        path: kind.form == "matrix" and not any(fnmatch(path, pattern) for pattern in config.adam_paths)
        for path, kind in known.items()
    }
    if config.name == "adamw":
        update = optax.adamw(1.0, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=matrices)
    else:
        dims = {
            path: optax.contrib.MuonDimensionNumbers(*axes) if matrices[path] and len(axes) == 2 else None
            for path, axes in _axes_in_stacks(params, known, orders or {}).items()
        }
        muon = optax.contrib.muon(
            1.0, beta=config.muon_beta, adam_b1=config.b1, adam_b2=config.b2, muon_weight_dimension_numbers=dims
        )
        others = {path for path, numbers in dims.items() if numbers is None}
        muon = _scaled(muon, others, config.adam_learning_rate / config.learning_rate)
        # Decay is added here, because Muon's own decay would skip kernels with three axes, which it leaves to adam.
        update = optax.chain(muon, optax.add_decayed_weights(-config.weight_decay, matrices))
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    return optax.chain(clip, update)


def _axes_in_stacks(
    params: Mapping[str, Array | jax.ShapeDtypeStruct], kinds: Mapping[str, Kind], orders: Mapping[str, Order]
) -> dict[str, Order]:
    """Return the stored axes that each tensor of a stack has, in canonical order, by path."""
    return {
        path: orders.get(path, tuple(range(len(value.shape))))[kinds[path].stack :] for path, value in params.items()
    }


def _scaled(
    transformation: optax.GradientTransformation, paths: set[str], factor: float
) -> optax.GradientTransformation:
    """Multiply the updates of these paths by a factor; the state is that of `transformation`.

    It is for Adam's rate in Muon, because optax 0.2.6 has one rate for both.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found, state = transformation.update(updates, state, params)
        return {path: jnp.array(factor, u.dtype) * u if path in paths else u for path, u in found.items()}, state

    return optax.GradientTransformation(transformation.init, update)
