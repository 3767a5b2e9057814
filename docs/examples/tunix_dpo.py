"""google-tunix: its DPOTrainer as an island of a run, on the pairs of dpo_loop.py.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/tunix_dpo.py

A small Qwen3 learns which of two answers is preferred. Its initial parameters are the reference, which is not
exchanged. Lines that end with `# island` make the trainer an island.
"""

from __future__ import annotations

import numpy as np
import optax
from dpo_loop import BATCH, BETA, HELD_OUT, TRAIN, WORD, pairs
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

import diloco_jax.tunix  # island

SMALL = ModelConfig(
    num_layers=1,
    vocab_size=256,
    embed_dim=32,
    hidden_dim=64,
    num_heads=2,
    head_dim=16,
    num_kv_heads=1,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)


def load(positions: np.ndarray) -> TrainingInput:
    """Return the pairs at these positions of the run's order."""
    chosen, rejected = pairs(positions % len(TRAIN))
    return split(chosen, rejected)


def split(chosen: np.ndarray, rejected: np.ndarray) -> TrainingInput:
    """Return pairs as tunix reads them: question and answers apart, nothing padded."""
    question, chosen, rejected = chosen[:, : WORD + 1], chosen[:, WORD + 1 :], rejected[:, WORD + 1 :]
    return TrainingInput(
        prompt_ids=question,
        prompt_mask=np.ones_like(question),
        chosen_ids=chosen,
        chosen_mask=np.ones_like(chosen),
        rejected_ids=rejected,
        rejected_mask=np.ones_like(rejected),
    )


def train() -> None:
    """Train until the run is over, and write the global model to ISLAND.npz."""
    # In practice load the same files into both; every start on every island must have the same reference.
    model, reference = (Qwen3(SMALL, rngs=nnx.Rngs(0)) for _ in range(2))
    config = DPOTrainingConfig(eval_every_n_steps=1000, beta=BETA)
    trainer = DPOTrainer(model, reference, optax.adam(1e-3), config)
    eval_ds = [split(*pairs(HELD_OUT))]
    sizes = {"samples_per_step": BATCH, "tokens_per_step": 2 * BATCH * WORD}  # island
    with diloco_jax.tunix.attach(trainer, eval_ds=eval_ds, **sizes) as island:  # island
        trainer.train(island.batches(load))  # island
        np.savez(f"{island.name}.npz", **island.global_params())


if __name__ == "__main__":
    train()
