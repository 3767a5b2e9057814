"""Islands as lanes of a `vmap`; a run is one compiled scan over steps, without protocol, network or files.

All learners are merged in every round, so the result shows only the cost of the method, the drift between merges. Each
tensor has its own turns with any period; after tau steps the learners adopt the result of the turn.

    Delta_m = Theta - theta_m,   Theta <- OuterOpt(Theta, Merge(Delta_m)),   theta_m <- Theta + kept (theta_m - ref_m)

ref_m is Theta (blend; kept = 0 overwrites), the sent value (rebase), or the forecast of the merge at the time of
sending (eager, after arXiv 2502.12996).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.training.models.protocol import GraphDef
from diloco_jax.training.state import Params, TrainState
from diloco_jax.training.train_step import make_train_step, model_loss

# Shorter vectors have no direction.
TINY = 1e-30


class Method(NamedTuple):
    """The rules of the exchange; each combination is compiled separately."""

    # M; 1 without a turn is data parallel.
    learners: int = 4
    # rda or average; vectors and tables are always averaged.
    merge: str = "rda"
    # The unit of rda's norms and directions: tensor, head, row, column, layer.
    unit: str = "tensor"
    # theta (overwrite, blend), sent (rebase), foreseen (eager).
    ref: str = "theta"
    # sgd, nesterov, delayed (momentum in every n-th turn), restart (none after every n-th turn).
    outer: str = "sgd"
    # For learners that miss broadcasts: global (Alg. 2), own (relative to their version), cgad, heloco.
    stale: str = ""


class Numbers(NamedTuple):
    """The numbers of a run; a change of them compiles nothing."""

    # [steps]: the rate of the inner optimizer.
    rate: np.ndarray
    # [steps, tensors]: whether the tensor's turn is after this step.
    due: np.ndarray
    # [steps, tensors]: whether the result of a turn is adopted after this step.
    adopts: np.ndarray
    # [steps, learners]: whether a learner misses the results after this step.
    misses: np.ndarray
    # The share of local work that an adoption keeps.
    kept: np.float32
    outer_rate: np.float32
    momentum: np.float32
    # n of Method.outer.
    every: np.int32
    # The decay per step of the running average of the global model.
    average: np.float32


class Lanes(NamedTuple):
    """The state of a run; arrays of learners have a leading axis [M]."""

    learners: TrainState
    theta: Params
    # [M]: the reference of an adoption (Method.ref).
    sent: Params
    # [M]: the newest adopted value; empty unless learners miss broadcasts.
    anchor: Params
    # The trace of the outer momentum.
    trace: Params
    # The outer gradients since the trace changed.
    bank: Params
    # [M]: the merge of the previous turn without the learner's share.
    others: Params
    # [tensors]: the number of turns so far.
    turns: jax.Array
    # [tensors, M]: the number of turns that the learner has missed.
    ages: jax.Array
    # The running average of theta.
    average: Params


def start(theta: Params, tx: optax.GradientTransformation, method: Method) -> Lanes:
    """Return lanes that all start with the same parameters."""
    local = {path: jnp.tile(value, (method.learners, *[1] * value.ndim)) for path, value in theta.items()}
    zeros, none = jax.tree.map(jnp.zeros_like, theta), dict[str, jax.Array]()
    return Lanes(
        TrainState(local, jax.vmap(tx.init)(local)),
        theta,
        local if method.ref != "theta" else none,
        local if method.stale else none,
        zeros if method.outer != "sgd" or method.stale == "heloco" else none,
        zeros if method.outer == "delayed" else none,
        jax.tree.map(jnp.zeros_like, local) if method.ref == "foreseen" else none,
        jnp.zeros(len(theta), jnp.int32),
        jnp.zeros((len(theta), method.learners), jnp.int32),
        theta,
    )


@partial(jax.jit, static_argnames=("graphdef", "make_inner", "method", "heads"))
def train(
    theta: Params, samples: jax.Array, numbers: Numbers, *, graphdef: GraphDef,
    make_inner: Callable[[Params], optax.GradientTransformation], method: Method, heads: int,
) -> tuple[Params, Params, Params, jax.Array]:  # fmt: skip
    """Make a run; return Theta, its running average, the mean of the learners, and their mean loss in each step.

    Args:
      samples: token ids [steps, batch, length + 1], uint8.
      make_inner: function that returns the inner optimizer for parameters and for rate 1.
      heads: number of attention heads.
    """
    tx = make_inner(theta)
    step = make_train_step(graphdef, tx)

    def advance(lanes: Lanes, now: tuple[jax.Array, ...]) -> tuple[Lanes, jax.Array]:
        batch, rate, due, adopts, misses = now
        tokens = batch.astype(jnp.int32).reshape(method.learners, -1, batch.shape[-1])
        learners, metrics = jax.vmap(lambda state, batch: step(state, {"tokens": batch}, rate))(lanes.learners, tokens)
        lanes = lanes._replace(learners=learners)

        def turn(lanes: Lanes) -> Lanes:
            return _adopt(_send(lanes, due, numbers, method, heads), adopts, misses, numbers.kept, method)

        lanes = jax.lax.cond(due.any() | adopts.any(), turn, lambda same: same, lanes)
        # Data parallel has only one model.
        if method.learners == 1:
            lanes = lanes._replace(theta=jax.tree.map(lambda value: value[0], learners.params))
        share = 1 - numbers.average
        average = jax.tree.map(lambda mean, new: mean + share * (new - mean), lanes.average, lanes.theta)
        return lanes._replace(average=average), metrics["loss"].mean()

    times = (samples, numbers.rate, numbers.due, numbers.adopts, numbers.misses)
    lanes, losses = jax.lax.scan(advance, start(theta, tx, method), times)
    mean = jax.tree.map(lambda value: value.mean(0), lanes.learners.params)
    return lanes.theta, lanes.average, mean, losses


@partial(jax.jit, static_argnames="graphdef")
def evaluate(theta: Params, samples: jax.Array, *, graphdef: GraphDef) -> jax.Array:
    """Return the mean loss over batches [batches, size, length + 1]."""
    return jax.lax.map(
        lambda batch: model_loss(graphdef, theta, {"tokens": batch.astype(jnp.int32)}, evaluate=True)[0], samples
    ).mean()


def _send(lanes: Lanes, due: jax.Array, numbers: Numbers, method: Method, heads: int) -> Lanes:
    """Run the due turns: merge, make the outer step, and keep the reference for the adoption."""
    local, paths = lanes.learners.params, sorted(lanes.theta)
    if method.stale in ("", "global"):
        deltas = {path: lanes.theta[path][None] - local[path] for path in paths}
    else:
        deltas = {path: lanes.anchor[path] - local[path] for path in paths}
    parts: dict[str, Any] = {"theta": {}, "sent": {}, "trace": {}, "bank": {}, "others": {}}
    totals = layer_products(deltas) if method.unit == "layer" and method.merge == "rda" else {}
    for number, path in enumerate(paths):
        now, delta = due[number], deltas[path]
        if method.stale == "cgad":
            delta = delta * _lanes_of(gate(lanes.ages[number]), delta)
        elif method.stale == "heloco":
            delta = aligned(delta, lanes.trace[path])
        if totals and path in totals:
            gradient = _weighted(delta, totals[path])
        else:
            gradient = merge(path, delta, method, heads)
        moved, trace, bank = outer_step(
            gradient, lanes.trace.get(path), lanes.bank.get(path), lanes.turns[number], numbers, method
        )
        parts["theta"][path] = jnp.where(now, lanes.theta[path] + moved, lanes.theta[path])
        if path in lanes.trace:
            parts["trace"][path] = jnp.where(now, trace, lanes.trace[path])
        if path in lanes.bank:
            parts["bank"][path] = jnp.where(now, bank, lanes.bank[path])
        if method.ref == "sent":
            parts["sent"][path] = jnp.where(now, local[path], lanes.sent[path])
        elif method.ref == "foreseen":
            # The forecast is the own share of now plus the others' shares of the previous turn. Local parameters move
            # there at once.
            foreseen = lanes.theta[path][None] - numbers.outer_rate * (delta / method.learners + lanes.others[path])
            parts["sent"][path] = jnp.where(now, foreseen, lanes.sent[path])
            local = local | {path: jnp.where(now, foreseen, local[path])}
            parts["others"][path] = jnp.where(now, gradient[None] - delta / method.learners, lanes.others[path])
    return lanes._replace(
        learners=lanes.learners._replace(params=local), turns=lanes.turns + due.astype(jnp.int32), **parts
    )


def _adopt(lanes: Lanes, adopts: jax.Array, misses: jax.Array, kept: Any, method: Method) -> Lanes:
    local, anchor = dict(lanes.learners.params), dict(lanes.anchor)
    for number, path in enumerate(sorted(local)):
        theta, mine = lanes.theta[path][None], local[path]
        reference = lanes.sent[path] if method.ref != "theta" else theta
        now = _lanes_of(adopts[number] & ~misses, mine)
        local[path] = jnp.where(now, theta + kept * (mine - reference), mine)
        if anchor:
            anchor[path] = jnp.where(now, theta, anchor[path])
    late = jnp.where(misses[None], lanes.ages + 1, 0)
    ages = jnp.where(adopts[:, None], late, lanes.ages)
    return lanes._replace(learners=lanes.learners._replace(params=local), anchor=anchor, ages=ages)


def merge(path: str, deltas: jax.Array, method: Method, heads: int) -> jax.Array:
    """Merge outer gradients [M, ...] with equal weights by averaging, or by rda of each unit (paper, App. D.2).

    (mean_m |v_m|) phi(mean_m phi(v_m)),   phi(v) = v / |v|
    """
    if method.merge == "average" or not is_matrix(path, deltas[0]):
        return deltas.mean(0)
    rows, columns = deltas.shape[1:]
    shape, axes = {
        "tensor": ((1, rows, 1, columns), (2, 4)),
        "layer": ((1, rows, 1, columns), (2, 4)),
        "row": ((rows, 1, 1, columns), (2, 4)),
        "column": ((1, rows, columns, 1), (2, 4)),
        "head": _head_shape(path, rows, columns, heads),
    }[method.unit]
    units = deltas.reshape(deltas.shape[0], *shape)
    norms = jnp.sqrt(jnp.sum(units**2, axis=axes, keepdims=True))
    direction = (units / jnp.maximum(norms, TINY)).mean(0)
    length = jnp.sqrt(jnp.sum(direction**2, axis=tuple(axis - 1 for axis in axes), keepdims=True))
    return (norms.mean(0) * direction / jnp.maximum(length, TINY)).reshape(rows, columns)


def _head_shape(path: str, rows: int, columns: int, heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if path.endswith(("/q/kernel", "/k/kernel", "/v/kernel")):
        return (1, rows, heads, columns // heads), (2, 4)
    if path.endswith("/out/kernel"):
        return (heads, rows // heads, 1, columns), (2, 4)
    return (1, rows, 1, columns), (2, 4)


def layer_products(deltas: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return rda's coefficients [M] of each matrix from the norms and directions of its whole layer."""
    grams: dict[str, jax.Array] = {}
    for path, delta in deltas.items():
        if is_matrix(path, delta[0]):
            flat, layer = delta.reshape(len(delta), -1), layer_of(path)
            grams[layer] = grams.get(layer, 0.0) + flat @ flat.T
    found = {}
    for layer, gram in grams.items():
        norms = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), TINY))
        length = jnp.sqrt(jnp.maximum((gram / norms[:, None] / norms[None]).mean(), TINY))
        found[layer] = norms.mean() / length / norms / len(gram)
    return {path: found[layer_of(path)] for path, delta in deltas.items() if is_matrix(path, delta[0])}


