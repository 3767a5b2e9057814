"""The evaluator holds the parameters at most once, and never a state of an optimizer."""

import gc
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.training import examiner
from diloco_jax.training.data.corpus import tokenizer_of
from diloco_jax.training.data.tokenizer import train_tokenizer
from diloco_jax.training.island import Island
from diloco_jax.training.models.protocol import load_model
from diloco_jax.training.sharding import MeshConfig
from tests.runtime.helpers import SMALL, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load(write_config(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def evaluator(config: RunConfig) -> Evaluator:
    return Evaluator(config)


@pytest.fixture(scope="module")
def drawn(evaluator: Evaluator) -> dict[str, np.ndarray]:
    return dict(evaluator.initial_parameters())


# The first test of the file: the quick compiler, which others use until its end, might hide a difference.
def test_the_initial_parameters_are_those_of_an_island(config: RunConfig, drawn: dict[str, np.ndarray]) -> None:
    island = Island(
        config.model, config.optimizer, MeshConfig(data=2, fsdp=2), seed=config.seed, devices=jax.devices()[:4]
    )
    expected = island.parameters()
    assert list(drawn) == list(expected)
    for path, value in drawn.items():
        np.testing.assert_array_equal(value, expected[path])


def live_bytes() -> int:
    """Bytes of all arrays that JAX holds."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.usefixtures("quick_compiler")
def test_one_model_at_most_and_no_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(write_config(tmp_path))
    before, during = live_bytes(), list[int]()
    evaluator = Evaluator(config)
    model_bytes = 4 * evaluator.num_parameters
    assert live_bytes() == before, "what is only described takes no memory"
    parameters = dict(evaluator.initial_parameters())
    assert live_bytes() == before

    def watched(*arguments: Any) -> Iterator[np.ndarray]:
        for batch in batches(*arguments):
            during.append(live_bytes() - before)
            yield batch

    batches = examiner.eval_batches
    monkeypatch.setattr(examiner, "eval_batches", watched)
    result = evaluator.evaluate(parameters, 3)
    assert len(during) == 3 and model_bytes <= max(during) < model_bytes + 20_000, "the parameters, and a batch"
    assert live_bytes() == before
    assert 5 < result["loss"] < 6 and result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2))


def test_what_a_syncer_takes_of_it_needs_no_data_of_another_machine(tmp_path: Path) -> None:
    config = load(write_config(tmp_path), ["--data.format", "store", "--data.path", "memory://nobody/has/it"])
    syncer = SyncerRun(config, tmp_path / "run", Event(), Evaluator(config))
    assert dict(syncer._fingerprint)["corpus"] == "", "the first learner says it"
    with pytest.raises(ValueError, match="is not a token store"):
        assert Evaluator(config).corpus


def test_parameters_of_another_model_are_refused(evaluator: Evaluator, drawn: dict[str, np.ndarray]) -> None:
    path = next(iter(drawn))
    with pytest.raises(ValueError, match=r"another model"):
        evaluator.evaluate(drawn | {"extra": np.zeros(2, np.float32)}, 1)
    with pytest.raises(ValueError, match=rf"'{path}' has shape \(3,\)"):
        evaluator.evaluate(drawn | {path: np.zeros(3, np.float32)}, 1)


@pytest.mark.usefixtures("quick_compiler")
def test_each_set_is_measured_by_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))
    texts = {"all": "the cat sat on the mat\n" * 900, "cats": "the cat sat and sat\n" * 90, "dogs": "a dog\n" * 300}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    parts = {name: {"path": str(tmp_path / f"{name}.txt"), "format": "text"} for name in ("cats", "dogs")}
    train_tokenizer(texts.values(), 280, tmp_path)
    data = {"path": str(tmp_path / "all.txt"), "format": "text", "tokenizer": str(tmp_path), "evaluation": parts}
    built_in = {"module": "diloco_jax.training.models.decoder:Decoder"}
    built_in["args"] = {**SMALL["model"]["args"], "vocab_size": 280}
    train = {"seq_len": 16, "eval_batch_size": 2}
    config = load(write_config(tmp_path, data=data, model=built_in, train=train))
    evaluator = Evaluator(config)
    parameters = dict(evaluator.initial_parameters())
    result = evaluator.evaluate(parameters, 1000)
    model: Any = load_model(config.model.module, config.model.args, config.seed)
    tokenizer = tokenizer_of(config.data)
    assert tokenizer is not None
    loss_of = jax.jit(lambda tokens: model.loss({"tokens": tokens})[0])
    for name in parts:
        ids = tokenizer.encode(texts[name])
        ids = [*ids, tokenizer.end][: (len(ids) // 32) * 32 + 1]
        windows = np.array([ids[at : at + 17] for at in range(0, len(ids) - 1, 16)], np.int32)
        loss = float(np.mean([loss_of(windows[at : at + 2]) for at in range(0, len(windows), 2)]))
        size = len(tokenizer.decode(ids[1:]).removesuffix("<|endoftext|>"))
        found = result["sets"][name]
        assert found["loss"] == pytest.approx(loss, rel=1e-5) and found["tokens"] == len(ids) - 1
        assert found["bits_per_byte"] == pytest.approx(loss * found["tokens"] / size / np.log(2), rel=1e-5)
        assert result["scores"][f"{name} loss"] == found["loss"]
        assert result["scores"][f"{name} bits_per_byte"] == found["bits_per_byte"]
    # A set with fewer samples than a batch is one batch.
    few = Evaluator(load(tmp_path / "config.yaml", ["--train.eval_batch_size", "1000"])).evaluate(parameters, 1)
    for name in parts:
        ids = [*tokenizer.encode(texts[name]), tokenizer.end]
        windows = np.array([ids[at : at + 17] for at in range(0, len(ids) - 16, 16)], np.int32)
        assert few["sets"][name]["tokens"] == windows[:, 1:].size
        assert few["sets"][name]["loss"] == pytest.approx(float(loss_of(windows)), rel=1e-5)
