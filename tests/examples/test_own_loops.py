"""The loops of docs/examples as islands of real runs; the syncer takes their model, and losses fall."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from diloco_jax.cli.main import main
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.training.data.tokenizer import train_tokenizer
from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, environment, start, wait_for
from tests.tools.export.folders import drawn, make_run, model_of

pytestmark = pytest.mark.net

EXAMPLES = ROOT / "docs" / "examples"
OWN: dict[str, Any] = {
    "name": "own",
    "islands": {"count": 1, "devices": 1},
    "train": {"steps": 24},
    "model": {"module": "own"},
    "protocol": {"sync_every": 6, "num_fragments": 6},
    "trackers": [],
}
# example -> the extra that it needs, the islands that run it, the parameters that travel
LOOPS = {
    "optax_loop": ("", 1, 74_112),
    "nnx_loop": ("", 1, 74_112),
    "nnx_tutorial": ("", 2, 9_850),
    "linen_loop": ("", 2, 74_112),
    "equinox_loop": ("examples", 1, 74_112),
    "haiku_loop": ("examples", 1, 74_112),
    "lora_loop": ("", 2, 7_424),
    "dpo_loop": ("", 2, 17_504),
    "torch_loop": ("parity", 2, 74_112),
    "hf_trainer": ("parity", 2, 74_112),
    "lightning_trainer": ("parity", 2, 74_112),
    "accelerate_loop": ("parity", 2, 74_112),
    "keras_fit": ("examples", 1, 74_112),
    "grain_loop": ("", 2, 74_112),
}
# The others are trees of arrays, too, as that of the optax loop. PyTorch and loaders have separate real runs in CI.
LONG = ("nnx_loop", "keras_fit")
# Separate tests run these: the one at the end of this file, and test_dpo.py.
APART = ("optax_loop", "dpo_loop")


def row(example: str) -> Any:
    extra = LOOPS[example][0]
    kind = pytest.mark.long if example in LONG else pytest.mark.nightly
    return pytest.param(example, marks=[kind, pytest.mark.extra(extra)] if extra else kind)


@contextlib.contextmanager
def syncer(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """A syncer, and its address; at the end it has made all global steps."""
    path, run_dir = folder / "config.yaml", folder / "run"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    process = start("syncer", path, "--run-dir", run_dir)
    try:
        address = run_dir / "syncer.address"
        wait_for(lambda: process.poll() is not None or (address.exists() and address.read_text()), "an address")
        assert process.poll() is None, process.communicate()[0]
        yield address.read_text()
        output, _ = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()


def island(folder: Path, address: str, name: str, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a loop that joins the run; its output goes to a file."""
    own = {"DILOCO_RUN_DIR": str(folder / "run"), "DILOCO_SYNCER": address, "DILOCO_ISLAND": name}
    with (folder / f"{name}.log").open("wb") as log:
        everything = environment() | {"KERAS_BACKEND": "jax"} | own
        return subprocess.Popen([sys.executable, *words], env=everything, stdout=log, stderr=log, cwd=folder)


