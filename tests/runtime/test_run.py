"""A whole run with real processes to its end, and what can be done with it after."""

import contextlib
import json
import math
import re
import time
from pathlib import Path

import pytest

from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import replay
from diloco_jax.runtime.records.telemetry import read_metrics
from tests.limits import HANGS_S
from tests.runtime.helpers import call, processes_of, start, trained, wait_for, write_config
from tests.runtime.syncer.scraped import get, samples

pytestmark = [pytest.mark.long, pytest.mark.net]

SUMMARY_KEYS = {"eval_loss", "eval_bits_per_byte", "tokens", "wall_s", "global_steps", "goodput", "uptime"}
SUMMARY_KEYS |= {"waiting_for_data", "contributors_per_round", "unmerged_fragments", "steps_per_round", "alarms"}
SUMMARY_KEYS |= {"wire", "learners"}
LEARNER_KEYS = {"local_steps", "tokens", "participation", "restarts", "step_overhead"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that ended by itself."""
    folder = tmp_path_factory.mktemp("finished")
    outlets = {
        "trackers": ["tensorboard", "docs.examples.own_tracker:Csv"],
        "callbacks": [
            "docs.examples.own_callback:Told",
            "tests.runtime.outlets:Raising",
            "tests.runtime.outlets:Waiting",
        ],
    }
    config = write_config(folder, **outlets, syncer={"metrics": "127.0.0.1:0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILOCO_TEST_SCRAPED", str(folder / "scraped"))
        process = start("train", config, "--run-dir", folder / "run", "--quiet")
    log = folder / "run" / "logs" / "syncer.log"
    told = wait_for(lambda: log.exists() and re.search(r"metrics at (\S+)", log.read_text()), "metrics", process)
    # The syncer has ended.
    with contextlib.suppress(OSError):
        while process.poll() is None:
            page = get(told[1])
            (folder / "run" / "scraped.txt").write_text(page)
            if samples(page).get(("diloco_run_state", (("state", "complete"),))):
                (folder / "scraped").touch()
            time.sleep(0.05)
    said, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0 and processes_of(folder / "run") == {}, said
    return folder / "run"


def test_summary_has_every_key_and_adds_up(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["learners"].keys() == {"island-0", "island-1"}
    assert all(row.keys() >= LEARNER_KEYS for row in summary["learners"].values())
    wire = summary["wire"]
    assert wire["data_parallel_bytes"] > 0 and wire["by_island"].keys() == summary["learners"].keys()
    for way in ("up_bytes", "down_bytes"):
        assert wire[way] == sum(moved[way] for moved in wire["by_island"].values())
    assert summary["global_steps"] == 80 and summary["complete"] and not summary["unmerged_fragments"]
    assert summary["tokens"] == sum(row["tokens"] for row in summary["learners"].values())
    assert summary["tokens"] == 4 * 32 * sum(row["local_steps"] for row in summary["learners"].values())
    assert 0 < summary["goodput"] <= 1 and 0 < summary["uptime"] <= 1
    assert 1 <= summary["contributors_per_round"] <= 2
    # The loss is below that of uniform guesses, ln 256 = 5.545, so the model has learned.
    assert 2.0 < summary["eval_loss"] < 5.5


def test_data_parallel_ends_with_the_same_keys(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, algorithm="data_parallel", train={"steps": 0, "tokens": 1500, "eval_every": 0})
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS and summary["complete"]
    assert summary["global_steps"] == 6 and summary["merged_tokens"] == 6 * 8 * 32, "the first multiple above 1500"
    assert [row.keys() >= LEARNER_KEYS for row in summary["learners"].values()] == [True]


def test_wire_bytes_are_those_of_the_fragments(finished: Path) -> None:
    """Up: four bits per value, scales and reports. Down: as many in steps to each learner, whole values to join."""
    summary = json.loads((finished / "summary.json").read_text())
    records = list(read_metrics(finished / "metrics.jsonl"))
    parts = sum(len(r["members"]) for r in records if r["kind"] == "merged")
    fragment = summary["num_parameters"] / 6
    wire = summary["wire"]
    up = (0.5 + 4 / 256) * fragment * parts
    # A late island received whole states.
    given = (finished / "tape.jsonl").read_text().count('\n["StatePart"')
    states = 1.5 * 3 * 4 * summary["num_parameters"] * given
    assert 0.7 * up < wire["up_bytes"] < 1.5 * up + 400 * summary["tokens"] / 128 + states
    joining, steps = 2 * 4 * summary["num_parameters"], (0.5 + 4 / 256) * fragment * 2 * 80
    assert joining + 0.7 * steps < wire["down_bytes"] < 2 * joining + 1.5 * steps + states


def test_tape_replays_to_the_same_rounds(finished: Path) -> None:
    from diloco_jax.settings.fingerprint import fingerprint
    from diloco_jax.settings.text import load

    config = load(finished / "config.yaml")
    lines = (finished / "tape.jsonl").read_text().splitlines()
    hello = next(json.loads(line) for line in lines if line.startswith('["Hello"'))
    pairs = tuple((what, value) for what, value in hello[4])
    assert pairs == fingerprint(config, dict(pairs)["model layout"], dict(pairs)["corpus"])
    machine = Syncer(config.protocol, config.train.steps, pairs)
    effects = [effect for batch in replay(lines, machine) for effect in batch]
    merged = [(n.global_step, list(n.members)) for n in effects if getattr(n, "kind", "") == "merged"]
    recorded = [r for r in read_metrics(finished / "metrics.jsonl") if r["kind"] == "merged"]
    assert merged == [(r["global_step"], r["members"]) for r in recorded]
    # An island that started late may cause one of these.
    abandoned = sum(getattr(n, "kind", "") == "abandoned" for n in effects)
    assert len(merged) + abandoned == 80 and len(merged) > 70


def test_eval_report_and_status_read_a_run(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    result = call("eval", finished, "--json")
    assert result.returncode == 0, result.stderr
    evaluation = json.loads(result.stdout)
    assert evaluation["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)
    assert evaluation["bits_per_byte"] == pytest.approx(evaluation["loss"] / 0.6931471805599453)
    assert evaluation["tokens"] == 2 * 16 * 32
    assert (finished / "report.html").stat().st_size > 1000  # train wrote it
    (finished / "report.html").unlink()
    assert call("report", finished).returncode == 0
    assert (finished / "report.html").exists()
    told = json.loads(call("status", finished, "--json").stdout)
    assert told["global_step"] == 80 and told["state"] == "complete" and len(told["learners"]) == 2
    assert "island-1" in call("status", finished).stdout


def test_every_metric_of_both_islands_gets_out(finished: Path) -> None:
    records = list(read_metrics(finished / "metrics.jsonl"))
    found = {r["learner"]: r for r in records if r["kind"] == "metrics"}
    assert found.keys() == {"island-0", "island-1"}
    names = {"loss", "grad_norm", "learning_rate", "tokens_per_s", "model_flops_per_s", "step_s", "perplexity"}
    for record in found.values():
        values = record["values"]
        assert names <= values.keys() and 0 < values["learning_rate"] < 0.0031 and 0 < values["grad_norm"] < 100
        assert values["perplexity"] == pytest.approx(math.exp(values["loss"]), rel=0.5)
        assert "mfu" not in values, "nobody knows the peak of these devices"
    together = [r for r in records if r["kind"] == "merged_metrics"]
    assert any(r["islands"] == ["island-0", "island-1"] and names <= r["values"].keys() for r in together)
    told = {row["learner"]: row for row in json.loads((finished / "status.json").read_text())["learners"]}
    assert told.keys() == found.keys()
    assert '"MetricsReport"' not in (finished / "tape.jsonl").read_text()
    page = (finished / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    assert {"grad_norm", "learning_rate", "perplexity"} <= data["metrics"].keys()
    (rounds,) = [r for r in records if r["kind"] == "round" and r["global_step"] == 40]
    assert rounds["opened_s"] <= rounds["met_s"] <= rounds["closed_s"] <= rounds["pulled_s"] <= rounds["t"]
    (this,) = [each for each in data["rounds"] if each["step"] == 40]
    assert set(rounds["values"]) >= set(this["merged"]) and all(late_s >= 0 for late_s in this["arrived"].values())
    assert any(each["arrived"] for each in data["rounds"]), "nobody told when a new version was there"
    summary = json.loads((finished / "summary.json").read_text())
    assert data["times"]["goodput"] == pytest.approx(summary["goodput"], abs=0.02)


def test_the_drift_of_both_islands_gets_out(finished: Path) -> None:
    records = list(read_metrics(finished / "metrics.jsonl"))
    both = {r["global_step"] for r in records if r["kind"] == "merged" and len(r["members"]) == 2}
    found = [r for r in records if r["kind"] == "drift"]
    assert both and {(r["global_step"], r["learner"]) for r in found} == {
        (n, f"island-{i}") for n in both for i in (0, 1)
    }
    # An island that is ready first trains alone, on a loaded machine for many steps, so its way is longer.
    for name, least, most in (("drift_norm_ratio", 1.0, 1000.0), ("drift_cosine", -1.0, 1.0)):
        values = [r["values"][name] for r in found if r["values"][name] is not None]
        assert values and all(least <= value <= most for value in values)
    rows = json.loads(call("status", finished, "--json").stdout)["learners"]
    assert all(1.0 <= row["drift_norm_ratio"] < 1000.0 and abs(row["drift_cosine"]) <= 1.0 for row in rows)
    assert '"drift' not in (finished / "tape.jsonl").read_text()


def test_prometheus_saw_the_run(finished: Path) -> None:
    """Asked twenty times a second while it trained; this is its last answer."""
    found = samples((finished / "scraped.txt").read_text())
    summary = json.loads((finished / "summary.json").read_text())
    records = list(read_metrics(finished / "metrics.jsonl"))
    closed = sum(record["kind"] == "closed" for record in records)
    merged = [record for record in records if record["kind"] == "merged"]
    for phase in ("quorum", "grace", "pull", "merge"):
        count = found["diloco_round_phase_seconds_count", (("phase", phase),)]
        assert 0 < count <= (closed if phase in ("quorum", "grace") else len(merged))
    assert found["diloco_global_step", ()] == closed == 80 and found["diloco_rounds_merged_total", ()] == len(merged)
    assert found["diloco_values_merged_total", ()] == sum(len(record["members"]) for record in merged)
    assert 0 < found["diloco_broadcast_seconds_count", ()] <= 2 * len(merged)
    assert found["diloco_run_state", (("state", "complete"),)] == 1
    assert 0 < found["diloco_goodput_ratio", ()] <= 1
    for name, row in summary["learners"].items():
        label = (("island", name),)
        assert 0 < found["diloco_island_tokens_total", label] <= row["tokens"]
        assert found["diloco_island_step_seconds", label] > 0 and found["diloco_island_gradient_norm", label] > 0
        assert found["diloco_island_loss", label] < 6
    assert found["diloco_tokens_merged_total", ()] == summary["merged_tokens"]


def test_trackers_and_callbacks_of_a_run(finished: Path) -> None:
    groups = {"islands/island-0", "islands/island-1", "merged"}
    folders = {path.parent.relative_to(finished / "tensorboard").as_posix() for path in finished.rglob("events.out*")}
    assert folders == groups
    lines = [line.split(",") for line in (finished / "values.csv").read_text().splitlines()]
    assert {name.rpartition("/")[0] for _, name, _ in lines} == groups
    assert {f"islands/island-{n}/perplexity" for n in (0, 1)} | {"merged/eval_loss"} <= {name for _, name, _ in lines}
    logs = {name: (finished / "logs" / f"{name}.log").read_text() for name in ("syncer", "island-0", "island-1")}
    assert "evaluated at 80: " in logs["syncer"] and "event finished: round 80 finished: run complete" in logs["syncer"]
    for log, method in zip(logs.values(), ("on_round", "on_step", "on_step"), strict=True):
        assert log.count(f"failed in {method} and is not called any more") == log.count("out of order") == 1


def test_the_compiler_of_a_run_says_nothing(finished: Path) -> None:
    assert (finished / "logs" / "compiler-island-0.log").read_text() == ""


def test_a_run_can_be_asked_to_write(finished: Path) -> None:
    told = [call("sample", finished, "--tokens", "20", "--prompt", "def ", "--json", *more) for more in ((), ())]
    assert told[0].returncode == 0, told[0].stderr
    text = json.loads(told[0].stdout)
    assert text["global_step"] == 80 and text["prompt"] == "def " and len(text["text"]) == 20
    assert told[0].stdout == told[1].stdout, "equal seeds draw the same"
