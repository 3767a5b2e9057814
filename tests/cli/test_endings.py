"""The last line of `diloco train`, and its warning of a batch that cannot fit."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.cli.train import ending
from diloco_jax.runtime.local import check_input
from diloco_jax.runtime.local.check_input import memory_bytes, oversized
from diloco_jax.runtime.local.machine import Machine
from diloco_jax.settings.run import ModelConfig, RunConfig, TrainConfig
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
