"""A real run with a late joiner, kills, a corpus of one island's own and different speeds is repeated bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import diloco_jax
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.local.run import child_environment
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.settings.text import load, parse
from diloco_jax.sim.invariants.__main__ import main as simulate
from diloco_jax.tools.replay.script import as_simulated, read_scenario
from tests.limits import HANGS_S
from tests.runtime.helpers import (
    SLOW_STEP_S,
    SMALL,
    call,
    environment,
    kill_processes,
    merged,
    processes_of,
    run,
    start,
    status,
    wait_for,
    write_config,
)

# The corpus that island-1 alone reads.
OWN = str(Path(diloco_jax.__file__).parent / "core")


def pid_of(run_dir: Path, words: str) -> int:
    return next(pid for pid, command in processes_of(run_dir).items() if f" {words} " in f"{command} ")


def merged_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rounds that were merged, as far as they are in the metrics."""
    path = run_dir / "metrics.jsonl"
    return [row for row in read_metrics(path) if row["kind"] == "merged"] if path.exists() else []


def has_share(run_dir: Path, name: str, after: int = 0) -> bool:
    return any(name in row["members"] for row in merged_rows(run_dir)[after:])


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a run with every kind of event; Ctrl-C ended it after the last one."""
    folder = tmp_path_factory.mktemp("eventful")
    run_dir = folder / "run"
    config = write_config(
        folder,
        islands={"each": {"island-1": {"data": {"corpus": "package", "path": OWN, "patterns": ["*.py"]}}}},
        train={"steps": 100_000, "eval_every": 0},
        protocol={"sync_every": 6, "num_fragments": 6, "quorum": 2, "snapshot_every": 10},
        adopt={"mode": "rebase"},
        wire={"up": "int4"},
    )
    # every step is trained again by the tests
    process = start("train", config, "--run-dir", run_dir, "--quiet", step_s=SLOW_STEP_S)
    try:
        wait_for(lambda: has_share(run_dir, "island-1") and status(run_dir)["global_step"] > 12, "training", process)
        joiner = _join(run_dir)
        wait_for(lambda: has_share(run_dir, "late"), "a share of the learner that joined late", process)
        before = len(merged_rows(run_dir))
        os.kill(pid_of(run_dir, "--island island-1"), signal.SIGKILL)
        slow = pid_of(run_dir, "--island island-0")
        os.kill(slow, signal.SIGSTOP)
        wait_for(lambda: has_share(run_dir, "island-1", before), "the return of island-1", process)
        os.kill(slow, signal.SIGCONT)
        before = len(merged_rows(run_dir))
        os.kill(pid_of(run_dir, "syncer"), signal.SIGKILL)
        wait_for(lambda: status(run_dir)["epoch"] == 2, "another syncer", process)
        for name in ("island-0", "island-1", "late"):
            wait_for(lambda: has_share(run_dir, name, before), f"a share of {name}")  # noqa: B023
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANGS_S)
        assert process.returncode == 130, output
        joiner.wait(HANGS_S)
        yield run_dir
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        kill_processes(folder)


def _join(run_dir: Path) -> subprocess.Popen[bytes]:
    """A learner of a larger batch whose steps take half as long, started by hand."""
    words = ["learner", run_dir / "config.yaml", "--island", "late", "--islands.batch_size", "12"]
    settings = {**child_environment(load(run_dir / "config.yaml"), "late"), **environment(SLOW_STEP_S / 2)}
    with (run_dir / "logs" / "late.log").open("wb") as log:
        command = [sys.executable, "-m", "diloco_jax", *map(str, words), "--run-dir", str(run_dir)]
        return subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.long
def test_parameters_are_the_same_bit_for_bit(eventful: Path) -> None:
    incarnations = {path.name.rsplit(".", 2)[0]: 0 for path in (eventful / "tapes").iterdir()}
    assert incarnations.keys() == {"island-0", "island-1", "late"} and len(list((eventful / "tapes").iterdir())) >= 4
    taken = [
        line for path in (eventful / "tapes").iterdir() for line in path.read_text().splitlines() if '["state"' in line
    ]
    assert taken, "nobody took over a state"
    assert '["restart"' in (eventful / "tape.jsonl").read_text()
    result = run("replay", eventful, "--json", step_s=0)
    found = json.loads(result.stdout)
    assert result.returncode == 0 and found["identical"], found
    assert found["sha256"] == found["expected_sha256"]
    assert found["merged_rounds"] == (eventful / "tape.jsonl").read_text().count('["merged"')
    assert not found["difference"] and not found["step_difference"]


@pytest.mark.long
def test_every_sample_has_one_fate(eventful: Path) -> None:
    result = call("audit", eventful, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0 and found["violations"] == 0, found
    assert found["leased"] == sum(found[fate] for fate in ("merged", "overwritten", "released", "out"))
    assert found["released"] > 0 and found["merged"] > 0 and found["learner_tapes"] >= 4
    shared, own = found["corpora"][""], found["corpora"]["package"]
    assert all(shared[fate] + own[fate] == found[fate] for fate in ("leased", "merged", "released", "out"))
    assert own["merged"] > 0 < shared["merged"] and own["released"] > 0 and 0 < own["samples"] < shared["samples"]
    assert found["exclusions_repeated"] == (eventful / "tape.jsonl").read_text().count('["merged"')


@pytest.mark.long
def test_a_replay_needs_the_corpus_of_every_island(eventful: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.py").write_text("another text " * 1000)
    result = run("replay", eventful, "--data", f"package={other}", step_s=0)
    assert result.returncode == 2 and "island-1 trained on" in result.stderr and "--data package=PATH" in result.stderr


@pytest.mark.long
def test_one_wrong_number_is_noticed(eventful: Path, tmp_path: Path) -> None:
    """A value is said to be of one step earlier than it was: the round that it went into differs, and is named."""
    copy = tmp_path / "run"
    shutil.copytree(eventful, copy, ignore=shutil.ignore_patterns("checkpoints", "logs"))
    tape = copy / "tape.jsonl"
    lines = tape.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith('["FragmentValue"') and json.loads(line)[6] > 3)
    fields = json.loads(lines[at])
    fields[6] -= 1
    lines[at] = json.dumps(fields)
    tape.write_text("\n".join(lines) + "\n")
    result = run("replay", copy, "--until", fields[4] + 1, step_s=0)
    assert result.returncode == 1, result.stderr
    assert f"DIFFERENT, first in fragment {fields[5]}, version {fields[4]} (digest" in result.stdout


PROTOCOL = ProtocolConfig(sync_every=4, num_fragments=3)


def write_scenario(folder: Path, **changes: Any) -> Path:
    values = {"protocol": asdict(PROTOCOL), "total_steps": 60, "learners": 5} | changes
    path = folder / "scenario.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_protocol_steps_and_learners_are_the_simulations(tmp_path: Path) -> None:
    config = parse(merged(SMALL, {"islands": {"devices": 1}, "train": {"batch_size": 12}}), "the test")
    assert as_simulated(config, tmp_path) is config, "a run's folder has no scenario"
    write_scenario(tmp_path)
    simulated = as_simulated(config, tmp_path)
    assert simulated.protocol == PROTOCOL and simulated.train.steps == 60 and simulated.islands.count == 5
    assert simulated.island("").batch_size == config.island("").batch_size == 6
    assert simulated.model == config.model and simulated.optimizer == config.optimizer


def test_what_does_not_go_together_is_named(tmp_path: Path) -> None:
    config = parse(merged(SMALL, {"transport": {"queue_payloads_max": 8}}), "the test")
    write_scenario(tmp_path, protocol=asdict(ProtocolConfig(sync_every=24, num_fragments=20)))
    with pytest.raises(ValueError, match="queue_payloads_max is 8"):
        as_simulated(config, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"protocol": {}}', '{"protocol": {"speed": 1}, "total_steps": 1}'])
def test_broken_scenario_is_named(tmp_path: Path, text: str) -> None:
    write_scenario(tmp_path).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"scenario\.json cannot be read"):
        read_scenario(tmp_path)


def test_a_simulation_writes_what_is_read_here(tmp_path: Path) -> None:
    assert simulate(["--seed", "1", "--quiet", "--tapes", str(tmp_path)]) == 0
    scenario = read_scenario(tmp_path)
    assert scenario is not None and scenario.learners >= 1 and scenario.total_steps >= 1
