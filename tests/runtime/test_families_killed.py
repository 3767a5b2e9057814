"""One model of each public family on two islands: one is killed without a word, returns, and is merged again."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.extras import absent
from tests.runtime.helpers import (
    call,
    interrupted,
    kill_processes,
    notes,
    processes_of,
    start,
    status,
    wait_for,
    write_config,
)

pytest.importorskip("transformers", reason=absent("parity"))

from tests.training.convert.cases import LIST
from tests.training.convert.variants import Variant, make

pytestmark = [pytest.mark.extra("parity"), pytest.mark.nightly, pytest.mark.net]

# The first variant of each family that is not refused.
FIRST = {each.family: each for each in reversed(LIST) if not each.refused}


@pytest.mark.filterwarnings("default")  # theirs are theirs
@pytest.mark.parametrize("variant", FIRST.values(), ids=FIRST.keys())
def test_a_family_trains_on_when_an_island_is_killed(variant: Variant, tmp_path: Path) -> None:
    make(variant, tmp_path / "theirs")
    islands = {"count": 2, "devices": 1, "restart_delay_s": 0.1}
    train = {"steps": 100_000, "batch_size": 4, "seq_len": 32, "eval_every": 20, "eval_batches": 2}
    base = write_config(tmp_path, islands=islands, train=train, model={"module": "decoder", "args": {}})
    config, run_dir = tmp_path / "imported.yaml", tmp_path / "run"
    done = call("import", tmp_path / "theirs", "--config", base, "--out", config)
    assert done.returncode == 0, done.stdout + done.stderr
    process = start("train", config, "--run-dir", run_dir, "--quiet")

    def merged() -> int:
        """Return the newest round that merged a value of island-1."""
        rows = {row["learner"]: row for row in status(run_dir).get("learners", [])}
        return int(rows.get("island-1", {}).get("last_merged_round") or 0)

    try:
        wait_for(lambda: merged() > 12, "rounds of both islands", process)
        victims = [pid for pid, words in processes_of(run_dir).items() if " --island island-1 " in f"{words} "]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert victims, "no process of island-1"
        wait_for(lambda: notes(run_dir, "joined", "island-1") > 1, "its return", process)
        since = status(run_dir)["global_step"]
        wait_for(lambda: merged() > since + 12, "rounds after its return", process)
        interrupted(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        kill_processes(tmp_path)
    audited = json.loads(call("audit", run_dir, "--json").stdout)
    assert audited["violations"] == 0 and audited["rounds"] > 12, audited
