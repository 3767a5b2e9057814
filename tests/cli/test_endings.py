"""The last lines of `diloco train` and `diloco syncer`, and the warning of a batch that cannot fit."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.cli import runs
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.local import check_input
from diloco_jax.runtime.local.check_input import memory_bytes, oversized
from diloco_jax.runtime.local.machine import Machine
from diloco_jax.runtime.records import files
from diloco_jax.runtime.records.signals import PARENT_ENV
from diloco_jax.settings.run import ModelConfig, RunConfig, TrainConfig
from diloco_jax.tools.terminal.closing import ending, onward
from diloco_jax.training.optimizers import OptimizerConfig

CONFIG = RunConfig(train=TrainConfig(steps=300))
SUMMARY: dict[str, Any] = {
    "complete": False,
    "eval_loss": None,
    "eval_scores": {},
    "evaluated": False,
    "global_steps": 31,
    "tokens": 126_976,
    "wall_s": 9.6,
}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "stopped after 31 of 300 global steps and 126,976 tokens in 10 s, before the first evaluation"),
        (
            {"evaluated": True},
            "stopped after 31 of 300 global steps and 126,976 tokens in 10 s, evaluation loss not finite",
        ),
        (
            {"evaluated": True, "eval_loss": 2.5, "eval_scores": {"guesses": 0.25}},
            "stopped after 31 of 300 global steps and 126,976 tokens in 10 s, evaluation loss 2.5000, guesses 0.25",
        ),
        (
            {"complete": True, "evaluated": True, "eval_loss": 2.5, "global_steps": 300},
            "complete: evaluation loss 2.5000 after 300 global steps and 126,976 tokens in 10 s",
        ),
        (
            {"epoch": 2},
            "stopped after 31 of 300 global steps and 126,976 tokens in 10 s with pauses, before the first evaluation",
        ),
        (
            {"complete": True, "evaluated": True},
            "complete: evaluation loss not finite after 31 global steps and 126,976 tokens in 10 s",
        ),
        (
            {"complete": True},
            "complete: no evaluation, see the alarms after 31 global steps and 126,976 tokens in 10 s",
        ),
    ],
)
def test_the_last_line_says_what_happened(told: dict[str, Any], words: str) -> None:
    assert ending(SUMMARY | told, CONFIG) == words


def test_an_island_that_was_never_merged_is_named() -> None:
    learners = {"island-0": {"participation": 0.0}, "island-1": {"participation": 1.0}}
    told = ending(SUMMARY | {"complete": True, "learners": learners, "contributors_per_round": 1.0}, CONFIG)
    assert told.endswith("in 10 s; 1.00 of 2 islands per round; never merged: island-0")


def test_a_budget_of_tokens_is_not_a_number_of_steps() -> None:
    budgeted = replace(CONFIG, train=TrainConfig(steps=0, tokens=1_000_000))
    assert ending(SUMMARY, budgeted).startswith("stopped after 31 global steps and 126,976 tokens")


def test_loops_without_an_evaluation_are_told_how_to_have_one() -> None:
    own = replace(CONFIG, model=ModelConfig(module="own"))
    assert "join() no evaluate=" in ending(SUMMARY | {"complete": True}, own)


def test_a_batch_that_cannot_fit_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_input, "look", lambda environment: Machine())
    config = replace(RunConfig(), train=TrainConfig(batch_size=4_000_000, seq_len=128))
    gigabytes = 4 * 4_000_000 * 128 * 256 / 1e9
    warning = oversized(config, 64 << 30)
    assert f"{gigabytes:,.0f} GB" in warning and "this machine has 69 GB: lower train.batch_size" in warning
    assert not oversized(config, 0), "the system does not say how much there is"
    assert not oversized(config, 1 << 50) and not oversized(RunConfig(), 1 << 30)
    micro = replace(config, optimizer=OptimizerConfig(accumulate_steps=1000))
    assert not oversized(micro, 64 << 30)
    monkeypatch.setattr(check_input, "look", lambda environment: Machine(gpus=("0",)))
    assert not oversized(config, 64 << 30), "of their memory nothing is known here"
    assert memory_bytes() > 1 << 28


@pytest.mark.parametrize(
    ("program", "complete", "command"),
    [
        ("train", True, "to train longer: diloco train RUN/config.yaml --run-dir RUN --resume --train.steps 600"),
        (
            "syncer",
            True,
            "to train longer: diloco syncer RUN/config.yaml --run-dir RUN --rewind --train.steps 600"
            "; then start each island again, with --train.steps 600 after its command",
        ),
        ("train", False, "to continue: diloco train RUN/config.yaml --run-dir RUN --resume"),
        (
            "syncer",
            False,
            "to continue: diloco syncer RUN/config.yaml --run-dir RUN"
            "; then start each island again, because they ended with the syncer",
        ),
    ],
)
def test_the_command_that_comes_next(
    program: str, complete: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    told = SUMMARY | {"complete": complete}
    assert bool(onward(told, CONFIG, tmp_path, program)) == complete, "no run has begun there"
    (tmp_path / "tape.jsonl").write_text("[]\n")
    assert onward(told, CONFIG, tmp_path, program) == command.replace("RUN", str(tmp_path))


def test_a_budget_of_tokens_is_doubled_too(tmp_path: Path) -> None:
    budgeted = replace(CONFIG, train=TrainConfig(steps=300, tokens=1_000_000))
    assert files.longer_command(tmp_path, budgeted.limits).endswith(" --train.tokens 2000000 --train.steps 600")


def test_a_syncer_without_a_supervisor_prints_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = Alarm("few", "", "each of the last 20 rounds merged 1.0 learners on average, of 2.0").as_dict()
    learners = {"a": {"participation": 1.0}, "b": {"participation": 0.4}}
    told = SUMMARY | {"complete": True, "evaluated": True, "eval_loss": 2.5, "alarms": [few], "learners": learners}
    ended = SimpleNamespace(run=lambda last_act: told | {"contributors_per_round": 1.4})
    monkeypatch.setattr("diloco_jax.runtime.syncer.run.SyncerRun", lambda *_, **__: ended)
    monkeypatch.setattr("diloco_jax.runtime.model.evaluation.Evaluator", lambda config: None)
    monkeypatch.setattr(runs, "_begin_process", lambda run_dir: Event())
    caplog.set_level(logging.INFO)
    assert runs._sync(CONFIG, tmp_path, rewind=False) == 0
    last = caplog.messages[-3:]
    assert last[0].startswith("complete: evaluation loss 2.5000 after 31 global steps and 126,976 tokens in 10 s")
    assert last[0].endswith("; 1.40 of 2 islands per round")
    assert last[1].startswith("alarm: each of the last 20 rounds") and "protocol.quorum" in last[1]
    assert (
        last[2].startswith("to train longer: ")
        and " --rewind --train.steps 600; then start each island again" in last[2]
    )
    monkeypatch.setenv(PARENT_ENV, "1")
    caplog.clear()
    assert runs._sync(CONFIG, tmp_path, rewind=False) == 0 and "complete" not in caplog.text
