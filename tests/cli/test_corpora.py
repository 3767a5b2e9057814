"""`diloco tokenize` and `diloco data`: text becomes the samples that a run reads."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.runtime.local.check_input import check_tokenizer
from diloco_jax.settings.text import load
from diloco_jax.training.data.tokenizer import open_tokenizer
from diloco_jax.training.models.config import DECODER, SEEING_DECODER
from tests.extras import absent
from tests.runtime.helpers import ROOT


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} of some words\n" * (5 + number))
    return tmp_path / "texts"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    assert status == 0, said.err
    return json.loads(said.out) if "--json" in words else said.out


def config_of(file: Path, **data: Any) -> Path:
    values = {
        "train": {"steps": 10, "batch_size": 8, "seq_len": 16, "eval_batch_size": 2},
        "optimizer": {"warmup_steps": 2},
        "islands": {"count": 2},
        "model": {"args": {"vocab_size": 280}},
        "data": {"held_out_fraction": 0.2, **data},
    }
    file.write_text(yaml.safe_dump(values))
    return file


def test_texts_become_a_store_that_a_run_reads(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))
    made = call(capsys, "tokenize", texts, "--tokenizer", "train:280", "--out", tmp_path / "out", "--json")
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert (made["documents"], made["bytes"], made["vocab_size"]) == (20, size, 280)
    assert "20 documents" in call(capsys, "tokenize", texts, "--tokenizer", "train:280", "--out", tmp_path / "out")
    assert (made["rows_left_out"], made["documents_replaced"]) == (0, 0)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": null}\n{"text": "\xff"}\n')
    said = call(capsys, "tokenize", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "rows")
    assert "\n1 rows have no text" in said and "\n1 documents have U+FFFD" in said
    store = {"path": str(tmp_path / "out"), "weight": 3.0}
    more = {"path": str(texts), "format": "text", "patterns": ["1*.txt"]}
    how = {"documents": "whole", "tokenizer": str(tmp_path / "out"), "evaluation": {"other": store}}
    config = config_of(tmp_path / "config.yaml", mixture={"all": store, "few": more}, **how)
    read = call(capsys, "data", config, "--json")
    assert read["samples"] == 80 and read["tokens"] == 1280 and [*read["held_out"]] == ["", "all", "few", "other"]
    assert read["sources"]["all"]["share"] == 0.75 and read["sources"]["few"]["documents"] == 11
    epochs = {name: 80 * each["share"] / each["samples_per_epoch"] for name, each in read["sources"].items()}
    assert epochs == pytest.approx({name: each["epochs"] for name, each in read["sources"].items()})
    assert "of some words" in read["first"][0] and "75.0% of the run" in call(capsys, "data", config)
    check_tokenizer(load(config))
    with pytest.raises(ValueError, match=r"vocab_size is 279, but the data's tokenizer has ids below 280"):
        check_tokenizer(load(config, ["--model.args.vocab_size", "279"]))
    call(capsys, "tokenize", texts, "--tokenizer", "train:270", "--out", tmp_path / "weights")
    with pytest.raises(ValueError, match=r"is not that of model.weights '.*--tokenizer"):
        check_tokenizer(load(config, ["--model.weights", str(tmp_path / "weights")]))
    check_tokenizer(load(config, ["--model.weights", str(tmp_path / "out")]))


def test_what_a_run_of_bytes_reads_is_told(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path / "config.yaml", path=str(texts))
    read = call(capsys, "data", config, "--json")
    assert read["held_out"][""]["bytes_per_token"] == 1 and read["sources"][str(texts)]["documents"] is None
    assert "words\ntext" in read["first"][0]


@pytest.mark.slow
def test_a_killed_tokenize_resumes(texts: Path, tmp_path: Path) -> None:
    for number in range(6):
        (texts / f"large{number}.txt").write_text(f"{number} large\n" * 2_000_000)
    words = ["tokenize", str(texts), "--tokenizer", "bytes", "--workers", "2", "--out"]
    command = [sys.executable, "-m", "diloco_jax", *words]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=os.environ)
    with subprocess.Popen([*command, str(tmp_path / "out")], env=os.environ) as process:
        while not [*(tmp_path / "out").glob("part-*.json")]:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*.json")}
    subprocess.run([*command, str(tmp_path / "out")], check=True, env=os.environ)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.name != ".lock"} for name in ("whole", "out")
    )
    assert one == two and kept


def test_a_model_must_know_the_image_tokens_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image", reason=absent("data"))
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    image.new("RGB", (48, 48)).save(folder / "a.png")
    (folder / "a.txt").write_text("black")
    config = tmp_path / "config.yaml"
    config.write_text(f"""
data: {{format: images, path: {folder}, tokenizer: bytes}}
model: {{module: "{SEEING_DECODER}", args: {{vocab_size: 259, image_begin: 256, image_token: 257, image_end: 258}}}}
""")
    check_tokenizer(load(config))
    with pytest.raises(ValueError, match=r"model.args.image_token is 255, but the data has id 257 there; set it so"):
        check_tokenizer(load(config, ["--model.args.image_token", "255"]))
    with pytest.raises(ValueError, match=r"the data has images, but model.module '.*:Decoder' reads only text"):
        check_tokenizer(load(config, ["--model.module", DECODER]))
    with pytest.raises(ValueError, match=r"vocab_size is 258, but the data's tokenizer has ids below 259"):
        check_tokenizer(load(config, ["--model.args.vocab_size", "258"]))


def test_bytes_have_a_tokenizer() -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("ä\n")) == "ä\n" and tokenizer.vocab_size == 256 and not tokenizer.folder


def test_the_page_runs_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(bash|yaml)\n(.*?)```", page, re.DOTALL)
    for kind, text in blocks:
        if kind == "yaml":
            (tmp_path / (text.split()[1] if text.startswith("# ") else "part.yaml")).write_text(text)
            continue
        for line in text.splitlines():
            if line.startswith("diloco "):
                said = call(capsys, *shlex.split(line)[1:])
            else:
                subprocess.run(["bash", "-ec", line], check=True)
    assert [kind for kind, _ in blocks] == ["bash", "yaml", "bash", "yaml", "yaml", "yaml", "bash"]
    assert "code: " in said and "75.0% of the run" in said and "held out tasks: " in said
    load("part.yaml")
    load("pictures.yaml")
