"""Measure a training step of the built-in decoder beside that of a plain decoder of Flax, of the same shape.

Both have gated MLPs, as many key heads as query heads, separate tables of tokens for input and output, float32, AdamW
and the same batch. The plain one is what a user would write with `flax.nnx`: its attention and its norms, and learned
positions instead of rotary ones. Steps of both alternate in one process. `value` is the tokens per second of the
built-in decoder over those of the plain one, by processor time, which other load changes less; the median over pairs.
`gflops` is what the built-in step reaches, and `product_gflops` what a product of its matrices reaches alone.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pairs as blocks

VOCABULARY = 256


class Contestant(NamedTuple):
    """A decoder with its optimizer: a function that makes one step, and how many parameters are multiplied."""

    step: Callable[[], object]
    parameters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    blocks.add_options(parser, batch_size=8, pairs=9, steps=4)
    arguments = parser.parse_args()
    blocks.emulate(1)
    result = measure(arguments)
    line = (
        "built-in decoder of {parameters:,} parameters: {value:.3f} of a plain Flax decoder's tokens per second "
        "({low:.3f} to {high:.3f}, {runs} pairs); {gflops:.1f} GFLOP/s, a matrix product alone {product_gflops:.1f}"
    )
    sys.stdout.write(f"{json.dumps(result) if arguments.json else line.format(**result)}\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate the steps of both, and return ratios with their spread."""
    ours, plain = built_in(arguments), plain_flax(arguments)
    for each in (ours, plain):
        cpu_s(each.step, 1)
    times = [(cpu_s(ours.step, arguments.steps), cpu_s(plain.step, arguments.steps)) for _ in range(arguments.pairs)]
    # The same number of FLOPs is asked of both, and they differ by the table of positions, which is not multiplied.
    ratios = [other * ours.parameters / (mine * plain.parameters) for mine, other in times]
    tokens = arguments.batch_size * arguments.seq_len
    scores = 12 * arguments.layers * tokens * arguments.seq_len * arguments.dim
    flops = 6 * tokens * ours.parameters + scores
    return {
        "name": "decoders",
        "unit": "tokens per second of the built-in decoder / of a plain one",
        "value": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "runs": arguments.pairs,
        "parameters": ours.parameters,
        "gflops": flops / statistics.median(mine for mine, _ in times) / 1e9,
        "product_gflops": product_gflops(tokens, arguments.dim),
    }


def cpu_s(step: Callable[[], object], times: int) -> float:
    """Return the processor time of one step, in seconds."""
    import jax

    began_s = time.process_time()
    for _ in range(times):
        jax.block_until_ready(step())
    return (time.process_time() - began_s) / times


def product_gflops(rows: int, width: int) -> float:
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((rows, width)), jnp.ones((width, 4 * width))
    product = jax.jit(jnp.matmul)
    cpu_s(lambda: product(a, b), 3)
    return 2 * rows * width * 4 * width / cpu_s(lambda: product(a, b), 20) / 1e9


def contestant(module: Any, loss: Callable[[Any, Any], Any], arguments: argparse.Namespace) -> Contestant:
    """Return the compiled step of a module: gradient of `loss(module, tokens)` and AdamW's update."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    split: Any = nnx.split(module, nnx.Param, ...)
    graph, params, other = split
    tx = optax.adamw(1e-3)
    shape = (arguments.batch_size, arguments.seq_len + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, VOCABULARY, jnp.int32)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradient = jax.grad(lambda values: loss(nnx.merge(graph, values, other), tokens))(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    # One table is looked up, not multiplied.
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) - VOCABULARY * arguments.dim
    return Contestant(lambda: step(params, state), size)


def built_in(arguments: argparse.Namespace) -> Contestant:
    from flax import nnx

    from diloco_jax.training.models.decoder import Decoder, DecoderConfig

    config = DecoderConfig(vocab_size=VOCABULARY, tie_embeddings=False, **blocks.decoder_args(arguments))
    return contestant(
        Decoder(config, rngs=nnx.Rngs(0)), lambda model, tokens: model.loss({"tokens": tokens})[0], arguments
    )


def plain_flax(arguments: argparse.Namespace) -> Contestant:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    args = blocks.decoder_args(arguments)
    dim, hidden, heads = arguments.dim, args["mlp_dim"], args["num_heads"]

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(heads, dim, use_bias=False, decode=False, rngs=rngs)
            self.gate, self.up = (nnx.Linear(dim, hidden, use_bias=False, rngs=rngs) for _ in range(2))
            self.down = nnx.Linear(hidden, dim, use_bias=False, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.norms[0](x), mask=mask)
            y = self.norms[1](x)
            return x + self.down(jnp.square(jax.nn.relu(self.gate(y))) * self.up(y))

    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table, self.places = (
                nnx.Embed(VOCABULARY, dim, rngs=rngs),
                nnx.Embed(arguments.seq_len, dim, rngs=rngs),
            )
            self.blocks = nnx.List([Block(rngs) for _ in range(arguments.layers)])
            self.norm = nnx.RMSNorm(dim, rngs=rngs)
            self.head = nnx.Linear(dim, VOCABULARY, use_bias=False, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.table(tokens) + self.places(jnp.arange(tokens.shape[1]))
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    def loss(model: Any, tokens: Any) -> Any:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    found = contestant(Plain(nnx.Rngs(0)), loss, arguments)
    return found._replace(parameters=found.parameters - arguments.seq_len * dim)


if __name__ == "__main__":
    main()
