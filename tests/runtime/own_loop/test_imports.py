"""Libraries that an island in a user's loop does not load, before and after a whole run."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.runtime.helpers import ROOT, kill_processes, run

# The syncer, the commands and the built-in models use them.
UNUSED = ("tokenizers", "safetensors", "tyro", "rich", "grain", "flax", "orbax", "prometheus_client", "torch")
UNUSED += ("cryptography",)  # with certificates only
LOADED = f"[name for name in {UNUSED} if name in sys.modules]"
# An island loads it when it joins, after the settings of its cache.
LATER = "numba"
# The loop of a user, with the libraries that it has loaded at its end.
LOOP = f"""
import json, pathlib, sys
import jax.numpy as jnp
import diloco_jax

with diloco_jax.join(
    params={{"w": jnp.ones((4, 6))}}, opt_state={{"m": jnp.ones(3)}}, samples_per_step=2, tokens_per_step=2,
    evaluate=lambda params: {{"loss": 1.0}},
) as island:
    params, moments = island.state().values()
    while island.training:
        island.next_samples()
        params = island.after_step(params, 1.0, opt_state=moments)
    island.global_params()
pathlib.Path("loaded.json").write_text(json.dumps({LOADED}))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


def test_what_join_and_a_syncer_without_a_model_import() -> None:
    """One after the other in a process, because a new interpreter with JAX takes seconds."""
    joins = f"from diloco_jax import join\nimport sys\nprint({LOADED}, {LATER!r} in sys.modules)"
    slow = ("flax", "grain", "diloco_jax.training.blueprint", "tensorboardX", "torch")
    serves = "import diloco_jax.runtime.model.offered, diloco_jax.runtime.syncer.run"
    serves += f"\nprint([name for name in {slow} if name in sys.modules])"
    code = f"{joins}\n{serves}"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[] False", "[]"]


@pytest.mark.extra("parity")
def test_an_island_of_pytorch_imports_no_part_of_pytorch_for_several_processes() -> None:
    code = "import diloco_jax.torch, sys\nprint('torch.distributed.tensor' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False", "it takes as long to import as PyTorch itself"


@pytest.mark.long
@pytest.mark.net
def test_a_whole_run_of_a_loop_needs_none_of_them(tmp_path: Path, run_dir: Path) -> None:
    loop, config = tmp_path / "loop.py", tmp_path / "own.yaml"
    loop.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{LOOP}", encoding="utf-8")
    config.write_text(
        yaml.safe_dump(
            {
                "name": "own",
                "islands": {"count": 1, "devices": 1, "command": [sys.executable, str(loop)]},
                "model": {"module": "own"},
                "train": {"steps": 6, "eval_every": 3},
                "protocol": {"sync_every": 2, "num_fragments": 2, "snapshot_every": 2},
                "trackers": [],
            }
        ),
        encoding="utf-8",
    )
    ended = run("train", config, "--json", "--run-dir", run_dir)
    assert json.loads(ended.stdout.splitlines()[-1])["complete"], ended.stdout + ended.stderr
    assert json.loads((tmp_path / "loaded.json").read_text(encoding="utf-8")) == []
    # The island prints what it waits for, and where it starts.
    lines = (run_dir / "logs" / "island-0.log").read_text(encoding="utf-8")
    told = re.findall(r"^[-0-9]+ [0-9:,]+ island-0: ([a-z ]+)", lines, re.MULTILINE)
    # An island waits for the syncer for as long as that loads the model, which may be too short for a line.
    assert [line for line in told if line != "waiting at "] == [
        "connecting to the syncer at ",
        "found the run own",
        "the run has no model yet",
        "connected to the syncer",
        "waiting for the run",
        "training from global step ",
        "run complete",
    ]
    assert "training from global step 0; optimizer state: new\n" in lines