def losses(run_dir: Path, name: str) -> list[float]:
    """What an island reported, step by step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step" and row["learner"] == name]


def play(folder: Path, config: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """A whole run of islands that all run the same program; its summary."""
    names = [f"island-{number}" for number in range(config["islands"]["count"])]
    with syncer(folder, config) as address:
        processes = [island(folder, address, name, words) for name in names]
        try:
            ended = lambda: [process.poll() for process in processes]  # noqa: E731
            wait_for(lambda: any(ended()) or None not in ended(), "the end of all loops")
            assert not any(ended()), [(folder / f"{name}.log").read_text()[-4000:] for name in names]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["complete"] and not summary["unmerged_fragments"], summary
    for name in names:
        found = losses(folder / "run", name)
        assert found[-1] < 0.8 * found[0], f"{name}: the loss went from {found[0]:.2f} to {found[-1]:.2f}"
    return summary


def counted_lines(example: str) -> int:
    """The number of lines of an example that make its loop an island."""
    return (EXAMPLES / f"{example}.py").read_text().count("  # island\n")


def test_the_readme_counts_the_lines_that_make_an_island() -> None:
    table = re.findall(r"^\| \[(\w+)\.(?:py|diff)\].* (\d+) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    counted = {example: counted_lines(example) for example in LOOPS}
    counted["levanter"] = len(re.findall(r"^\+(?!\+\+)", (EXAMPLES / "levanter.diff").read_text(), re.MULTILINE))
    assert {example: int(lines) for example, lines in table} == counted
    assert counted["levanter"] <= 20 and counted["nnx_tutorial"] <= 5


def public_model(folder: Path) -> Path:
    """A model as one gets it from others, with its tokenizer; it expects single tokens with too much confidence."""
    train_tokenizer(["def island(syncer):\n    return syncer.merge()\n"], 300, folder)
    values = drawn(model_of())
    values["embed/embedding"] *= 12
    run = make_run(folder / "made", model_of(), values, data={"format": "text", "path": "x", "tokenizer": str(folder)})
    assert main(["export", str(run), "--out", str(folder / "public")]) == 0
    return folder / "public"


@pytest.mark.parametrize("example", [row(name) for name in LOOPS if name not in APART])
def test_an_example_is_an_island(example: str, tmp_path: Path) -> None:
    _, count, parameters = LOOPS[example]
    alike: dict[str, Any] = {"islands": {"count": count, "devices": 1}}
    alike["protocol"] = OWN["protocol"] | {"quorum": count}
    # The tutorial reports mean losses since a reset, which fall later, and an evaluation.
    if example == "nnx_tutorial":
        alike["train"] = {"steps": 80, "eval_every": 40}
    words = [str(public_model(tmp_path))] if example == "lora_loop" else []
    summary = play(tmp_path, OWN | alike, [str(EXAMPLES / f"{example}.py"), *words])
    assert summary["num_parameters"] == parameters
    # Over many rounds with steps of a millisecond, an island misses a few.
    assert summary["contributors_per_round"] >= (0.9 * count if example == "nnx_tutorial" else count)
    if example == "nnx_tutorial":
        assert summary["eval_scores"]["accuracy"] > 0.3


@pytest.mark.long
def test_optax_is_an_island_and_agrees_with_the_built_in_learner_bit_for_bit(tmp_path: Path) -> None:
    alike = {
        "train": {"steps": 40, "batch_size": 16, "seq_len": 64, "eval_every": 0, "final_eval_batches": 1},
        "optimizer": {"schedule": "constant", "warmup_steps": 10, "learning_rate": 0.01},
        "protocol": OWN["protocol"] | {"overlap_steps": 0},
    }
    found = []
    for module in ("own", "tests.examples.bytes_model:Bytes"):
        folder = tmp_path / module.split(":")[0]
        folder.mkdir()
        config = OWN | alike | {"model": {"module": module}}
        own = [str(EXAMPLES / "optax_loop.py")]
        built_in = ["-m", "diloco_jax", "learner", str(folder / "config.yaml"), "--island", "island-0"]
        summary = play(folder, config, own if module == "own" else [*built_in, "--run-dir", str(folder / "run")])
        assert summary["num_parameters"] == LOOPS["optax_loop"][2] and summary["contributors_per_round"] == 1
        newest = complete(folder / "run" / "checkpoints")[0]
        assert newest.name == "step_00000040"
        found.append((load_parameters(newest)[0], losses(folder / "run", "island-0")))
    (own_values, own_losses), (values, built_in_losses) = found
    assert own_losses[0] == built_in_losses[0]
    # A report has the loss of its step, or of the step before if the devices still compute.
    for step in range(1, 40):
        assert own_losses[step] in built_in_losses[step - 1 : step + 1], step
    assert own_values.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(own_values[path].view(np.uint32), value.view(np.uint32), err_msg=path)