def outer_step(
    gradient: jax.Array, trace: Any, bank: Any, turns: jax.Array, numbers: Numbers, method: Method
) -> tuple[jax.Array, Any, Any]:
    """Return the change of Theta, the next trace, and the next bank.

    sgd       -rate g
    nesterov  t' = g + mu t;   -rate (g + mu t')
    restart   like nesterov, with t = 0 in every n-th turn
    delayed   -rate g; in every n-th turn t' = mu t + mean of the n gradients, and also -rate mu t' (arXiv 2401.09135)
    """
    rate, momentum, last = numbers.outer_rate, numbers.momentum, turns % numbers.every == numbers.every - 1
    if method.outer == "sgd":
        return -rate * gradient, (trace if trace is None else gradient), bank
    if method.outer == "delayed":
        gathered = bank + gradient / numbers.every
        moved = jnp.where(last, momentum * trace + gathered, trace)
        step = gradient + jnp.where(last, momentum * moved, 0.0)
        return -rate * step, moved, jnp.where(last, 0.0, gathered)
    moved = gradient + momentum * trace
    step = -rate * (gradient + momentum * moved)
    return step, (jnp.where(last, 0.0, moved) if method.outer == "restart" else moved), bank


def gate(ages: jax.Array, decay: float = 0.3, cutoff: float = 4.0) -> jax.Array:
    """Return CGAD's factor of an outer gradient from its age in turns: e^(-decay age) times a cosine, 0 at `cutoff`."""
    age = jnp.minimum(ages.astype(jnp.float32), cutoff)
    return 0.5 * (1 + jnp.cos(math.pi * age / cutoff)) * jnp.exp(-decay * age)


