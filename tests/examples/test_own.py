"""Code of users: the config and the examples of docs/own.md run, and each error is one sentence."""

import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from diloco_jax.cli import main as cli
from diloco_jax.runtime.model.evaluation import Scorer
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.settings.fingerprint import fingerprint
from diloco_jax.settings.run import EvaluationConfig, OptimizerConfig, RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.sharding import MeshConfig
from tests.runtime.helpers import ROOT, SMALL, environment, merged, write_config
from tests.training.conftest import TINY

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("own_*.py"))
HERE = __name__
PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")


class Ids:
    """Source whose samples repeat their number; its arguments can make it wrong."""

    def __init__(self, count: int = 900, length: int = 33, dtype: str = "uint8") -> None:
        self.count, self.length, self.dtype = count, length, dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(self.length, index % 256).astype(self.dtype)


class Raising(Ids):
    def __getitem__(self, index: int) -> np.ndarray:
        raise {"remote": OSError("no route"), "script": SystemExit(0)}.get(self.dtype, KeyError("shard-7"))


class Scores(NamedTuple):
    """Evaluation that returns a given result, raises if there is none, or hangs."""

    result: Any = None

    def __call__(self, model: nnx.Module, step: int) -> Any:
        if self.result is None:
            raise RuntimeError("no scores today")
        if self.result == "hang":
            threading.Event().wait()
        return self.result


def forgetful() -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: ({}, state))


@pytest.mark.long
@pytest.mark.net
def test_the_page_and_its_examples_train_and_are_trained_again_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"islands": {"devices": 1}, "protocol": {"sync_every": 2, "num_fragments": 2}}
    settings["train"] = {"steps": 24, "eval_every": 12, "eval_batch_size": 4}
    settings["model"] = {"args": SMALL["model"]["args"] | {"num_layers": 1}}
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        settings = merged(settings, yaml.safe_load(block))
    assert [name for name in settings if "module" in settings[name]] == ["data", "optimizer", "outer", "evaluation"]
    assert len(EXAMPLES) == 6 and all(len(path.read_text().splitlines()) <= 20 for path in EXAMPLES)
    for path in EXAMPLES:
        shutil.copy(path, tmp_path)
    shutil.copy(ROOT / "docs" / "protocol.md", tmp_path / "notes.txt")

    def diloco(*words: object) -> Any:
        command = [sys.executable, "-m", "diloco_jax", *map(str, words), "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(0.05), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    summary = diloco("train", write_config(tmp_path, **settings), "--run-dir", "run")
    scores = summary["eval_scores"]
    assert summary["complete"] and summary["eval_bits_per_byte"] is None
    assert "evaluation.module" not in str(summary["alarms"])
    assert scores.keys() == {"perplexity", "guessed", "length"} and 0 <= scores["guessed"] <= 1 and scores["length"] > 1
    records = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "eval"]
    assert records[-1]["scores"] == scores
    assert json.loads((tmp_path / "run" / "status.json").read_text())["eval_scores"] == scores
    assert f'"guessed":{scores["guessed"]}' in (tmp_path / "run" / "report.html").read_text()
    assert cli.main(["audit", str(tmp_path / "run")]) == 0
    replayed = diloco("replay", "run")
    assert replayed["identical"] and replayed["sha256"] == replayed["expected_sha256"], replayed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            {"data": {"module": "nowhere:Thing"}},
            ["data.module 'nowhere:Thing' cannot be imported", "install or"],
            id="data-module-that-is-missing",
        ),
        pytest.param(
            {"data": {"module": "Thing"}},
            ["data.module is 'Thing'; write it as package.module:Name"],
            id="data-module-without-a-class",
        ),
        pytest.param(
            {"data": {"args": {"count": 5}}},
            ["data.module is ''; write it as package.module:Name"],
            id="data-arguments-without-a-module",
        ),
        pytest.param(
            {"data": {"module": "tests:Thing", "path": "."}},
            ["data.path is '.'", "takes its place; remove one"],
            id="data-module-and-path",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Ids", "args": {"size": 5}}},
            ["TypeError", "'size'", "or data.args"],
            id="data-argument-that-is-unknown",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Ids", "args": {"length": 32}}},
            ["uint8 of shape (32,)", "33 integers"],
            id="data-of-another-length",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Ids", "args": {"dtype": "float32"}}},
            ["float32 of shape (33,)"],
            id="data-of-another-type",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Ids", "vocab_size": 99}},
            ["data.vocab_size is 99, correct one"],
            id="data-of-another-vocabulary",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Ids", "args": {"count": 2}}},
            ["has 2 samples", "data.held_out_fraction"],
            id="data-too-few-to-hold-some-out",
        ),
        pytest.param(
            {"data": {"module": "builtins:object"}}, ["has no len()", "correct it"], id="data-without-a-length"
        ),
        pytest.param(
            {"data": {"module": "sys:exit"}},
            ["data.module 'sys:exit' fails: SystemExit", "correct it"],
            id="data-module-that-exits",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Raising", "args": {"dtype": "script"}}},
            ["SystemExit: 0", "test_own.py, line"],
            id="data-sample-that-exits",
        ),
        pytest.param(
            {"data": {"module": f"{HERE}:Raising"}},
            ["KeyError: 'shard-7'", "test_own.py, line"],
            id="data-sample-that-raises",
        ),
        pytest.param(
            {"optimizer": {"module": "builtins:dict"}},
            ["returns a dict without init and update"],
            id="optimizer-that-is-none",
        ),
        pytest.param(
            {"optimizer": {"module": f"{HERE}:forgetful"}},
            ["optimizer.module", "another updates structure"],
            id="optimizer-that-forgets-a-leaf",
        ),
        pytest.param(
            {"optimizer": {"module": "optax:add_noise", "args": {"eta": 0.1, "gamma": 0.5, "key": 0}}},
            ["typed random key", "jax.random.key_data"],
            id="optimizer-with-a-typed-key",
        ),
        pytest.param(
            {"outer": {"module": "Thing"}}, ["outer.module is 'Thing'; write it as"], id="outer-without-a-class"
        ),
        pytest.param(
            {"outer": {"module": "optax.contrib:reduce_on_plateau"}},
            ["outer.module", "'value'", "or outer.args"],
            id="outer-that-needs-a-value",
        ),
        pytest.param(
            {"outer": {"module": f"{HERE}:gone"}},
            ["outer.module", "has no attribute 'gone'"],
            id="outer-that-is-missing",
        ),
        pytest.param(
            {"evaluation": {"module": "builtins:dict"}},
            ["makes a dict without __call__(self, model, step)"],
            id="evaluation-that-cannot-be-called",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], words: list[str]
) -> None:
    config = write_config(tmp_path, **{"data": {"module": f"{HERE}:Ids", "vocab_size": 256}} | settings)
    assert cli.main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1 and not (tmp_path / "run").exists()
    for word in words:
        assert word in said.err


