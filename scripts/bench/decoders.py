"""Measure a training step of the built-in decoder beside that of a plain decoder of Flax, of the same shape.

Both have gated MLPs, as many key heads as query heads, separate tables of tokens for input and output, float32, AdamW
and the same batch. The plain one is what a user would write with `flax.nnx`: its attention and its norms, and learned
positions instead of rotary ones. Steps of both alternate in one process. `value` is the tokens per second of the
built-in decoder over those of the plain one, by processor time, which other load changes less; the median over pairs.
`gflops` is what the built-in step reaches, and `product_gflops` what a product of its matrices reaches alone.

With `--maxtext PYTHON`, MaxText's own step is the third one. It runs in a separate process, because MaxText needs
another environment (docs/maxtext.md), and has silu instead of a squared relu. `maxtext` is the ratio to it.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pairs as blocks

VOCABULARY = 256


class Contestant(NamedTuple):
    """A decoder with its optimizer."""

    # Makes a number of steps, and returns the processor time of one, in seconds.
    cpu_s: Callable[[int], float]
    # The number of parameters that are multiplied.
    parameters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    blocks.add_options(parser, batch_size=8, pairs=9, steps=4)
    parser.add_argument("--maxtext", type=Path, metavar="PYTHON", help="interpreter of MaxText's environment")
    arguments = parser.parse_args()
    blocks.emulate(1)
    with contextlib.ExitStack() as stack:
        other = None if arguments.maxtext is None else stack.enter_context(max_text(arguments))
        result = measure(arguments, other)
    line = (
        "built-in decoder of {parameters:,} parameters: {value:.3f} of a plain Flax decoder's tokens per second "
        "({low:.3f} to {high:.3f}, {runs} pairs); {gflops:.1f} GFLOP/s, a matrix product alone {product_gflops:.1f}"
    )
    if other is not None:
        line += "; {maxtext:.3f} of MaxText's ({maxtext_low:.3f} to {maxtext_high:.3f})"
    sys.stdout.write(f"{json.dumps(result) if arguments.json else line.format(**result)}\n")


def measure(arguments: argparse.Namespace, other: Contestant | None) -> dict[str, Any]:
    """Alternate the steps of all decoders, and return ratios with their spread."""
    ours, plain = built_in(arguments), plain_flax(arguments)
    contestants = [ours, plain, *([] if other is None else [other])]
    if len({each.parameters for each in contestants}) > 1:
        raise SystemExit(
            f"the decoders multiply {[each.parameters for each in contestants]} parameters; make them equal"
        )
    for each in contestants:
        each.cpu_s(1)
    times = [[each.cpu_s(arguments.steps) for each in contestants] for _ in range(arguments.pairs)]
    ratios = [theirs / mine for mine, theirs, *_ in times]
    tokens = arguments.batch_size * arguments.seq_len
    scores = 12 * arguments.layers * tokens * arguments.seq_len * arguments.dim
    flops = 6 * tokens * ours.parameters + scores
    beside = [last / mine for mine, *_, last in times] if other is not None else []
    found = (
        {"maxtext": statistics.median(beside), "maxtext_low": min(beside), "maxtext_high": max(beside)}
        if beside
        else {}
    )
    return {
        "name": "decoders",
        "unit": "tokens per second of the built-in decoder / of a plain one",
        "value": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "runs": arguments.pairs,
        "parameters": ours.parameters,
        "gflops": flops / statistics.median(mine for mine, *_ in times) / 1e9,
        "product_gflops": product_gflops(tokens, arguments.dim),
        **found,
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
    return Contestant(partial(cpu_s, lambda: step(params, state)), size)


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


@contextlib.contextmanager
def max_text(arguments: argparse.Namespace) -> Iterator[Contestant]:
    """Run MaxText's step in its environment, and yield it; SystemExit if MaxText fails."""
    dim = arguments.dim
    values = {
        "hardware": "cpu",
        "skip_jax_distributed_system": "true",
        "base_emb_dim": dim,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": dim // 4,
        "base_mlp_dim": 4 * dim,
        "base_num_decoder_layers": arguments.layers,
        "vocab_size": VOCABULARY,
        "max_target_length": arguments.seq_len,
        "per_device_batch_size": arguments.batch_size,
        "dtype": "float32",
        "weight_dtype": "float32",
        "attention": "dot_product",
        # The other decoders neither recompute activations nor clip gradients, and have no scan over layers.
        "remat_policy": "none",
        "gradient_clipping_threshold": 0,
        "scan_layers": "false",
        "dataset_type": "synthetic",
        "steps": 1_000_000,
        "run_name": "decoders",
        "enable_checkpointing": "false",
        "enable_tensorboard": "false",
        "log_config": "false",
    }
    program = Path(__file__).with_name("_maxtext_decoder.py")
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        words = [f"{key}={value}" for key, value in {**values, "base_output_directory": folder}.items()]
        environment = os.environ | {"DECOUPLE_GCLOUD": "TRUE"}
        process = subprocess.Popen(
            [arguments.maxtext, program, *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        to, answers = process.stdin, process.stdout

        def answer() -> str:
            for line in answers:
                # MaxText prints other lines when it is imported.
                if line.startswith("result "):
                    return line.removeprefix("result ")
            log.seek(0)
            raise SystemExit(f"MaxText failed: {log.read()[-3000:]}")

        def ask(steps: int) -> float:
            to.write(f"{steps}\n")
            to.flush()
            return float(answer())

        try:
            yield Contestant(ask, int(answer()) - VOCABULARY * dim)
        finally:
            to.close()
            process.wait()


if __name__ == "__main__":
    main()
