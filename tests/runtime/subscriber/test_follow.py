"""`diloco follow` at a listener of this process; and beside a real run: killed, started again, equal to the export."""

import json
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.records import signals
from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.runtime.records.status import read_status
from diloco_jax.tools.export.kept import NEWEST, VERSION_FILE
from diloco_jax.transport.session.calls import ask_status
from tests.limits import HANGS_S
from tests.runtime.helpers import SLOW_STEP_S, call, json_lines, start, wait_for, write_config
from tests.runtime.subscriber.test_subscription import ROUNDS, Run, run

__all__ = ["run"]  # a fixture

pytestmark = pytest.mark.net
# The run lasts for 60 s at least, many times longer than the start of a follower. Two of them start meanwhile.
STEPS = 600
CALLED = """from pathlib import Path


def note(folder):
    with (Path(folder).parent.parent / "called").open("a") as file:
        file.write(folder.name + "\\n")
"""


def follow(run: Path, out: Path, *words: object) -> subprocess.Popen[str]:
    return start("follow", run, "--out", out, "--format", "npz", "--json", *words)


def version_of(out: Path) -> dict[str, Any]:
    path = out / NEWEST / VERSION_FILE
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.long
def test_a_follower_that_is_killed_ends_with_the_model_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    (tmp_path / "called_by_follow.py").write_text(CALLED)
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, train={"steps": STEPS, "eval_every": 0})
    training = start("train", config, "--run-dir", run, "--quiet", step_s=SLOW_STEP_S)
    wait_for((run / ADDRESS_FILE).exists, "the start of the syncer")
    address = (run / ADDRESS_FILE).read_text()
    first = follow(run, out)
    wait_for(lambda: version_of(out).get("global_step", 0) >= 2, "the second model")
    first.kill()
    first.communicate()
    killed_at = version_of(out)["global_step"]
    assert (out / NEWEST).resolve().is_dir(), "a kill leaves a whole model"
    again = follow(run, out, "--every", 6, "--serve", "--name", "reader", "--call", "called_by_follow:note")
    wait_for(lambda: version_of(out)["global_step"] > killed_at, "a model after the kill")
    status = wait_for(lambda: read_status(address, ask_status)["subscribers"], "the subscriber in the status")
    assert [row["subscriber"] for row in status] == ["reader"]
    told, _ = training.communicate(timeout=HANGS_S)
    assert training.returncode == 0, told
    words, _ = again.communicate(timeout=HANGS_S)
    assert again.returncode == 0, words
    lines = [json.loads(line) for line in words.splitlines() if line.startswith("{")]
    assert "serves" in lines[0] and lines[-1] == {"complete": True}
    models = lines[1:-1]
    assert all(b["global_step"] - a["global_step"] >= 6 for a, b in pairwise(models[:-1]))
    assert (tmp_path / "called").read_text().split() == [Path(each["folder"]).name for each in models]
    # The final model is that of the run, bit for bit.
    exported = tmp_path / "exported"
    assert call("export", run, "--out", exported, "--format", "npz").returncode == 0
    with np.load(out / NEWEST / "parameters.npz") as ours, np.load(exported / "parameters.npz") as theirs:
        assert sorted(ours) == sorted(theirs)
        assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    assert version_of(out)["exact"] and version_of(out)["global_step"] == STEPS
    # Nothing of the followers is on the tape, and no rule counts them.
    assert "reader" not in (run / "tape.jsonl").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert sorted(summary["learners"]) == ["island-0", "island-1"]
    assert {row.get("kind") for row in json_lines(run / "metrics.jsonl") if "reader" in str(row)} == set()


def test_each_model_is_written_reported_and_passed_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, called, names = tmp_path / "model", list[str](), set[str]()

    def note(folder: Path) -> None:
        """Make the next model due."""
        called.append(folder.name)
        names.update(row["subscriber"] for row in run.subscribers.state())
        for _ in range(3 if run.machine.global_step < ROUNDS else 0):
            run.do(run.train)

    monkeypatch.setattr(signals, "stop_on_signals", threading.Event)
    monkeypatch.setitem(sys.modules, "called_by_follow", SimpleNamespace(note=note))
    words = ("follow", run.listener.address, "--out", out, "--format", "npz", "--json", "--name", "reader")
    done = call(*words, "--every", 3, "--serve", "--call", "called_by_follow:note")
    assert done.returncode == 0, done.stderr
    serves, *models, last = map(json.loads, done.stdout.splitlines())
    assert serves["serves"].startswith("http://127.0.0.1:") and last == {"complete": True}
    assert [model["global_step"] for model in models] == [0, 3, 6, 9]
    assert called == [Path(model["folder"]).name for model in models] and names == {"reader"}
    with np.load(out / NEWEST / "parameters.npz") as written:
        assert {name: written[name].tobytes() for name in written} == {
            path: value.tobytes() for path, value in run.parameters().items()
        }
    assert version_of(out)["exact"] and version_of(out)["global_step"] == ROUNDS
    # A follower that starts again in the folder finds the models of its run there.
    again = call(*words)
    assert again.returncode == 0 and version_of(out)["global_step"] == ROUNDS, again.stderr


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    for words, reason in (
        (["127.0.0.1:1"], "neither --out nor --serve"),
        (["127.0.0.1:1", "--out", tmp_path, "--every", 0], "--every is 0; use at least 1"),
        ([tmp_path, "--out", tmp_path], "is not the folder of a run"),
        (["127.0.0.1:1", "--out", tmp_path, "--call", "no_such:thing"], "--call 'no_such:thing' cannot be imported"),
    ):
        done = call("follow", *words)
        assert done.returncode == 2 and reason in done.stderr
