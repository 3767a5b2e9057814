"""Models out and in again: equal bytes, whole folders or none, whatever happens while they are written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml

from diloco_jax.cli import inference
from diloco_jax.cli.main import main
from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.export.files import ModelWriter
from diloco_jax.training.convert import weights
from diloco_jax.training.convert.families import from_hf, to_hf
from diloco_jax.training.convert.table import FAMILIES
from diloco_jax.training.data.documents import TextSource
from diloco_jax.training.data.tokenizer import train_tokenizer
from diloco_jax.training.data.tokenizing import build_store
from diloco_jax.training.models.config import ModelConfig
from tests.tools.export.folders import drawn, make_run, model_of


def export(run: Path, out: Path, *words: str) -> int:
    return main(["export", str(run), "--out", str(out), *words])


def same(ours: Any, theirs: Any) -> None:
    assert sorted(ours) == sorted(theirs)
    assert [path for path in ours if ours[path].tobytes() != theirs[path].tobytes()] == []


def check_folder(folder: Path, model: ModelConfig, values: dict[str, np.ndarray]) -> None:
    """Check that a folder gives a model and its values back."""
    found = weights.Weights(folder)
    same(dict(found.read(model)), values)
    public = from_hf(found.config)
    assert to_hf(public) == to_hf(model)
    assert sum(value.size for _, value in found.read(public)) == sum(value.size for value in values.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_comes_back_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(weights, "COPY_BYTES", 1000)
    model = model_of(family)
    values = drawn(model)
    writer = ModelWriter(RunConfig(model=model), "hf", "float32")
    writer.write(tmp_path, sorted(values.items()), len(values), lambda parameters, _: parameters, tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    check_folder(tmp_path, model, values)


@pytest.mark.parametrize(
    ("model", "shard_bytes", "files"),
    [(model_of("qwen3", scan_layers=True), 30_000, 5), (model_of("mixtral", scan_layers=True), 1 << 30, 1)],
)
def test_export_then_import_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelConfig, shard_bytes: int, files: int
) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(weights, "COPY_BYTES", 1000)
    values = drawn(model)
    assert export(make_run(tmp_path / "run", model, values), tmp_path / "out") == 0
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) == files and max(sizes) < max(shard_bytes, 4 * 300 * 32) + 4000
    check_folder(tmp_path / "out", model, values)


OF_WEIGHTS = {
    "generation_config.json": '{"eos_token_id": [0, 7], "temperature": 0.6}',
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": "{}",
    "added_tokens.json": '{"x": 299}',
    "additional_chat_templates/tool.jinja": "{{ tools }}",
}


@pytest.mark.parametrize("where", ["folder", "store", "mixture", "tokens", "another tokenizer"])
def test_an_export_has_the_files_and_ids_of_the_public_model(tmp_path: Path, where: str) -> None:
    """Also if the data's tokenizer is in a store, which has tokenizer.json and its settings only."""
    public, store = tmp_path / "public", tmp_path / "store"
    public.mkdir()
    (tmp_path / "a.txt").write_text("some words\n" * 40)
    train_tokenizer(["some words\n"], 300, public)
    for name, text in OF_WEIGHTS.items():
        (public / name).parent.mkdir(exist_ok=True)
        (public / name).write_text(text)
    begun = to_hf(model_of()) | {"bos_token_id": 3, "eos_token_id": [0, 7], "pad_token_id": 5}
    (public / "config.json").write_text(json.dumps(begun))
    build_store(TextSource(str(tmp_path / "a.txt")), str(public), store, workers=1)
    data: dict[str, Any] = {
        "folder": {"format": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(public)},
        "store": {"format": "store", "path": str(store)},
        "mixture": {"mixture": {"a": {"path": str(store)}, "b": {"path": str(store)}}, "tokenizer": str(store)},
        "tokens": {"format": "tokens", "path": str(tmp_path / "ids"), "vocab_size": 300},
        "another tokenizer": {"format": "store", "path": str(tmp_path / "other"), "tokenizer": str(tmp_path / "other")},
    }[where]
    if where == "another tokenizer":
        (tmp_path / "b.txt").write_text("quite different letters\n" * 40)
        build_store(TextSource(str(tmp_path / "b.txt")), "train:290", tmp_path / "other", workers=1)
    run = make_run(tmp_path / "run", model_of(), drawn(model_of()), data=data)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["weights"] = str(public)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert export(run, tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    found = {name for name in OF_WEIGHTS if (tmp_path / "out" / name).exists()}
    if where == "another tokenizer":
        assert found == {"generation_config.json"} and config["bos_token_id"] is None and config["eos_token_id"] == 0
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 0}
        return
    assert [name for name, text in OF_WEIGHTS.items() if (tmp_path / "out" / name).read_text() != text] == []
    assert [config[f"{token}_token_id"] for token in ("bos", "eos", "pad")] == [3, [0, 7], 5]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (public / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", ["hf", "orbax", "npz"])
def test_an_export_has_the_licence_of_the_model_that_the_run_started_from(tmp_path: Path, form: str) -> None:
    from orbax.checkpoint import v1 as ocp

    (tmp_path / "public").mkdir()
    for name in ("LICENSE", "Notice.txt", "README.md"):
        (tmp_path / "public" / name).write_text(f"the text of {name}")
    model = model_of()
    run = make_run(tmp_path / "run", model, values := drawn(model))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["weights"] = str(tmp_path / "public")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert export(run, tmp_path / "out", "--format", form) == 0
    assert [(tmp_path / "out" / name).read_text()[12:] for name in ("LICENSE", "Notice.txt")] == [
        "LICENSE",
        "Notice.txt",
    ]
    assert not (tmp_path / "out" / "README.md").exists()
    if form == "orbax":
        same(ocp.load(tmp_path / "out"), values)


@pytest.mark.parametrize("begun", ["phi3", "qwen2", ""])
def test_an_export_is_of_the_family_that_the_run_started_from(tmp_path: Path, begun: str) -> None:
    """If the model can be of it; otherwise it is of the first family that fits."""
    model = model_of("llama")
    if begun:
        (tmp_path / "public").mkdir()
        (tmp_path / "public" / "config.json").write_text(json.dumps({**to_hf(model_of(begun)), "model_type": begun}))
    run = make_run(tmp_path / "run", model, values := drawn(model))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["weights"] = str(tmp_path / "public") if begun else ""
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert export(run, tmp_path / "out") == 0
    found = weights.Weights(tmp_path / "out")
    assert found.config["model_type"] == ("phi3" if begun == "phi3" else "llama")
    assert ("model.layers.0.self_attn.qkv_proj.weight" in found.shapes) is (begun == "phi3")
    same(dict(found.read(model)), values)


def test_bfloat16_is_the_nearest(tmp_path: Path) -> None:
    model = model_of()
    values = drawn(model)
    assert export(make_run(tmp_path / "run", model, values), tmp_path / "out", "--dtype", "bfloat16") == 0
    rounded = {path: value.astype(ml_dtypes.bfloat16).astype(np.float32) for path, value in values.items()}
    same(dict(weights.Weights(tmp_path / "out").read(model)), rounded)


def test_any_model_goes_to_orbax_and_npz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from orbax.checkpoint import v1 as ocp

    values = {"a/w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([7]), "none": np.zeros((0, 4), "f4")}
    run = make_run(tmp_path / "run", ModelConfig(module="own"), values)
    assert export(run, tmp_path / "npz", "--format", "npz") == export(run, tmp_path / "orbax", "--format", "orbax") == 0
    with np.load(tmp_path / "npz" / "parameters.npz") as found:
        same(dict(found), values)
    same(ocp.load(tmp_path / "orbax"), values)
    assert export(run, tmp_path / "hf") == 2
    assert "orbax and npz work for any model" in capsys.readouterr().err
    assert export(run, tmp_path / "x", "--format", "npz", "--dtype", "bfloat16") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["npz", "orbax", "run"]


def test_a_folder_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of()
    run, full = make_run(tmp_path / "run", model, drawn(model)), tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    assert export(run, full) == 2
    assert "is not an empty folder" in capsys.readouterr().err and [p.name for p in full.iterdir()] == ["mine"]

    def interrupted(parameters: Any, count: int) -> Iterator[Any]:
        yield next(iter(parameters))
        raise KeyboardInterrupt

    monkeypatch.setattr(inference, "watch_parameters", interrupted)
    for form in ("hf", "orbax", "npz"):
        assert export(run, tmp_path / "out", "--format", form) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]


@pytest.mark.parametrize(("every", "first"), [(50, "at global step 50"), (0, "protocol.snapshot_every is 0")])
def test_a_run_without_a_snapshot_yet_says_when_the_first_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, first: str
) -> None:
    run = make_run(tmp_path / "run", model_of(), {}, protocol={"snapshot_every": every})
    shutil.rmtree(run / "checkpoints")
    assert export(run, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "run has no snapshot yet: the first one is written" in said and first in said


@pytest.mark.parametrize("what", ["damaged", "deleted meanwhile"])
def test_the_newest_readable_snapshot_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A run under way deletes old snapshots, also while one is read; then a newer one is there."""
    model = model_of()
    values = [drawn(model, seed) for seed in (0, 1)]
    first, last = (7, 8) if what == "damaged" else (8, 7)
    run = make_run(tmp_path / "run", model, values[0], first)
    make_run(run, model, values[1], last)
    newest, older = checkpoint.complete(run / "checkpoints")
    if what == "damaged":
        files = [path for path in (newest / "parameters").rglob("0") if path.is_file()]
        file = max(files, key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        complete = checkpoint.complete
        shutil.move(newest, tmp_path / "later")

        def pruned(folder: Path) -> list[Path]:
            found = complete(folder)
            if (tmp_path / "later").exists():
                shutil.rmtree(older)
                shutil.move(tmp_path / "later", newest)
            return found

        monkeypatch.setattr(checkpoint, "complete", pruned)
    assert export(run, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["global_step"] == (7 if what == "damaged" else 8)
    same(dict(weights.Weights(tmp_path / "out").read(model)), values[0])
