"""Text and its likelihood by a model of a run, against the model's own logits; tasks of lm-eval against a few lines."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import yaml

from diloco_jax.cli import main as cli
from diloco_jax.settings.text import parse
from diloco_jax.tools.inference.language import Language
from diloco_jax.tools.inference.writer import Writing
from diloco_jax.training.convert.companions import stop_ids
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.tokenizer import open_tokenizer, train_tokenizer
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.decoder import Decoder
from tests.runtime.helpers import SMALL, merged
from tests.tools.export.folders import model_of, public
from tests.tools.inference.known import Known

CONTEXT = 40
SIZES = {**SMALL["model"]["args"], "seq_len_max": 80, "scan_layers": True}
BUILT_IN = {"module": "diloco_jax.training.models.decoder:Decoder", "args": SIZES}
ASKED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text())


class Text(Known):
    """A model of bytes."""

    def after(self, text: bytes) -> np.ndarray:
        """Return the logits of what follows each byte."""
        return self.logits([*text], CONTEXT)

    def likelihood(self, given: bytes, asked: bytes) -> tuple[float, bool]:
        rows = self.after((given + asked)[-CONTEXT - 1 : -1])[-len(asked) :]
        said = rows - np.log(np.exp(rows).sum(1, keepdims=True))
        return said[range(len(asked)), list(asked)].sum(), bytes(rows.argmax(1).tolist()) == asked


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, quick_compiler: None) -> Text:
    text = tmp_path_factory.mktemp("known") / "text"
    text.write_text("some text of no importance\n" * 2000)
    return Text(merged(SMALL, {"train": {"seq_len": CONTEXT}, "data": {"path": str(text)}, "model": BUILT_IN}))


def test_likelihoods_are_those_of_the_logits(known: Text) -> None:
    sure = bytes([known.after(b"def ")[-1].argmax()])
    # The rows need two calls, of two lengths.
    rows = [(b"a", b"bc"), (b"def ", sure), (b"x" * 70, b"yz"), (b"q" * 20, b"r" * 15)] * 6
    found = known.language.likelihoods([(list(given), list(asked)) for given, asked in rows])
    expected = [known.likelihood(given, asked) for given, asked in rows]
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in expected], rtol=1e-4)
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    assert found[1][1] and not found[2][1]
    with pytest.raises(ValueError, match=r"a row has 41 tokens to judge, but the model sees 40"):
        known.language.likelihoods([([1], [2] * 41)])


def test_what_it_writes_is_likeliest_or_follows_the_seed(known: Text) -> None:
    def text(temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, count: int = 60) -> str:
        return "".join(known.language.write("def ", count, Writing(temperature, top_p, seed)))

    expected = b"def "
    begin = 0
    # The text needs four pieces, and its beginning is cut three times.
    for _ in range(60):
        # A text of more than the context loses its oldest quarter, and begins there.
        if len(expected) - begin > CONTEXT:
            begin = len(expected) - 30
        expected += bytes([known.after(expected[begin:])[-1].argmax()])
    assert b"\0" not in expected and text() == expected[4:].decode(errors="replace")
    assert text(2.0) == text(2.0) != text(2.0, seed=1)
    assert text(2.0, 1e-6) == text(2.0, 1e-6, seed=1) == text()
    with pytest.raises(ValueError, match="the prompt has no token"):
        next(known.language.write("", 3, Writing()))


def test_texts_of_a_batch_are_those_of_each_prompt_alone(known: Text) -> None:
    """Their lengths differ, and each is cut at its own times; the seed and the position decide each draw."""
    prompts = ["a", "some text", "def " * 12, "x" * 39]
    for how in (Writing(), Writing(1.5, 0.9, 3, top_k=20, min_p=0.02)):
        alone = ["".join(known.language.write(prompt, 45, how)) for prompt in prompts]
        assert known.language.write_all(prompts, 45, how) == alone
    stop = alone[1][10:12]
    found = known.language.write_all([list(b"some text"), "a"], 45, how, until=[stop])
    assert found[0] == alone[1][: len(found[0])] and stop in found[0] and alone[0].startswith(found[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"format": "tokens", "path": "IDS"}}, "data.tokenizer"),
        ({"model": {"module": "tests.natural_models:Language", "args": {"vocab_size": 256, "dim": 4}}}, "`generate`"),
    ],
)
def test_a_run_that_cannot_write_says_why(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.zeros(90_000, np.uint16).tofile(tmp_path / "ids")
    settings = json.loads(json.dumps(merged(SMALL, changes)).replace("IDS", str(tmp_path / "ids")))
    with pytest.raises(ValueError, match=message):
        Language(parse(settings, "the test"), {})


def test_without_lm_eval_tasks_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    monkeypatch.delitem(sys.modules, "diloco_jax.tools.inference.harness", raising=False)
    assert cli.main(["eval", "nowhere", "--tasks", "sums"]) == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err


@pytest.mark.extra("eval")
def test_scores_of_local_tasks(tmp_path: Path, known: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_jax.tools.inference.harness import ask_tasks

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows: list[dict[str, Any]] = []
    for a, b in ((a, b) for a in range(1, 5) for b in range(5)):
        choices, question = [str(a + b), str(abs(a - b)), "2"], f"{a} and {b} is "
        answer = "no" if a == 4 else "".join(known.language.write(question, 5, Writing())).split("~")[0]
        rows.append({"question": question, "choices": choices, "right": a * b % 3, "answer": answer})
        rows[-1]["long"] = question * 5  # of several windows
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": "questions.jsonl", "cache_dir": "cache"}}
    common |= {"test_split": "train", "doc_to_text": "{{question}}", "target_delimiter": ""}
    for name, task in ASKED.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    scores = ask_tasks(known.language, list(ASKED), tmp_path, None)

    right, nats, size = 0, 0.0, 0
    for row in rows:
        given, text = row["question"].rstrip().encode(), b"\0" + row["long"].encode()
        chances = [known.likelihood(given, f" {choice}".encode())[0] for choice in row["choices"]]
        right += int(np.argmax(chances)) == row["right"]
        size += len(text) - 1
        for begin in range(1, len(text), CONTEXT):
            asked = text[begin : begin + CONTEXT]
            nats -= known.likelihood(text[max(0, begin + len(asked) - CONTEXT - 1) : begin], asked)[0]
    assert scores["sums"]["acc"] == right / 20 and scores["sums"]["acc_stderr"] > 0
    assert scores["answers"]["exact_match"] == pytest.approx(15 / 20)
    assert scores["texts"] == {"bits_per_byte": pytest.approx(nats / size / np.log(2), rel=1e-4)}
    assert ask_tasks(known.language, ["sums"], tmp_path, 1)["sums"]["acc"] in (0.0, 1.0)
    (tmp_path / "sums.yaml").write_text(json.dumps({"task": "sums", **common, **ASKED["sums"], "doc_to_choice": "{{"}))
    with pytest.raises(ValueError, match=r"tasks sums failed"):
        ask_tasks(known.language, ["sums"], tmp_path, None)


def public_model(folder: Path, single: str = "<s> $A <|endoftext|>") -> Path:
    """A public model whose tokenizer puts tokens around texts; <|endoftext|> has id 0, and <s> id 1."""
    public(folder, model_of())
    train_tokenizer(["some words\n"], 300, folder, ("<s>",))
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<s>", 1), ("<|endoftext|>", 0)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_an_imported_model_writes_without_data_until_any_of_its_end_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt has no token behind it, although the tokenizer ends texts, and may have end tokens within it."""
    folder = public_model(tmp_path / "model")
    words, stop = (open_tokenizer(folder).encode(text, begin=False) for text in (" ok", "!"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, *stop]}))

    def generate(self: Decoder, prompt: jax.Array, count: int, key: jax.Array, *, length: int, **how: Any) -> jax.Array:
        # The last token of the prompt is the first one of the answer.
        return jnp.asarray([*prompt[length - 1][None], *words, *stop, *stop * count])[:count]

    # So it is a model that has only its own `generate`.
    monkeypatch.setattr(Decoder, "prefill", None)
    monkeypatch.setattr(Decoder, "generate", generate)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", "model", "--out", "model.yaml"]) == 0
    capsys.readouterr()
    for prompt in ("def", "<|endoftext|>x"):
        assert cli.main(["sample", "model.yaml", "--prompt", prompt, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == f"{prompt[-1]} ok"
    assert cli.main(["sample", "model.yaml", "--prompt", "def", "--prompt", "x", "--json"]) == 0
    expected = [{"prompt": "def", "text": "f ok"}, {"prompt": "x", "text": "x ok"}]
    assert json.loads(capsys.readouterr().out)["texts"] == expected
    assert cli.main(["sample", "model.yaml", "--prompt", "def", "--prompt", "x", "--top-k", "3"]) == 0
    assert capsys.readouterr().out == "deff ok\n\nxx ok\n"


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"config.json": [5, 6]}, {0, 5, 6}),
        ({"config.json": 5, "generation_config.json": [7, 0]}, {0, 7}),
        ({"config.json": 5, "generation_config.json": None}, {0}),
        ({"config.json": True}, {0}),
    ],
)
def test_end_tokens_are_those_of_transformers(tmp_path: Path, said: dict[str, Any], ends: set[int]) -> None:
    """And that of the tokenizer, which ends documents."""
    train_tokenizer(["some words\n"], 300, tmp_path)
    for name, ids in said.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    model = ModelConfig(weights=str(tmp_path))
    assert stop_ids(model, DataConfig(), open_tokenizer(tmp_path)) == ends
    # Another tokenizer has other ids.
    assert stop_ids(model, DataConfig(), replace(open_tokenizer(tmp_path), digest="another", end=3)) == {3}


