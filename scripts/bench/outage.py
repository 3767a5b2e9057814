"""Compare what islands may read while the syncer is away for longer than their leased data lasts.

A network of three layers learns another one. Two islands with AdamW merge four fragments every 24 steps (RDA, outer
rate 1). In an outage nothing is merged or leased. The loss of the merged model on held-out data is compared before the
outage, 24 steps after it and 480 steps after it. An island without leases reads

  again     the newest leased steps again and again
  earlier   positions below the end of the highest lease (`protocol/leases.py`: `earlier_range`)
  unseen    positions that nobody was leased
  longer    leased data, because leases reach further than the outage
"""

import argparse
import json
import sys
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from diloco_jax.protocol.leases import earlier_range
from diloco_jax.protocol.pacing import ProtocolConfig

ISLANDS, BATCH, H, FRAGMENTS = 2, 48, 24, 4
WIDTHS = (32, 96, 96, 16)
WAYS = ("again", "earlier", "unseen", "longer")
AHEAD = ProtocolConfig().lease_ahead_steps
# Positions of these samples are beyond all others.
HELD_OUT, UNSEEN, SPAN = range(2**31, 2**31 + 4096), 2**30, 2**24
RULE = optax.adamw(1e-3)

Layers = list[dict[str, Array]]


def draw(seed: int) -> Layers:
    """Draw a network."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    sizes = zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    return [{"w": jax.random.normal(key, (a, b)) / np.sqrt(a), "b": jnp.zeros(b)} for key, a, b in sizes]


def outputs(layers: Layers, x: Array) -> Array:
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


TEACHER = draw(1234)


def loss(layers: Layers, positions: Array) -> Array:
    """Return the mean loss on the samples at positions[n] of the order; a sample is made from its position."""
    keys = jax.vmap(lambda at: jax.random.fold_in(jax.random.key(7), at))(positions.astype(jnp.uint32))
    x = jax.vmap(lambda key: jax.random.normal(key, (WIDTHS[0],)))(keys)
    wanted = jnp.argmax(outputs(TEACHER, x), -1)
    return optax.softmax_cross_entropy_with_integer_labels(outputs(layers, x), wanted).mean()


def merged(gradients: Array) -> Array:
    """Merge gradients[islands, ...]: RDA for matrices (mean norm times mean direction), the mean for vectors."""
    if gradients.ndim == 2:
        return gradients.mean(0)
    norms = jnp.sqrt((gradients**2).sum((1, 2), keepdims=True))
    direction = (gradients / jnp.maximum(norms, 1e-30)).mean(0)
    return norms.mean() * direction / jnp.maximum(jnp.sqrt((direction**2).sum()), 1e-6)


def fragment_of(layer: int, name: str) -> int:
    return layer if name == "w" else FRAGMENTS - 1


@jax.jit
def train(seed: int, positions: Array, due: Array) -> Array:
    """Train, and return the held-out loss of the merged model after every H steps.

    Args:
        positions: [steps, islands, samples], what is read.
        due: [steps], the fragment that is merged after each step; -1 for none.
    """
    held_out = jnp.arange(HELD_OUT.start, HELD_OUT.stop, dtype=jnp.uint32)

    def inner(layers: Layers, state: Any, at: Array) -> tuple[Layers, Any]:
        updates, state = RULE.update(jax.grad(loss)(layers, at), state, layers)
        return optax.apply_updates(layers, updates), state

    def step(carry: Any, at_due: Any) -> tuple[Any, None]:
        whole, local, state = carry
        local, state = jax.vmap(inner)(local, state, at_due[0])
        for number, layer in enumerate(whole):
            for name, value in layer.items():
                hit = at_due[1] == fragment_of(number, name)
                new = value - merged(value[None] - local[number][name])
                whole[number][name] = jnp.where(hit, new, value)
                local[number][name] = jnp.where(hit, new[None], local[number][name])
        return (whole, local, state), None

    def period(carry: Any, inputs: Any) -> tuple[Any, Array]:
        carry, _ = jax.lax.scan(step, carry, inputs)
        return carry, loss(carry[0], held_out)

    first = draw(seed)
    local = jax.tree.map(lambda value: jnp.stack([value] * ISLANDS), first)
    inputs = jax.tree.map(lambda each: each.reshape(-1, H, *each.shape[1:]), (positions, due))
    return jax.lax.scan(period, (first, local, jax.vmap(RULE.init)(local)), inputs)[1]


def read(way: str, begins: int, outage: int, after: int, seed: int) -> np.ndarray:
    """Return the positions[steps, islands, samples] that every island reads."""
    steps = begins + outage + after
    found = np.zeros((steps, ISLANDS, BATCH), np.int64)
    ahead = AHEAD if way != "longer" else AHEAD + 2 * outage
    leased: list[deque[int]] = [deque() for _ in range(ISLANDS)]
    newest: list[deque[int]] = [deque(maxlen=AHEAD) for _ in range(ISLANDS)]
    fronts, free = [0] * ISLANDS, 0
    for step in range(steps):
        away = begins <= step < begins + outage
        for island in range(ISLANDS):
            if not away and len(leased[island]) <= ahead // 2:
                more = ahead - len(leased[island])
                leased[island].extend(range(free, free + more * BATCH, BATCH))
                fronts[island] = free = free + more * BATCH
            if leased[island]:
                start = leased[island].popleft()
                newest[island].append(start)
            elif way == "again":
                start = newest[island][step % len(newest[island])]
            elif way == "earlier":
                start, _ = earlier_range(f"island-{island}", seed + 1, step + 1, fronts[island], BATCH)
            else:
                start = UNSEEN + (seed * ISLANDS + island) * SPAN + step * BATCH
            found[step, island] = start + np.arange(BATCH)
    return found


def compare(begins: int, outage: int, after: int, seeds: int) -> None:
    """Print the losses around an outage, for all ways to read."""
    for way in WAYS:
        losses = []
        for seed in range(seeds):
            steps = np.arange(begins + outage + after)
            due = np.where(steps % (H // FRAGMENTS) == H // FRAGMENTS - 1, steps % H // (H // FRAGMENTS), -1)
            due[begins : begins + outage] = -1
            positions = jnp.asarray(read(way, begins, outage, after, seed).astype(np.uint32))
            each = np.asarray(train(seed, positions, jnp.asarray(due)))
            first = (begins + outage) // H
            losses.append((each[begins // H - 1], each[first], each[-1]))
        before, soon, late = (round(float(mean), 4) for mean in np.mean(losses, 0))
        result = {"way": way, "begins": begins, "outage": outage, "before": before, "soon": soon, "late": late}
        result |= {"spread": round(float(np.std(losses, 0).max()), 4)}
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--begins", type=int, nargs="+", default=[960, 240, 48], help=f"steps, multiples of {H}")
    parser.add_argument("--outages", type=int, nargs="+", default=[240, 1248], help=f"steps, multiples of {H}")
    parser.add_argument("--after", type=int, default=480, help=f"steps after the outage, a multiple of {H}")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for begins in options.begins:
        for outage in options.outages:
            compare(begins, outage, options.after, options.seeds)


if __name__ == "__main__":
    main()
