"""docs/examples/dpo_loop.py: its loss is the one of the paper, and two islands learn, one of them killed."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.telemetry import read_metrics
from docs.examples import dpo_loop
from docs.examples.dpo_loop import BETA, HELD_OUT, WORD, Decoder, pairs
from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, island_pid, kill_processes, merged, notes, start, wait_for

PAGE = ROOT / "docs" / "preference.md"
NAMES = ("island-0", "island-1")


class Table(nnx.Module):
    """A bigram model: the logits of the next token are a row of a table."""

    def __init__(self, seed: int) -> None:
        self.rows = nnx.Param(2 * jax.random.normal(jax.random.key(seed), (256, 256)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.rows[...][tokens]


def margins_of(rows: np.ndarray, reference: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The margin of each pair for two tables, one token after the other in float64."""
    found = []
    for preferred, rejected in zip(*tokens, strict=True):
        total = 0.0
        for sign, answer in ((1, preferred), (-1, rejected)):
            for before, token in zip(answer[WORD:-1], answer[WORD + 1 :], strict=True):
                for side, table in ((1, rows), (-1, reference)):
                    row = table[before].astype(np.float64)
                    total += sign * side * (row[token] - np.log(np.exp(row).sum()))
        found.append(BETA * total)
    return np.array(found)


def loss_of(margins: np.ndarray) -> Any:
    return np.mean(np.log1p(np.exp(-margins)))


def test_the_pairs_prefer_the_case_of_the_question() -> None:
    preferred, rejected = pairs(range(64))
    np.testing.assert_array_equal(preferred[:, : WORD + 1], rejected[:, : WORD + 1])
    assert (preferred[:, WORD] == ord("?")).all()
    texts = [bytes(row.astype(np.uint8)).decode().split("?") for row in preferred]
    assert {(question.isupper(), answer.isupper()) for question, answer in texts} == {(True, True), (False, False)}
    wrong = [bytes(row.astype(np.uint8)).decode().split("?")[1] for row in rejected]
    assert wrong == [answer.swapcase() for _, answer in texts]


def test_the_loss_is_that_of_the_paper_and_so_is_its_gradient() -> None:
    model, reference, tokens = Table(0), Table(1), pairs(range(8))
    rows, frozen = np.asarray(model.rows[...]), np.asarray(reference.rows[...])
    expected = margins_of(rows, frozen, tokens)
    assert expected.min() < -0.2 and expected.max() > 0.2
    np.testing.assert_allclose(dpo_loop.margins(model, reference, jnp.asarray(tokens)), expected, rtol=1e-5, atol=1e-5)
    loss, gradient = nnx.value_and_grad(dpo_loop.loss_of)(model, reference, jnp.asarray(tokens))
    np.testing.assert_allclose(loss, loss_of(expected), rtol=1e-5)

    # A finite difference in the logit of one token that an answer contains.
    at, width = (tokens[0, 0, WORD], tokens[0, 0, WORD + 1]), 1e-4
    moved = []
    for sign in (1, -1):
        changed = rows.astype(np.float64)
        changed[at] += sign * width
        moved.append(loss_of(margins_of(changed, frozen, tokens)))
    slope = (moved[0] - moved[1]) / (2 * width)
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(gradient.rows[...][at], slope, rtol=1e-4)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path
    kill_processes(tmp_path)


def written(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def rows_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == kind]


@pytest.mark.long
@pytest.mark.net
def test_two_islands_learn_the_preference_and_a_killed_one_keeps_its_reference(folder: Path) -> None:
    run_dir = folder / "run"
    command = [sys.executable, str(Path(__file__).with_name("paced_dpo.py"))]
    found = re.search(r"<<'END'\n(.*?)^END$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    # With the page's quorum the clock stops while an island is away, so that the killed one returns before the end.
    page = yaml.safe_load(found[1])
    assert page["protocol"]["quorum"] == page["islands"]["count"] == len(NAMES)
    changes = {"islands": {"command": command, "restart_delay_s": 0.1}, "train": {"steps": 60}, "trackers": []}
    config = merged(page, changes)
    (folder / "dpo.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    process = start("train", folder / "dpo.yaml", "--quiet", "--run-dir", run_dir, step_s=0.1)
    wait_for(lambda: notes(run_dir, "merged", "island-1") >= 35, "35 merges", process)
    wait_for(lambda: any((run_dir / "states" / "island-1").rglob("step_*.json")), "a saved state", process)
    os.kill(island_pid(run_dir, "island-1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and not summary["unmerged_fragments"] and summary["num_parameters"] == 17_504, output
    assert notes(run_dir, "joined", "island-1") == 2
    assert all(row["members"] == list(NAMES) for row in rows_of(run_dir, "merged"))

    for name in NAMES:
        first = next(row for row in rows_of(run_dir, "step") if row["learner"] == name)
        np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-5, err_msg=f"{name} starts as the reference")
    # The reference is the model of the first start. With the run's present model in its place the loss would be log 2.
    kinds = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] in ("joined", "step")]
    joined = [at for at, row in enumerate(kinds) if row["kind"] == "joined" and "island-1" in row["members"]]
    returned = [row["loss"] for row in kinds[joined[1] :] if row["kind"] == "step" and row["learner"] == "island-1"]
    assert len(returned) > 10 and returned[0] < 0.66, returned

    evaluations = [row["scores"] for row in rows_of(run_dir, "eval")]
    assert evaluations[0]["margin"] < evaluations[-1]["margin"] and evaluations[-1]["accuracy"] > 0.95, evaluations
    # Both islands end with the run's model, and its scores are those of the last evaluation.
    snapshot, _ = load_parameters(complete(run_dir / "checkpoints")[0])
    for name in NAMES:
        found = written(folder / f"{name}.npz")
        assert found.keys() == snapshot.keys()
        for tensor, value in snapshot.items():
            np.testing.assert_array_equal(found[tensor], value, err_msg=f"{name}: {tensor}")
    model, reference = (Decoder.from_config(dpo_loop.SIZES, rngs=nnx.Rngs(0)) for _ in range(2))
    for keys, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf.set_value(jnp.asarray(snapshot["/".join(map(str, keys))]))
    margins = np.asarray(nnx.jit(dpo_loop.margins)(model, reference, jnp.asarray(pairs(HELD_OUT))))
    np.testing.assert_allclose(evaluations[-1]["margin"], margins.mean(), rtol=1e-4)
    np.testing.assert_allclose(evaluations[-1]["accuracy"], np.mean(margins > 0))
    print("dpo:", evaluations, {"returned": returned[:3], "last": returned[-1]})
