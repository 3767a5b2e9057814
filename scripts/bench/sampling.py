"""Measure how fast a Llama-like model of random weights writes text, beside `generate` of transformers, on the CPU.

transformers saves the model, and both programs read the same folder. They write the same number of tokens after the
same prompts, greedily and without an end token, in turn: each pair of texts is a ratio. Loading and the first text,
which compiles, do not count. `value` is the median ratio of tokens per second, `cpu_value` that of tokens per second
of processor time. On a machine with other load use `--threads 1`, because PyTorch's threads wait for each other. A
second result for each batch is the size of the caches over the size computed from the options.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to write")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="texts at once")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of both programs; with more than 1, JAX uses all cores"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    # Both programs read these variables when they are imported.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = save(arguments, Path(folder)), None
        ours = load(arguments, Path(folder))
        for batch in arguments.batch:
            for result in measure(arguments, theirs, ours, batch):
                line = "{name}: {value:.3f} {unit} ({low:.3f} to {high:.3f}, {runs} pairs)"
                more = "; ours {ours:.1f} and theirs {theirs:.1f} tokens/s" if "ours" in result else ""
                more += "; by processor time {cpu_value:.3f}" if "ours" in result else ""
                sys.stdout.write((json.dumps(result) if arguments.json else (line + more).format(**result)) + "\n")
                sys.stdout.flush()


def save(arguments: argparse.Namespace, folder: Path) -> Any:
    """Return a model of transformers with random weights, saved in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    length, heads = arguments.prompt + arguments.tokens, max(1, arguments.dim // 64)
    config = LlamaConfig(
        hidden_size=arguments.dim,
        intermediate_size=arguments.dim * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(length, 32),
        vocab_size=arguments.vocabulary,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def load(arguments: argparse.Namespace, folder: Path) -> Any:
    """Return our writer of the saved model."""
    from diloco_jax.runtime.model.evaluation import RunModel
    from diloco_jax.settings.text import parse
    from diloco_jax.tools.inference.writer import CachedWriter, DeviceModel
    from diloco_jax.training.convert.weights import Weights

    model = Weights(folder).model(False)
    length = arguments.prompt + arguments.tokens
    settings = {
        "model": {"module": model.module, "args": dict(model.args), "weights": str(folder)},
        "data": {"format": "tokens", "path": "none", "vocab_size": arguments.vocabulary},
        "train": {"seq_len": max(length, 32)},
    }
    run_model = RunModel(parse(settings, "the bench"))
    held = DeviceModel(run_model, run_model.place(dict(run_model.initial_parameters())))
    return CachedWriter(held, max(length, 32), arguments.vocabulary, frozenset())


def measure(arguments: argparse.Namespace, theirs: Any, ours: Any, batch: int) -> list[dict[str, Any]]:
    """Write texts with both programs in turn; return the results."""
    import torch

    prompts = np.random.default_rng(1).integers(1, arguments.vocabulary, (batch, arguments.prompt))
    given = torch.from_numpy(prompts)
    count = arguments.tokens
    how = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}

    def write_theirs() -> np.ndarray:
        with torch.inference_mode():
            mask = torch.ones_like(given)
            found: np.ndarray = theirs.generate(given, attention_mask=mask, **how)[:, arguments.prompt :].numpy()
            return found

    def write_ours() -> np.ndarray:
        return ours_of(ours, prompts, count)

    texts = write_theirs(), write_ours()
    # Greedy texts of both programs begin alike; a near tie may separate them later, because sums differ in their order.
    assert (texts[0][:, :2] == texts[1][:, :2]).mean() > 0.5, "the programs write different texts"
    rates: list[tuple[float, float]] = []
    costs: list[float] = []
    for _ in range(arguments.pairs):
        found, cpu_s = [], []
        for write in (write_ours, write_theirs):
            began, cpu_began = time.perf_counter(), time.process_time()
            write()
            found.append(batch * count / (time.perf_counter() - began))
            cpu_s.append(time.process_time() - cpu_began)
        rates.append((found[0], found[1]))
        costs.append(cpu_s[1] / cpu_s[0])
    ratios = [mine / other for mine, other in rates]
    ours_rate, theirs_rate = (statistics.median(column) for column in zip(*rates, strict=True))
    size = cache_sizes(arguments, ours, batch)
    common = {"low": min(ratios), "high": max(ratios), "runs": len(ratios)}
    return [
        {
            "name": f"tokens per second, {batch} texts at once",
            "value": statistics.median(ratios),
            "unit": "of those of transformers",
            **common,
            "cpu_value": statistics.median(costs),
            "cpu_low": min(costs),
            "cpu_high": max(costs),
            "ours": ours_rate,
            "theirs": theirs_rate,
            "equal_tokens": float((texts[0] == texts[1]).mean()),
        },
        {
            "name": f"bytes of the caches, {batch} texts at once",
            "value": size[0] / size[1],
            "unit": "of the computed bytes",
            "low": size[0] / size[1],
            "high": size[0] / size[1],
            "runs": 1,
            "bytes": size[0],
        },
    ]


def ours_of(writer: Any, prompts: np.ndarray, count: int) -> np.ndarray:
    """Return the tokens that our writer adds to prompts."""
    from diloco_jax.tools.inference.writer import Draft
    from diloco_jax.training.models.vocabulary import Drawing

    drafts = [Draft(prompt.tolist(), len(prompt) + count, 0) for prompt in prompts]
    for _ in writer.write(drafts, Drawing()):
        pass
    return np.asarray([draft.ids[prompts.shape[1] :] for draft in drafts])


def cache_sizes(arguments: argparse.Namespace, writer: Any, batch: int) -> tuple[int, int]:
    """Return the bytes of the latest caches, and 2 x layers x texts x slots x width x 4 bytes."""
    from diloco_jax.training.models.block import cache_bytes

    slots = max(arguments.prompt + arguments.tokens, 32)
    return cache_bytes(writer.caches.layers), 8 * arguments.layers * batch * slots * arguments.dim


if __name__ == "__main__":
    main()
