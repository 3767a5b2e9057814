"""Models and settings of MaxText with other trees or other steps: two islands each, and MaxText's own evaluation."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.maxtext.environment import corpus, maxtext_python, words
from tests.adapters.maxtext.runs import rows, score_in_maxtext, train

pytestmark = [pytest.mark.trainers, pytest.mark.net]
ROUNDS: dict[str, Any] = {"train": {"steps": 120, "eval_every": 30}}
EXPERTS = {
    "num_experts": "4",
    "base_moe_mlp_dim": "128",
    "num_experts_per_tok": "2",
    "sparse_matmul": "false",
    "megablox": "false",
}
CASES: dict[str, dict[str, str]] = {
    "gemma2": {"decoder_block": "gemma2", "use_post_attn_norm": "true", "use_post_ffw_norm": "true"},
    "qwen3": {"decoder_block": "qwen3", "use_qk_norm": "true"},
    "gpt3": {"decoder_block": "gpt3"},
    "mixtral": {"decoder_block": "mixtral", **EXPERTS},
    "accumulation": {"gradient_accumulation_steps": "2"},
    "layers-apart": {"scan_layers": "false"},
    "fsdp": {"ici_fsdp_parallelism": "2"},
}


@pytest.mark.parametrize("name", CASES)
def test_islands_learn_and_maxtext_reads_their_model(name: str, tmp_path: Path) -> None:
    python = maxtext_python()
    arguments = words(corpus(python), tmp_path / "outputs", per_device_batch_size="8", **CASES[name])
    changes = {**ROUNDS, "islands": {"devices": 2}} if name == "fsdp" else ROUNDS
    run_dir = train(tmp_path, [python, "-m", "diloco_jax.maxtext", *arguments], changes)
    scores = [row["loss"] for row in rows(run_dir, "eval")]
    assert scores[-1] < scores[0] - 0.3, scores
    assert {member for row in rows(run_dir, "merged") for member in row["members"]} == {"island-0", "island-1"}
    # MaxText evaluates on one device here, which gets the batch of two. It prints three decimals.
    changed = {
        "ici_fsdp_parallelism=2": "ici_fsdp_parallelism=1",
        "per_device_batch_size=8": "per_device_batch_size=16",
    }
    on_one = [changed.get(word, word) for word in arguments] if name == "fsdp" else arguments
    assert abs(score_in_maxtext(python, run_dir, on_one, tmp_path) - scores[-1]) < 2e-3
