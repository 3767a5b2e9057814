"""Text and its likelihood by a model of a run, against the model's own logits; tasks of lm-eval against a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.inference.language import Language, Writing
from diloco_jax.training.models.protocol import join_model, load_model, split_model
from tests.runtime.helpers import SMALL, merged

CONTEXT = 40
SIZES = {**SMALL["model"]["args"], "seq_len_max": 80}
BUILT_IN = {"module": "diloco_jax.training.models.decoder:Decoder", "args": SIZES}
Likelihood = Callable[[bytes, bytes], tuple[float, bool]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_text("some text of no importance\n" * 2000)
    changes = {"train": {"seq_len": CONTEXT}, "data": {"path": str(text)}}
    return parse(merged(SMALL, {**changes, "model": BUILT_IN}), "the test")


@pytest.fixture(scope="module")
def parameters(config: RunConfig) -> dict[str, np.ndarray]:
    """A model that is sure of what it says: far from the even beginning."""
    rng = np.random.default_rng(3)
    drawn = Evaluator(config).initial_parameters()
    return {path: np.float32(value + 0.2 * rng.normal(size=value.shape)) for path, value in drawn.items()}


@pytest.fixture(scope="module")
def language(config: RunConfig, parameters: dict[str, np.ndarray]) -> Language:
    return Language(config, parameters)


@pytest.fixture(scope="module")
def logits(config: RunConfig, parameters: dict[str, np.ndarray]) -> Callable[[bytes], np.ndarray]:
    """Logits [position, id] of one text, by the model alone."""
    graphdef, _ = split_model(load_model(config.model.module, config.model.args, 0))
    model: Any = join_model(graphdef, {path: jnp.asarray(value) for path, value in parameters.items()})
    program = jax.jit(lambda tokens: model(tokens))

    def of(text: bytes) -> np.ndarray:
        tokens = np.frombuffer(text.ljust(80), np.uint8).astype(np.int32)
        return np.asarray(program(tokens[None]), np.float64)[0, : len(text)]

    return of


@pytest.fixture(scope="module")
def likelihood(logits: Callable[[bytes], np.ndarray]) -> Likelihood:
    def of(given: bytes, asked: bytes) -> tuple[float, bool]:
        text = (given + asked)[-CONTEXT - 1 :]
        rows = logits(text[:-1])[-len(asked) :]
        said = rows - np.log(np.exp(rows).sum(1, keepdims=True))
        return said[range(len(asked)), list(asked)].sum(), bytes(rows.argmax(1).tolist()) == asked

    return of


def test_likelihoods_are_those_of_the_logits(
    language: Language, likelihood: Likelihood, logits: Callable[[bytes], np.ndarray]
) -> None:
    sure = bytes([logits(b"def ")[-1].argmax()])
    rows = [(b"a", b"bc"), (b"def ", sure), (b"x" * 70, b"yz"), (b"q" * 20, b"r" * 15)] * 6  # two calls, two lengths
    found = language.likelihoods([(list(given), list(asked)) for given, asked in rows])
    expected = [likelihood(given, asked) for given, asked in rows]
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in expected], rtol=1e-4)
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    assert found[1][1] and not found[2][1]
    with pytest.raises(ValueError, match=r"41 tokens are to be judged at once; the model sees 40"):
        language.likelihoods([([1], [2] * 41)])


def test_the_likeliest_text_is_that_of_the_logits(language: Language, logits: Callable[[bytes], np.ndarray]) -> None:
    text = b"def "
    for _ in range(34):
        text += bytes([logits(text)[-1].argmax()])
    written = "".join(language.write("def ", 34, Writing()))
    assert written == text[4:].replace(b"\0", b"").decode(errors="replace") and len(written) > 5


def test_draws_follow_the_seed(language: Language) -> None:
    def text(seed: int, top_p: float = 1.0) -> str:
        return "".join(language.write("x", 60, Writing(2.0, top_p, seed)))

    assert text(0) == text(0) != text(1)
    assert text(0, top_p=1e-6) == text(1, top_p=1e-6) == "".join(language.write("x", 60, Writing()))
    with pytest.raises(ValueError, match="the prompt has no token"):
        text = "".join(language.write("", 3, Writing()))


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


# ---- tasks ----------------------------------------------------------------------------------------------------------

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: questions.jsonl, cache_dir: cache}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
{more}
"""
SUMS = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["~"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TEXTS = """
doc_to_target: "{{long}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


def test_scores_of_local_tasks(
    tmp_path: Path, language: Language, likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from diloco_jax.tools.inference.harness import ask_tasks

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [
        {"question": f"{a} and {b} is ", "choices": [str(a + b), str(abs(a - b)), "2"], "right": (a * b) % 3}
        for a in range(1, 5)
        for b in range(5)
    ]
    for row in rows[:-3]:
        row["answer"] = "".join(language.write(row["question"], 5, Writing())).split("~")[0]
    for row in rows:
        row.setdefault("answer", "no")
        row["long"] = row["question"] * 5  # of several windows
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, more in (
        ("sums", "multiple_choice", SUMS),
        ("answers", "generate_until", ANSWERS),
        ("texts", "loglikelihood_rolling", TEXTS),
    ):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, more=more))
    scores = ask_tasks(language, ["sums", "answers", "texts"], tmp_path, None)
    chosen = [
        max(range(3), key=lambda i: likelihood(row["question"].rstrip().encode(), f" {row['choices'][i]}".encode())[0])
        for row in rows
    ]
    assert scores["sums"]["acc"] == np.mean([at == row["right"] for at, row in zip(chosen, rows, strict=True)])
    assert scores["sums"]["acc_stderr"] > 0
    assert scores["answers"]["exact_match"] == pytest.approx(17 / 20)
    nats = 0.0
    for text in (b"\0" + row["long"].encode() for row in rows):
        for end in range(1, len(text), CONTEXT):
            window = text[max(0, min(end + CONTEXT, len(text)) - CONTEXT - 1) : end + CONTEXT]
            nats -= likelihood(window[: -len(text[end : end + CONTEXT])], text[end : end + CONTEXT])[0]
    size = sum(len(row["long"]) for row in rows)
    assert scores["texts"]["bits_per_byte"] == pytest.approx(nats / size / np.log(2), rel=1e-4)
    assert ask_tasks(language, ["sums"], tmp_path, 1)["sums"]["acc"] in (0.0, 1.0)
    (tmp_path / "sums.yaml").write_text(TASK.format(name="sums", kind="multiple_choice", more="doc_to_choice: '{{'"))
    with pytest.raises(ValueError, match=r"tasks sums cannot be asked"):
        ask_tasks(language, ["sums"], tmp_path, None)
