"""Decoupled DiLoCo (arXiv 2604.21428) on one page: M learners train one model and never wait for each other.

Learner m has parameters theta_m, a separate inner optimizer and separate data. The syncer has the global parameters
Theta, in P fragments, and an outer optimizer. Here the learners are the lanes of a `vmap`, the network is a list, and time is
counted in ticks: in a tick, each learner that is neither slow nor away makes one inner step. The family in settings:

    synchronous DiLoCo (arXiv 2311.08105)    P = 1, tau = 0, K = M
    Streaming DiLoCo (arXiv 2501.18512)      P > 1, tau > 0, K = M
    Decoupled DiLoCo (section 5.1)           P = H = 24, tau = 2, K = 1

Left out: the grace window (Eq. 3), recovery (App. E.3), compression (App. D.3), fragments of parts of tensors (App. C).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, jax.Array]  # path -> tensor
Loss = Callable[[Params, jax.Array], jax.Array]  # (parameters, batch)


class Settings(NamedTuple):
    """The numbers of the algorithm. The paper publishes no outer learning rate and no momentum."""

    # A fragment is merged every H global steps.
    sync_every: int = 24  # H
    num_fragments: int = 24  # P <= H
    # A learner adopts the merged value of a fragment tau ticks after the fragment was read.
    overlap_steps: int = 2  # tau
    # The global step advances when K learners have reported a step.
    quorum: int = 1  # K
    # A common alternative is optax.sgd(0.7, momentum=0.9, nesterov=True).
    outer: optax.GradientTransformation = optax.sgd(1.0)


class Learners(NamedTuple):
    """All learners; every array has a leading axis [M]."""

    params: Params  # theta
    opt_state: optax.OptState  # inner optimizer
    # Both count from the learner's last adoption of the fragment: inner steps, and tokens.
    steps: jax.Array  # c_steps [M, P]
    tokens: jax.Array  # c_tokens [M, P]


def balanced_fragments(params: Params, count: int) -> list[list[str]]:
    """Cut the model into P fragments: the largest tensor left goes into the smallest fragment (App. C)."""
    fragments: list[list[str]] = [[] for _ in range(count)]
    for path in sorted(params, key=lambda path: (-params[path].size, path)):
        min(fragments, key=lambda fragment: sum(params[path].size for path in fragment)).append(path)
    return fragments


@partial(jax.jit, static_argnames=("loss", "inner"))
def inner_step(
    learners: Learners, batches: jax.Array, present: jax.Array, loss: Loss, inner: optax.GradientTransformation
) -> Learners:
    """Make an inner step with each learner that is present, and count it for every fragment (Alg. 1).

    theta_m <- InnerOpt(theta_m, grad f(x_m, theta_m)),  c_steps += 1,  c_tokens += |x_m|
    """

    def step(here: jax.Array, old: Learners, batch: jax.Array) -> Learners:
        updates, opt_state = inner.update(jax.grad(loss)(old.params, batch), old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        new = Learners(params, opt_state, old.steps + 1, old.tokens + batch.size)
        return jax.tree.map(partial(jnp.where, here), new, old)

    return jax.vmap(step)(present, learners, batches)


def token_weights(tokens: jax.Array, steps: jax.Array, present: jax.Array) -> jax.Array:
    """Weigh each learner by quantity times quality (section 3.2): w_m = c_tokens (c_tokens / c_steps); the sum is 1."""
    weights = jnp.where(present, tokens * (tokens / jnp.maximum(steps, 1)), 0.0)
    return weights / weights.sum()


def merge(path: str, deltas: jax.Array, weights: jax.Array) -> jax.Array:
    """Merge the outer gradients Delta [M, ...] of one tensor (App. D.2).

    average               sum_m w_m Delta_m                                     for embeddings; we add vectors
    radial-directional    (sum_m w_m |Delta_m|) phi(sum_m w_m phi(Delta_m))     for all others;  phi(x) = x / |x|
    """
    if "embed" in path or deltas.ndim < 3:
        return jnp.tensordot(weights, deltas, 1)
    norms = jnp.sqrt(jnp.sum(deltas**2, axis=range(1, deltas.ndim), keepdims=True))
    direction = jnp.tensordot(weights, deltas / jnp.maximum(norms, 1e-30), 1)
    return jnp.tensordot(weights, norms, 1) * direction / jnp.maximum(jnp.linalg.norm(direction), 1e-30)


@partial(jax.jit, static_argnames="outer")
def outer_step(
    theta: Params, local: Params, weights: jax.Array, state: optax.OptState, outer: optax.GradientTransformation
) -> tuple[Params, optax.OptState]:
    """Merge one fragment and make its next global value (Eq. 1 and 2, Alg. 2).

    Delta_m = Theta - theta_m,  Delta = Merge(Delta_m, w_m),  Theta <- OuterOpt(Theta, Delta)
    OuterOpt is SGD with Nesterov momentum (section 2):  v <- Delta + mu v,  Theta <- Theta - rate (Delta + mu v)
    """
    gradient = {path: merge(path, theta[path][None] - local[path], weights) for path in theta}
    updates, state = outer.update(gradient, state, theta)
    return optax.apply_updates(theta, updates), state


def adopt(learners: Learners, fragment: int, theta: Params) -> Learners:
    """Overwrite a fragment of all learners and reset its counts (Alg. 1; alpha = 0 in App. D.1)."""
    new = {path: jnp.broadcast_to(value, learners.params[path].shape) for path, value in theta.items()}
    steps, tokens = (count.at[:, fragment].set(0) for count in (learners.steps, learners.tokens))
    return learners._replace(params=learners.params | new, steps=steps, tokens=tokens)


def train(
    loss: Loss, theta: Params, inner: optax.GradientTransformation, batches: jax.Array, present: np.ndarray, s: Settings
) -> Params:
    """Train from Theta on batches [ticks, M, ...]; return the last Theta. The mask `present` is [ticks, M].

    An absent learner adopts merged values too, because it makes no step before it is back.
    """
    fragments = balanced_fragments(theta, s.num_fragments)
    # Fragment p is due at t_p = floor(p H / P) in each period of H global steps.
    due = {p * s.sync_every // s.num_fragments: p for p in range(s.num_fragments)}
    outer_states = [s.outer.init({path: theta[path] for path in fragment}) for fragment in fragments]
    params = {path: jnp.tile(value, (present.shape[1], *[1] * value.ndim)) for path, value in theta.items()}
    zeros = jnp.zeros((present.shape[1], s.num_fragments), jnp.int32)
    learners = Learners(params, jax.vmap(inner.init)(params), zeros, zeros)
    global_step, in_flight = 0, []
    for tick, here in enumerate(present):
        learners = inner_step(learners, batches[tick], here, loss, inner)
        # Below the quorum, merging pauses and training continues.
        if here.sum() >= s.quorum:
            global_step += 1
            # Algorithm 2 merges fragment p when t mod H = t_p.
            if (p := due.get(global_step % s.sync_every)) is not None:
                of_syncer, local = ({path: of[path] for path in fragments[p]} for of in (theta, learners.params))
                weights = token_weights(learners.tokens[:, p], learners.steps[:, p], here)
                merged, outer_states[p] = outer_step(of_syncer, local, weights, outer_states[p], s.outer)
                theta = theta | merged
                in_flight.append((tick + s.overlap_steps, p, merged))
        while in_flight and in_flight[0][0] <= tick:
            learners = adopt(learners, *in_flight.pop(0)[1:])
    return theta