def test_the_last_samples_are_held_out_and_a_disk_that_is_away_may_come_back() -> None:
    config = DataConfig(module=f"{HERE}:Ids", held_out_fraction=0.1)
    source, fewer = load_source(config, 32), load_source(replace(config, args={"count": 899}), 32)
    assert (len(source.train), len(source.held_out), source.corpus == fewer.corpus) == (810, 90, False)
    assert source.held_out[0]["tokens"].tolist() == [810 % 256] * 33 and source.train[809]["tokens"].dtype == np.int32
    with pytest.raises(ConnectionError, match=r"Raising' cannot read sample 0: no route"):
        load_source(replace(config, module=f"{HERE}:Raising", args={"dtype": "remote"}), 32)


@pytest.mark.parametrize(
    ("section", "agreed"), [("data", True), ("optimizer", True), ("outer", False), ("evaluation", False)]
)
def test_islands_and_syncer_compare_the_names_that_change_an_island(section: str, agreed: bool) -> None:
    config = RunConfig(data=DataConfig(module="a:B", vocab_size=256))
    other = replace(config, **{section: replace(getattr(config, section), module="a:C")})
    assert (fingerprint(config, "", "") != fingerprint(other, "", "")) == agreed


def test_moments_of_an_own_optimizer_lie_like_their_parameters() -> None:
    optimizer = OptimizerConfig(module="optax:trace", args={"decay": 0.9})
    blueprint = Blueprint(ModelConfig(args=TINY), optimizer, MeshConfig(fsdp=2), 2, seed=0)
    assert blueprint.state_shardings.opt_state.trace == blueprint.state_shardings.params
    assert any(not each.is_fully_replicated for each in blueprint.state_shardings.opt_state.trace.values())


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "RuntimeError: no scores today"),
        ([1.0], "return a dict of at most 32 numbers"),
        ({str(number): 0.0 for number in range(33)}, "at most 32 numbers"),
        ({"x" * 65: 1.0}, "use 1 to 64 printable characters"),
        ({"word": "many"}, "could not convert string to float: 'many'"),
    ],
)
def test_scores_that_are_wrong_are_told_once(result: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer(EvaluationConfig(module=f"{HERE}:Scores", args={"result": result}))
    assert [scorer.scores(nnx.Module, step) for step in (1, 2)] == [{}, {}]
    assert len(caplog.records) == len(scorer.alarms) == 1 and told in scorer.alarms[0]


def test_scores_that_hang_are_left_behind() -> None:
    scorer = Scorer(EvaluationConfig(module=f"{HERE}:Scores", args={"result": "hang"}, timeout_s=0.01))
    assert scorer.scores(nnx.Module, 1) == scorer.scores(nnx.Module, 2) == {}
    (alarm,) = scorer.alarms
    assert "took more than evaluation.timeout_s = 0.01 s; the run continues without" in alarm


def test_scores_are_numbers_or_null() -> None:
    scorer = Scorer(EvaluationConfig(module=f"{HERE}:Scores", args={"result": {"a": float("nan"), "b": 2}}))
    assert scorer.scores(nnx.Module, 1) == {"a": None, "b": 2.0} and not scorer.alarms
