"""Exports of a run with adapters: PEFT loads the adapters, and transformers the merged model, with the run's logits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from diloco_jax.cli.main import main
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import load_parameters, newest_readable
from diloco_jax.runtime.records.files import CHECKPOINTS
from diloco_jax.settings.text import load
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.models.config import LoraConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from tests.tools.export.folders import make_run, model_of, public
from tests.training.chat.templates import LINES, SPECIAL, said, write_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 300, (2, 48)).astype(np.int32)
# The family, whether layers are stacked, and the targets.
CASES = [
    ("llama", False, ("all",)),
    ("qwen3", True, ("q", "v", "down")),
    ("gemma3_text", True, ("all",)),
    ("mixtral", False, ("q", "k", "v", "out")),
]


def run_with_adapters(folder: Path, family: str, stacked: bool, targets: tuple[str, ...]) -> Path:
    """The folder of a run whose adapters are drawn, above a public model in `folder`/public."""
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    model = replace(public(folder / "public", model_of(family, scan_layers=stacked)), lora=lora)
    blueprint = Blueprint(model, OptimizerConfig(), MeshConfig(), 1, seed=0)
    rng = np.random.default_rng(5)
    values = {path: rng.normal(0, 0.3, shape).astype(np.float32) for path, shape in blueprint.shapes.items()}
    return make_run(folder / "run", model, values, train={"seq_len": 32})


def export(run: Path, out: Path, *words: str) -> int:
    return main(["export", str(run), "--out", str(out), *words])


def logits_of_run(run: Path) -> np.ndarray:
    """What `diloco sample` and `eval` compute with."""
    evaluator = Evaluator(load(run / "config.yaml"))
    found = newest_readable(run / CHECKPOINTS, load_parameters)
    assert found is not None
    params, other = evaluator.place(found[1][0])
    model: Any = lambda tokens: evaluator.model(params, other)(tokens)  # type: ignore[operator]  # noqa: E731
    return np.asarray(jax.jit(model)(jnp.asarray(TOKENS)))


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max())


@pytest.mark.extra("parity")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("family", "stacked", "targets"), CASES)
def test_peft_and_transformers_compute_what_the_run_does(
    tmp_path: Path, family: str, stacked: bool, targets: tuple[str, ...]
) -> None:
    import peft
    import torch
    import transformers

    run = run_with_adapters(tmp_path, family, stacked, targets)
    assert export(run, tmp_path / "adapter") == 0 and export(run, tmp_path / "merged", "--merged") == 0
    ours, how = logits_of_run(run), {"dtype": torch.float32, "attn_implementation": "eager"}

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "public", **how)
    alone = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    whole = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **how))
    assert np.abs(adapted - alone).max() > 0.1 * np.abs(alone).max(), "the adapters change something"
    assert close(ours, adapted) and close(ours, whole)


def test_the_files_of_an_adapter_and_of_a_merged_model(tmp_path: Path) -> None:
    run = run_with_adapters(tmp_path, "qwen3", True, ("q", "down"))
    assert export(run, tmp_path / "adapter", "--dtype", "bfloat16") == 0
    assert export(run, tmp_path / "merged", "--merged", "--format", "npz") == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["lora_alpha"] == 5.0 and config["base_model_name_or_path"].endswith("public")
    assert sorted(config["target_modules"]) == ["mlp.down_proj", "self_attn.q_proj"]
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == 2 * 2 * 2, "two matrices of two targets in two layers"
    first = written["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert first.shape == (3, 48) and first.dtype.name == "bfloat16"
    found = newest_readable(run / CHECKPOINTS, load_parameters)
    assert found is not None
    adapters, merged = found[1][0], np.load(tmp_path / "merged" / "parameters.npz")
    theirs = dict(Weights(tmp_path / "public").read(load(run / "config.yaml").model))
    assert sorted(merged) == sorted(theirs)
    a, b = (adapters[f"blocks/q/adapter/{one}"].astype(np.float64) for one in "ab")
    expected = theirs["blocks/q/kernel"] + 5 / 3 * np.stack([a[layer] @ b[layer] for layer in range(2)])
    np.testing.assert_allclose(merged["blocks/q/kernel"], expected, atol=1e-6)
    assert (merged["blocks/v/kernel"] == theirs["blocks/v/kernel"]).all()


def test_a_damaged_file_beside_the_weights_is_named_and_the_snapshot_is_not_blamed_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with_adapters(tmp_path, "qwen3", True, ("q",))
    (tmp_path / "public" / "tokenizer.json").write_text("{}")
    assert export(run, tmp_path / "adapter") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "run has no snapshot that can be exported; step_00000007, the newest one: " in said
    assert "public/tokenizer.json is damaged" in said and not (tmp_path / "adapter").exists()


def test_adapters_come_with_what_a_merged_model_has_to_write_replies(tmp_path: Path) -> None:
    """Same tokenizer, template and ends of turns; without config.json, because transformers would expect a model."""
    run = run_with_adapters(tmp_path, "qwen3", True, ("q",))
    # The tokenizer of a base model ends documents with another token than its template ends turns.
    write_tokenizer(tmp_path / "public", LINES, end="</s>")
    rows = [{"messages": [said("user", f"q{n}"), said("assistant", f"a {n}.")]} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"] = {"format": "chat", "path": str(tmp_path / "chat.jsonl"), "tokenizer": str(tmp_path / "public")}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert export(run, tmp_path / "adapter") == 0 and export(run, tmp_path / "merged", "--merged") == 0
    adapter, merged = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("adapter", "merged")
    )
    assert merged.keys() - adapter.keys() == {"config.json", "model.safetensors"}
    assert adapter.keys() - merged.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    shared = adapter.keys() & merged.keys()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < shared
    assert all(adapter[name] == merged[name] for name in shared)
    ends = json.loads(adapter["generation_config.json"])["eos_token_id"]
    assert [SPECIAL[number] for number in ends] == ["</s>", "<|stop|>"]


def test_merged_needs_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with_adapters(tmp_path, "llama", False, ("q",))
    assert export(run, tmp_path / "out", "--merged", "--format", "orbax") == 2
    plain = model_of("llama")
    assert export(make_run(tmp_path / "plain", plain, {}), tmp_path / "out", "--merged") == 2
    assert capsys.readouterr().err.count("--merged merges the adapters of a run with model.lora") == 2
