"""Public models in: what is wrong with a folder is told before anything trains; a config evaluates what it names."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from diloco_jax.cli.main import main
from diloco_jax.runtime.local.baseline import DataParallelRun
from diloco_jax.runtime.syncer.begin import FAILOVER, begin
from diloco_jax.settings.text import load
from diloco_jax.tools.export import files
from diloco_jax.training.convert import weights
from diloco_jax.training.data.tokenizer import TOKENIZER_FILE, open_tokenizer, train_tokenizer
from diloco_jax.training.models.config import LoraConfig, ModelConfig
from tests.tools.export.folders import drawn, loss_of_theirs, make_run, model_of

TEXT = "".join(f"island {n} sends {n * n} gradients to the syncer\n" for n in range(400))


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.yaml, and below it `llama`: an exported model of several files, with its tokenizer."""
    folder = tmp_path_factory.mktemp("public")
    (folder / "tokenizer").mkdir()
    train_tokenizer([TEXT], 300, folder / "tokenizer")
    ids = open_tokenizer(folder / "tokenizer").encode(TEXT)
    np.array(ids, np.uint16).tofile(folder / "ids.bin")
    data = {"format": "tokens", "path": str(folder / "ids.bin"), "vocab_size": 300}
    data |= {"tokenizer": str(folder / "tokenizer"), "held_out_fraction": 0.2}
    train = {"seq_len": 32, "batch_size": 4, "eval_batch_size": 4, "final_eval_batches": 3}
    config = {"name": "public", "data": data, "train": train, "islands": {"count": 1, "devices": 1}, "trackers": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = make_run(folder / "run", model_of(), drawn(model_of()), **{"data": data})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "SHARD_BYTES", 60_000)
        assert main(["export", str(run), "--out", str(folder / "llama")]) == 0
    return folder


