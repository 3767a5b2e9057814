"""The command: what it writes, runs, prints and refuses."""

import json
import os
from pathlib import Path

import pytest

from diloco_jax.cli.main import main
from tests.tools.launch.helpers import GPU, TESTDATA, plan, stand_ins

SMALL = str(TESTDATA / "small.yaml")


def test_without_out_it_only_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.chdir(tmp_path)
    assert main(["launch", "gce", SMALL]) == 0
    text = capsys.readouterr().out
    assert "==> islands/island-1.sh <==" in text and "Nothing was written" in text
    assert main(["launch", "gce", SMALL, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["out"] is None and answer["ran"] is False and answer["commands"][1] == "./project.sh create"
    assert answer["texts"].keys() == set(answer["files"])
    assert list(tmp_path.iterdir()) == []


def test_out_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "launch"
    assert main(["launch", "gke", SMALL, "--out", str(out)]) == 0
    assert "README.md" in capsys.readouterr().out and (out / "create.sh").stat().st_mode & 0o100
    assert main(["launch", "gke", SMALL, "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    (out / "create.sh").write_text("changed", encoding="utf-8")
    assert main(["launch", "gke", SMALL, "--out", str(out), "--force", "--json"]) == 0
    assert (out / "create.sh").read_text(encoding="utf-8") == plan("gke").files["create.sh"]
    assert json.loads(capsys.readouterr().out)["texts"] == {}


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("config.yaml", "config.yaml is not a folder; choose another --out"),
        ("config.yaml/below", "config.yaml is not a folder; choose another --out"),
        ("", "files of another origin; choose another --out"),
    ],
)
def test_force_overwrites_no_file_of_others(
    out: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, text = tmp_path / "config.yaml", "# mine\n" + Path(SMALL).read_text(encoding="utf-8")
    config.write_text(text, encoding="utf-8")
    assert main(["launch", "gke", str(config), "--out", str(tmp_path / out), "--force"]) == 2
    assert said in capsys.readouterr().err
    assert config.read_text(encoding="utf-8") == text and list(tmp_path.iterdir()) == [config]


def test_run_without_its_tools_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "gke", SMALL, "--run", "--out", str(tmp_path / "out")]) == 2
    assert "--run calls gcloud and kubectl, not found in PATH; install" in capsys.readouterr().err
    assert main(["launch", "gce", SMALL, "--run", "--out", str(tmp_path / "out")]) == 2
    assert "--run calls gcloud, not" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_settings_point_to_the_command_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "gke", SMALL, "--cloud.port", "0"]) == 2
    said = capsys.readouterr().err
    assert "cloud.port is 0" in said and f"`diloco launch gke {SMALL} --settings` lists all settings" in said
    with pytest.raises(SystemExit) as ended:
        main(["launch", "gke", SMALL, "--settings"])
    assert ended.value.code == 0 and "--cloud.port" in capsys.readouterr().out


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins before the real tools for this process; returns the file that lists their calls."""
    path = tmp_path / "calls"
    folder = stand_ins(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(path))
    monkeypatch.setenv("THERE", "nothing")
    monkeypatch.chdir(tmp_path)
    return path


def test_run_runs_everything_in_order(calls: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["launch", "tpu-vm", SMALL, "--run"]) == 0
    heard = capsys.readouterr().out
    lines = plan("tpu-vm").create
    places = [heard.index(f"[{number}/{len(lines)}] {line}") for number, line in enumerate(lines, 1)]
    assert places == sorted(places)
    assert (tmp_path / "runs" / "small-tpu-vm" / "certs" / "island-1.key").exists()
    said = calls.read_text(encoding="utf-8")
    assert said.index("queued-resources\0create\0small-island-1") < said.index("scp\0")


def test_run_stops_and_says_how_to_undo(
    calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "queued-resources create small-island-0")
    assert main(["launch", "tpu-vm", SMALL, "--run", "--out", "there", "--json"]) == 1
    output = capsys.readouterr()
    assert output.out == "" and "no capacity" in output.err
    assert "status 3" in output.err and "there/delete.sh" in output.err and "there/create.sh" in output.err
    assert "small-island-1\0--zone" not in calls.read_text(encoding="utf-8")


WRONG = dict(line.split(" | ") for line in (TESTDATA / "wrong.txt").read_text(encoding="utf-8").splitlines())
ALIKE = ("--islands.each", "{}")


@pytest.mark.parametrize(
    ("way", "overrides", "said"),
    [
        ("tpu-vm", (*ALIKE, "--islands.topology", "tpu7x:2x2x2", "--islands.zone", "us-east5-a"), "runtime"),
        ("sky", (*GPU, "--islands.devices", "auto"), "island-0 has no number of GPUs"),
        ("sky", (*GPU, "--gpu.accelerator", ""), "launch sky needs gpu.accelerator"),
        ("sky", (*GPU, "--gpu.options", "-p"), "gpu.options has '-p'"),
        ("sky", (*GPU, "--gpu.accelerator", "H 100"), "gpu.accelerator is 'H 100'"),
        ("slurm", (*GPU, "--cloud.bucket", "", "--data.path", "gs://{bucket}/web"), "cloud.bucket is empty"),
    ],
)
def test_ways_say_what_they_cannot_do(way: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(way, *overrides)


@pytest.mark.parametrize("overrides", WRONG)
def test_wrong_settings_are_one_message(overrides: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "gke", SMALL, *overrides.split()]) == 2
    error = capsys.readouterr().err
    assert WRONG[overrides] in error and error.count("\n") == 1


@pytest.mark.parametrize("what", ["topology", "zone"])
def test_an_island_that_is_nowhere(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    text = Path(SMALL).read_text(encoding="utf-8")
    gone = {"topology": 'topology: "v6e:2x4", ', "zone": ", zone: europe-west4-a"}[what]
    assert gone in text
    config.write_text(text.replace(gone, ""), encoding="utf-8")
    assert main(["launch", "gce", str(config)]) == 2
    assert f"islands.each.island-1.{what}" in capsys.readouterr().err
