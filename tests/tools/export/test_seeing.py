"""Gemma 4 with its tower: in with --images, out with all its tensors but those of hearing, and adapters of its text."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from diloco_jax.cli.main import main
from diloco_jax.settings.text import load
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.models.config import SEEING_DECODER, LoraConfig, ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from tests.tools.export.folders import make_run, public

# One layer of each kind.
PATTERN = ["local", "global", "local_shared", "global_shared"]
MODEL = ModelConfig(preset="gemma4-e-seeing-tiny", args={"num_layers": len(PATTERN), "pattern": PATTERN})
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Gemma 4 with a tower for audio too, and a config for bytes beside it."""
    place = tmp_path_factory.mktemp("public")
    public(place / "gemma", MODEL)
    tensors = load_file(place / "gemma" / FILE)
    save_file({**tensors, "model.audio_tower.conv.weight": np.ones((2, 3), np.float32)}, place / "gemma" / FILE)
    (place / "text").write_text("some text of no importance\n" * 2000)
    data = {"path": str(place / "text"), "format": "bytes"}
    (place / "config.yaml").write_text(yaml.safe_dump({"name": "public", "data": data, "train": {"seq_len": 32}}))
    return place


def test_a_folder_with_a_tower_returns_with_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(folder / "gemma"), "--config", str(folder / "config.yaml"), "--out"]
    assert main([*words, str(tmp_path / "seeing.yaml"), "--images"]) == 0
    assert main([*words, str(tmp_path / "text.yaml")]) == 0
    seeing, text = (load(tmp_path / name).model for name in ("seeing.yaml", "text.yaml"))
    assert seeing.module == SEEING_DECODER and seeing.args["image_token"] == 2047
    assert text.module == ModelConfig().module and "tower" not in text.args
    values = dict(Weights(folder / "gemma").read(seeing))
    run = make_run(tmp_path / "run", seeing, values, data={"images": {"soft_tokens": 4}})
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    before, after = load_file(folder / "gemma" / FILE), load_file(tmp_path / "out" / FILE)
    assert before.keys() - after.keys() == {"model.audio_tower.conv.weight"}
    assert all(after[name].tobytes() == before[name].tobytes() for name in after)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["model_type"] == "gemma4" and described["vision_config"]["use_clipped_linears"] is True
    # A tensor of the tower that is missing stops the import.
    save_file({name: before[name] for name in before if "embed_vision" not in name}, folder / "gemma" / FILE)
    capsys.readouterr()
    assert main([*words, str(tmp_path / "other.yaml"), "--images"]) == 2
    assert "model.embed_vision.embedding_projection.weight has shape none at all" in capsys.readouterr().err
    save_file(before, folder / "gemma" / FILE)


def test_adapters_are_those_of_the_text(folder: Path, tmp_path: Path) -> None:
    model = replace(MODEL, preset="", weights=str(folder / "gemma"), lora=LoraConfig(rank=2, targets=("q", "down")))
    adapters = Blueprint(model, OptimizerConfig(), MeshConfig(), 1, seed=0).shapes
    values = {path: np.zeros(shape, np.float32) for path, shape in adapters.items()}
    assert values and not [path for path in values if path.startswith("tower/")]
    run = make_run(tmp_path / "run", model, values)
    assert main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    # A tower has maps of the same names, so each map of the text has its whole name.
    names = [
        f"model.language_model.layers.{n}.{each}"
        for n in range(len(PATTERN))
        for each in ("mlp.down_proj", "self_attn.q_proj")
    ]
    assert sorted(described["target_modules"]) == sorted(names)