@pytest.mark.extra("parity")
def test_transformers_opens_an_export_and_a_config_evaluates_it(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(public / "llama")
    assert tokenizer.encode(TEXT[:200]) == open_tokenizer(public / "tokenizer").encode(TEXT[:200])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(public / "llama")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 0

    config = tmp_path / "begins.yaml"
    words = ["--config", str(public / "config.yaml"), "--out", str(config), "--json"]
    assert main(["import", str(public / "llama"), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == sum(value.numel() for value in theirs.parameters())
    assert main(["eval", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = load(config)
    assert found["loss"] == pytest.approx(loss_of_theirs(theirs, settings.data, 4, 3), abs=1e-4)

    lora = {"rank": 2, "targets": ["q"]}
    adapted = tmp_path / "adapted.yaml"
    (tmp_path / "base.yaml").write_text(
        yaml.safe_dump(yaml.safe_load((public / "config.yaml").read_text()) | {"model": {"lora": lora}})
    )
    assert main(["import", str(public / "llama"), "--config", str(tmp_path / "base.yaml"), "--out", str(adapted)]) == 0
    assert load(adapted).model == replace(settings.model, lora=LoraConfig(rank=2, targets=("q",)))

    alone = replace(settings, algorithm="data_parallel", train=replace(settings.train, batch_size=8))  # on 8 devices
    run = DataParallelRun(alone, tmp_path, threading.Event())
    begun, values = run._island.parameters(), drawn(model_of())
    assert [path for path in values if values[path].tobytes() != begun[path].tobytes()] == []
    assert main(["train", str(config), "--model.args.mlp_dim", "64", "--run-dir", str(tmp_path / "run")]) == 2
    assert "has shape (32, 48), but the model needs (32, 64)" in capsys.readouterr().err


SINGLE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def described(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(old | changes))

    return change


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes())) and None


def tensors_of(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / SECOND)
        change(found)
        save_file(found, folder / SECOND)

    return rewrite


def retyped(found: dict[str, np.ndarray], dtype: Any, last: float) -> None:
    """Give the first tensor another type, and its last value."""
    name, value = next(iter(found.items()))
    found[name] = value.astype(dtype)
    found[name].reshape(-1)[-1] = last


def only(name: str) -> Callable[[Path], None]:
    """Leave one file in the place of all that have tensors."""

    def change(folder: Path) -> None:
        for path in (*folder.glob("*.safetensors"), folder / weights.INDEX_FILE):
            path.unlink()
        if name:
            (folder / name).write_bytes(b"x")

    return change


def pipe(name: str) -> Callable[[Path], None]:
    """Replace a file by a named pipe, which waits for a writer when it is opened."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


def copy_tensor(folder: Path, name: str) -> None:
    """Put a tensor into the other file as well."""
    first, second = (load_file(folder / file) for file in (FIRST, SECOND))
    first |= {name: (first | second)[name]}
    second |= {name: first[name]}
    save_file(first, folder / FIRST)
    save_file(second, folder / SECOND)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (bytes_of(lambda raw: raw[:-50]), [FIRST, "damaged, or not a safetensors file"]),
        (bytes_of(lambda raw: b"\xff" * 8 + raw[8:]), [FIRST, "damaged, or not a safetensors file"]),
        (pipe(FIRST), [FIRST, "it is a named pipe, and not a regular file"]),
        (pipe("config.json"), ["config.json cannot be read: it is a named pipe"]),
        (pipe(TOKENIZER_FILE), [f"{TOKENIZER_FILE} is damaged: it is a named pipe"]),
        (lambda folder: (folder / FIRST).unlink(), ["lacks 1 of 2 files", FIRST]),
        (lambda folder: (folder / weights.INDEX_FILE).unlink(), ["has 2 *.safetensors", "copy the whole model"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json cannot be read", "No such file"]),
        (lambda folder: (folder / weights.INDEX_FILE).write_text("[]"), ["a list instead of an object"]),
        (described(model_type="bert"), ["model_type is 'bert'", "llama"]),
        (described(intermediate_size=64), ["has shape (32, 48), but the model needs (32, 64)"]),
        (described(num_hidden_layers=1), ["model.layers.1", "but the model needs none"]),
        (tensors_of(dict.popitem), ["has shape none at all", "1 of 20 tensors are missing"]),
        (tensors_of(lambda found: next(iter(found.values())).fill(np.nan)), [SECOND, "holds NaN or infinity"]),
        (tensors_of(lambda found: retyped(found, ml_dtypes.bfloat16, np.nan)), [SECOND, "holds NaN or infinity"]),
        (tensors_of(lambda found: retyped(found, np.float16, -np.inf)), [SECOND, "holds NaN or infinity"]),
        (tensors_of(lambda found: found.update(x=np.ones(3, np.int64))), ["tensor x", "is I64; only F32"]),
        (lambda folder: train_tokenizer([TEXT], 310, folder), ["has ids below 310, config.json only 300"]),
        (lambda folder: shutil.rmtree(folder), ["config.json cannot be read", "public model"]),
        (described(is_causal=False), ["is_causal is False"]),
        (described(residual_scale=0.5, **{"a\x1b[2J": 1}), ["unknown keys: a\\x1b[2J, residual_scale; remove them"]),
        (described(**{f"key{n:02}": n for n in range(20)}), ["key00", "key07 and 12 more"]),
        (described(hidden_size="32"), ["hidden_size is '32'; it must be a whole number of at least 1"]),
        (described(num_attention_heads=True), ["num_attention_heads is True; it must be a whole number"]),
        (described(rms_norm_eps=float("nan")), ["rms_norm_eps is nan; it must be a finite number"]),
        (described(rope_scaling=[1]), ["rope_scaling is [1]; it must be an object"]),
        (described(rope_scaling={"rope_type": ["yarn"]}), ["rope_type is ['yarn']; the decoder has default"]),
        (described(rope_scaling={"rope_type": "llama3"}), ["config.json of llama lacks 'factor'"]),
        (
            described(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0}),
            ["'yarn' differ; remove type"],
        ),
        (described(rope_scaling={"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}), ["mrope_section"]),
        (described(layer_types=["sliding_attention"] * 2), ["layer_types are sliding_attention", "remove them"]),
        (described(tie_word_embeddings=None), ["config.json of llama lacks 'tie_word_embeddings'"]),
        (only("pytorch_model.bin"), ["has its tensors in pytorch_model.bin", "save it with save_pretrained"]),
        (only("adapter_model.safetensors"), ["has only an adapter; merge it into its model"]),
        (only(""), ["has 0 *.safetensors", "copy the whole model"]),
        (both(described(model_type="gpt2"), only("pytorch_model.bin")), ["model_type is 'gpt2'"]),
        (
            both(described(model_type="bert"), tensors_of(lambda found: found.update(x=np.ones(3, np.int64)))),
            ["model_type is 'bert'"],
        ),
        (
            lambda folder: copy_tensor(folder, "model.norm.weight"),
            ["tensor model.norm.weight of", "is also in", "remove one of the two files"],
        ),
    ],
)
def test_a_wrong_folder_is_one_error(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], words: list[str]
) -> None:
    folder, out = tmp_path / "llama", tmp_path / "config.yaml"
    shutil.copytree(public / "llama", folder)
    spoil(folder)
    assert main(["import", str(folder), "--config", str(public / "config.yaml"), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == [], said
    assert said.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_values_of_each_type_are_finite(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """And a check yields the sizes of the parameters that are read."""
    monkeypatch.setattr(weights, "CHECKED_BYTES", 64)
    shutil.copytree(public / "llama", tmp_path / "llama")
    tensors_of(lambda found: retyped(found, dtype, float(ml_dtypes.finfo(dtype).min)))(tmp_path / "llama")
    folder, model = weights.Weights(tmp_path / "llama"), model_of()
    assert list(folder.check_values(model)) == [value.size for _, value in folder.read(model)]


def test_what_an_export_could_not_write_is_refused(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run is made from it."""

    def refused(*_: Any) -> dict[str, Any]:
        raise ValueError("model.args.x is 1, but models of llama in transformers have 2")

    monkeypatch.setattr(files, "to_hf", refused)
    assert main(["import", str(public / "llama"), "--out", str(tmp_path / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert "could not be exported for transformers (model.args.x is 1, but models of llama" in " ".join(said.split())
    assert not (tmp_path / "config.yaml").exists()


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_model_safetensors_is_preferred_and_names_of_a_base_model_are_read(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: other files beside model.safetensors, and an index, are not looked at."""
    folder, values = tmp_path / "llama", drawn(model_of())
    shutil.copytree(public / "llama", folder)
    (folder / "consolidated.safetensors").write_bytes(b"nothing")
    (folder / FIRST).write_bytes(b"nothing")
    save_file({n.removeprefix("model."): v for n, v in all_tensors(public / "llama").items()}, folder / SINGLE)
    found = weights.Weights(folder)
    read = dict(found.read(found.model()))
    assert [path for path in values if values[path].tobytes() != read[path].tobytes()] == []
    (told,) = caplog.messages
    assert f"{SINGLE} beside {weights.INDEX_FILE}; as in transformers, only {SINGLE} is read; remove the one" in told


@pytest.mark.parametrize(("factor", "tied"), [(1.0, True), (2.0, False)])
def test_a_head_that_differs_is_not_tied_and_comes_out_again(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, factor: float, tied: bool
) -> None:
    folder, config, out = tmp_path / "llama", tmp_path / "config.yaml", tmp_path / "out"
    shutil.copytree(public / "llama", folder)
    tensors = all_tensors(folder)
    tensors[weights.HEAD] = factor * tensors[weights.EMBEDDING]
    save_file(tensors, folder / SINGLE)
    (folder / weights.INDEX_FILE).unlink()
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert main(["import", str(folder), "--config", str(public / "config.yaml"), "--out", str(config)]) == 0
    model = load(config).model
    assert model.args.get("tie_embeddings", True) is tied and not caplog.records
    run = make_run(tmp_path / "run", model, dict(weights.Weights(folder).read(model)))
    assert main(["export", str(run), "--out", str(out)]) == 0
    found = all_tensors(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
    assert (weights.HEAD in found) is not tied
    assert [name for name, value in found.items() if value.tobytes() != tensors[name].tobytes()] == []
    weights.Weights(folder).check(model_of())
    assert ("the head is not read" in caplog.text) is not tied


def test_a_folder_without_a_tokenizer_for_text_is_told(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(public / "llama", tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert main(["import", str(tmp_path / "llama"), "--out", str(tmp_path / "config.yaml")]) == 2
    assert "llama has no tokenizer.json, and text needs one" in capsys.readouterr().err


def test_adapters_of_unknown_linear_maps_are_refused_by_the_import(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load((public / "config.yaml").read_text())
    values["model"] = {"lora": {"rank": 2, "targets": ["q_proj"]}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values))
    words = ["--config", str(tmp_path / "base.yaml"), "--out", str(tmp_path / "config.yaml")]
    assert main(["import", str(public / "llama"), *words]) == 2
    assert "model.lora.targets names 'q_proj', which is not a linear map" in capsys.readouterr().err
    assert not (tmp_path / "config.yaml").exists()


def test_a_run_resumes_with_the_values_that_it_started_with(tmp_path: Path) -> None:
    """The folder may have moved; then only its contents tell."""
    (tmp_path / "tape.jsonl").write_text('["begin",0.0,[11,12]]\n')
    config = SimpleNamespace(model=ModelConfig(weights="elsewhere"))
    parts: Any = SimpleNamespace(config=config, run_dir=tmp_path, model=SimpleNamespace(digests=[11, 13]))
    with pytest.raises(ValueError, match=r"model\.weights elsewhere holds other values than this run started with"):
        begin(parts, tuple, FAILOVER, 0.0)
