"""Conversations with a model from a public folder: its loss is that of transformers, and it answers in its template."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_jax.cli import main as cli
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.inference.chat import Chat, first_prompt
from diloco_jax.tools.inference.writer import Writing
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import eval_batches
from diloco_jax.training.data.tokenizer import open_tokenizer
from tests.tools.export.folders import model_of, public
from tests.training.chat.templates import LINES, said, write_tokenizer

SEQ_LEN = 60


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: None) -> Path:
    """The config of a run that would fine-tune a tiny public model."""
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))
    folder = write_tokenizer(tmp_path / "model", LINES)
    public(folder, model_of("qwen3"))
    rows = [[said("user", f"q{number}"), said("assistant", f"a {number}.")] * (1 + number % 2) for number in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    base = {
        "data": {"format": "chat", "path": str(tmp_path / "chat.jsonl"), "held_out_fraction": 0.2},
        "train": {"seq_len": SEQ_LEN, "eval_batch_size": 2},
    }
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    out = tmp_path / "tuned.yaml"
    assert cli.main(["import", str(folder), "--config", str(tmp_path / "base.yaml"), "--out", str(out)]) == 0
    return out


def loss_of_theirs(config: RunConfig) -> tuple[float, int]:
    """Compute the mean loss of transformers on the assistant's turns, each conversation by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(config.model.weights, attn_implementation="eager").eval()
    total, count = 0.0, 0
    for batch in eval_batches(load_source(config.data, SEQ_LEN), 2, 100):
        for tokens, segments, weights in zip(*(batch[name] for name in ("tokens", "segments", "weights")), strict=True):
            for number in range(1, segments.max() + 1):
                ids, used = (torch.tensor(x[segments == number]) for x in (tokens.astype(np.int64), weights))
                labels = torch.where(used > 0, ids, -100)
                with torch.no_grad():
                    loss = theirs(ids[None], labels=labels[None]).loss
                total += float(loss) * int((labels[1:] >= 0).sum())
                count += int((labels[1:] >= 0).sum())
    return total / count, count


@pytest.mark.extra("parity")
def test_the_loss_on_answers_is_that_of_transformers(config: Path) -> None:
    ours = load(str(config))
    evaluator = Evaluator(ours)
    found = evaluator.evaluate(dict(evaluator.initial_parameters()), 100)
    loss, count = loss_of_theirs(ours)
    assert found["tokens"] == count > 50
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_an_answer_continues_the_conversation(tmp_path: Path) -> None:
    asked: list[str] = []
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, LINES))

    def write(ids: list[int], count: int, how: Writing) -> Any:
        asked.append(tokenizer.decode(ids))
        return iter(["Yes", ", sir"])

    language: Any = SimpleNamespace(tokenizer=tokenizer, write=write, context=100)
    chat = Chat(language, "Be polite.")
    assert list(chat.answer("Hi", 9, Writing())) == ["Yes", ", sir"]
    assert "".join(chat.answer("So?", 9, Writing())) == "Yes, sir"
    first = "<|begin|>system\nBe polite.<|stop|>\n<|begin|>user\nHi<|stop|>\n<|begin|>assistant\n"
    assert asked == [first, f"{first}Yes, sir<|stop|>\n<|begin|>user\nSo?<|stop|>\n<|begin|>assistant\n"]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]
    # The oldest turns leave if the context is full.
    language.context = 70
    assert "".join(chat.answer("Why?", 9, Writing())) == "Yes, sir"
    system = first[: first.index("<|begin|>user")]
    assert asked[2] == f"{system}<|begin|>user\nWhy?<|stop|>\n<|begin|>assistant\n"


def test_the_command_talks(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["sample", str(config), "--chat", "--tokens", "3", "--temperature", "0"]
    assert cli.main([*words, "--prompt", "Hi", "--prompt", "So?", "--json"]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [message["content"] for message in messages[::2]] == ["Hi", "So?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nSo?\n"))
    assert cli.main(words) == 0
    # A model that nobody trained may write anything; the terminal gets what it can show.
    answers = "".join(message["content"] + "\n" for message in messages[1::2])
    assert capsys.readouterr().out == "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in answers)
    prompt = open_tokenizer(config.parent / "model").decode(first_prompt(load(str(config))))
    assert prompt.startswith("<|begin|>user\nq") and prompt.endswith("<|begin|>assistant\n")
