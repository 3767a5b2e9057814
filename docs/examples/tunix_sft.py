"""google-tunix: its PeftTrainer as an island of a run, for full fine-tuning and for LoRA.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/tunix_sft.py [RUN]

Without RUN all parameters of a small Qwen3 are trained on the source of Python's standard library. With RUN, the folder
of such a run, its model is the frozen base of LoRA adapters, which learn the English of Python's manual. Lines that end
with `# island` make the trainer an island.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

import diloco_jax.tunix  # island
from diloco_jax.runtime.records.checkpoint import complete, load_parameters

BATCH, LENGTH, RANK = 16, 64, 8
LIBRARY = Path(os.__file__).parent
SMALL = ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)


def read(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of files: those to train on, and the last 8 KiB, which are held out."""
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return text[:-8192], text[-8192:]


def windows(text: np.ndarray, starts: np.ndarray) -> TrainingInput:
    """Return the windows of a text at these starts."""
    tokens = text[starts[:, None] + np.arange(LENGTH)].astype(np.int32)
    return TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def inputs(batch: TrainingInput) -> dict[str, Any]:
    """Return the arguments of the trainer's loss function."""
    mask = batch.input_mask
    attention = {"positions": build_positions_from_mask(mask), "attention_mask": make_causal_attn_mask(mask)}
    return {"input_tokens": batch.input_tokens, "input_mask": mask, **attention}


def with_adapters(model: Qwen3, run: str) -> Qwen3:
    """Give a model the parameters of a run's newest snapshot, and then LoRA adapters."""
    values, _ = load_parameters(complete(Path(run) / "checkpoints")[0])
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf.set_value(values["/".join(map(str, path))])
    # qwix 0.1.8 gives adapters of an nnx.Linear, such as gate_proj, no gradient.
    provider = qwix.LoraProvider(module_path=".*(q_proj|kv_proj|o_proj)", rank=RANK, alpha=2 * RANK)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())


def train(run: str | None = None) -> None:
    """Train until the run is over, and write the trained parameters to ISLAND.npz."""
    model = Qwen3(SMALL, rngs=nnx.Rngs(0))
    model = model if run is None else with_adapters(model, run)
    files = sorted(LIBRARY.glob("*.py")) if run is None else [LIBRARY / "pydoc_data" / "topics.py"]
    text, held_out = read(files)
    trainer = PeftTrainer(model, optax.adamw(3e-3), TrainingConfig(eval_every_n_steps=1000))
    trainer = trainer.with_gen_model_input_fn(inputs)
    eval_ds = [windows(held_out, np.arange(64) * 127)]

    def load(positions: np.ndarray) -> TrainingInput:
        return windows(text, positions * 1_000_003 % (len(text) - LENGTH))

    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.tunix.attach(trainer, eval_ds=eval_ds, **sizes) as island:  # island
        trainer.train(island.batches(load))  # island
        np.savez(f"{island.name}.npz", **island.global_params())
    print(f"{island.name}: {trainer.train_steps} updates in this process, {trainer.optimizer.step[...]} in all")


if __name__ == "__main__":
    train(*sys.argv[1:])