def aligned(deltas: jax.Array, trace: jax.Array) -> jax.Array:
    """Return HeLoCo's outer gradients, turned towards the last one and without opposing parts (arXiv 2606.00271)."""
    axes = tuple(range(1, deltas.ndim))
    norms = jnp.sqrt(jnp.sum(deltas**2, axes, keepdims=True))
    length = jnp.sqrt(jnp.sum(trace**2))
    toward = trace[None] / jnp.maximum(length, TINY)
    along = jnp.sum(deltas * toward, axes, keepdims=True)
    cosine = along / jnp.maximum(norms, TINY)
    confidence = norms / jnp.maximum(norms + 3 * length, TINY)
    turned = deltas + (1 - confidence) * norms * toward
    turned = turned * norms / jnp.maximum(jnp.sqrt(jnp.sum(turned**2, axes, keepdims=True)), TINY)
    shrunk = deltas - 0.5 * along * toward
    found = jnp.where(cosine >= 0.2, deltas, jnp.where(cosine < 0, shrunk, turned))
    return jnp.where(length > TINY, found, deltas)


def is_matrix(path: str, value: jax.Array | np.ndarray) -> bool:
    """Return whether the merge treats a tensor as a matrix."""
    return value.ndim == 2 and "embed" not in path


def layer_of(path: str) -> str:
    """Return the block that a tensor belongs to."""
    return "/".join(path.split("/")[:2])


def _lanes_of(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _weighted(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.tensordot(weights, deltas, 1)