@pytest.mark.extra("eval")
@pytest.mark.parametrize("single", ["<s> $A <|endoftext|>", "$A <|endoftext|>", "<s> $A"])
def test_tasks_judge_the_tokens_of_the_answer(tmp_path: Path, single: str) -> None:
    """Also if the tokenizer puts an end token behind every text."""
    from lm_eval.api.instance import Instance

    from diloco_jax.tools.inference.harness import Harness

    rows: list[tuple[list[int], list[int]]] = []
    tokenizer = open_tokenizer(public_model(tmp_path, single))

    def likelihoods(asked: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows.extend(asked)
        return [(0.0, True)] * len(asked)

    language: Any = SimpleNamespace(tokenizer=tokenizer, context=40, likelihoods=likelihoods)
    harness = Harness(language)
    before = [1] if "<s>" in single else []
    given, text = (
        [*before, *tokenizer.made.encode(one, add_special_tokens=False).ids] for one in ("x =", "x = def main")
    )

    def asked(kind: Any, *texts: str) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=texts, idx=0)

    harness.loglikelihood([asked("loglikelihood", "x = ", "def main")])
    harness.loglikelihood_rolling([asked("loglikelihood_rolling", "x = def main")])
    assert rows == [(given, text[len(given) :]), ([0], text)]
    # The settings name no begin token, so the end token is before a text without context, and before one of spaces.
    rows.clear()
    harness.loglikelihood([asked("loglikelihood", "", "x ="), asked("loglikelihood", " ", "x =")])
    assert rows[0] == ([0], text[len(before) :][: len(given) - len(before)])
    assert rows[1][0] == (before or [0])
    with pytest.raises(ValueError, match=r"the answer '' has no separate token after 'x ='"):
        harness.loglikelihood([asked("loglikelihood", "x =", "")])
