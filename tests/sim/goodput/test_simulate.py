"""`diloco simulate` as a user meets it: tables, JSON, wrong input, an interrupt."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_jax.cli.main import main
from diloco_jax.sim.goodput.hardware import Hardware
from diloco_jax.sim.goodput.methods import Cell, simulate
from diloco_jax.sim.goodput.simulate import Options, plan_cells, run_cells
from tests.limits import HANGS_S
from tests.runtime.helpers import wait_for

QUICK = ["--methods", "rigid", "decoupled", "--learners", "2", "4", "--chips", "1.2m", "--hours", "0.5"]


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *QUICK, "--seed", "3", "--json", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["seed"] == 3 and result["events"] == sum(row["events"] for row in result["rows"])
    assert result["wall_s"] >= 0
    named = [(row["method"], row["learners"]) for row in result["rows"]]
    assert named == [("rigid", 1), ("decoupled", 2), ("decoupled", 4)]
    for row in result["rows"]:
        assert row["chips"] == 1.2e6 and 0 < row["goodput"] <= row["uptime"] <= 1
    assert result["rows"][0]["contributors_per_round"] is None
    assert 1 <= result["rows"][2]["contributors_per_round"] <= 4
    assert "3 of 3 after" in err, "progress goes where JSON does not"


def test_processes_beside_each_other_change_nothing() -> None:
    options = Options(learners=(1, 2, 3), chips=("600k",), hours=0.2, seed=4)
    cells = plan_cells(options)
    alone = [result.row for result in run_cells(cells, 1, lambda _: None)]
    assert [result.row for result in run_cells(cells, 2, lambda _: None)] == alone


def test_simulator_and_checkers_start_without_jax() -> None:
    program = (
        "import sys, diloco_jax.sim.invariants.__main__; from diloco_jax.cli.main import main;"
        "main(['simulate', '--fast', '--hours', '1']);"
        "assert not {'jax', 'numpy', 'grpc'} & set(sys.modules), sorted(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr


def test_settings_reach_the_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--methods", "decoupled", "--learners", "4", "--chips", "1k", "--hours", "0.2", "--json"]
    quiet = ["--hardware.mtbi-chip-s", "inf", "--hardware.step-s=2", "--protocol.quorum", "4"]
    assert main(["simulate", *words, *quiet]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["contributors_per_round"] == 4.0
    assert row["learner_steps"] == pytest.approx(4 * 720 / 2, abs=8)


def test_settings_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--settings"]) == 0
    text = capsys.readouterr().out
    assert main(["simulate", "--methods", "rigid", "--chips", "150k", "--hours", "0.1"]) == 0
    assert "\n1 simulation, " in capsys.readouterr().out
    assert "--hardware.down-s  (default: 7.7)" in text and "our calibration against the paper's Table 1" in text
    assert "--wan.delay-s" in text and "--protocol.quorum" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--chips 100", "100 chips, but there are 192 slices"),
        ("--learners 500", "500 learners, but there are 192 slices"),
        ("--learners 0", "0 learners, but there are 192 slices"),
        ("--hours 1e9", "at most 8784"),
        ("--workers -1", "--workers is -1"),
        ("--hardware.step-s", "--hardware.step-s needs a value"),
        ("--hardware.slices 1.5", "--hardware.slices is 1.5, but must be a whole number"),
        ("--hardware.step-s 0", "--hardware.step-s is 0.0, but must be above 0"),
        ("--hardware.step-s nan", "--hardware.step-s is nan"),
        ("--hardware.mtbi-chip-s nan", "--hardware.mtbi-chip-s is nan"),
        ("--hardware.return-scale-s inf", "--hardware.return-scale-s is inf"),
        ("--hardware.return-c 0.001", "--hardware.return-c is 0.001, but must be from 0.05 to 100"),
        ("--hardware.mtbi-chip-s 1e-9", "must be at least 1 (inf: nothing fails)"),
        ("--hardware.step-s 1e-9", "more than 1e+09; simulate fewer --hours"),
        ("--protocol.heartbeat-s 1e-9", "more than 1e+09; simulate fewer --hours"),
        ("--chips inf", "inf chips; simulate at most 1e+12"),
        ("--chips nan", "nan chips; simulate at most 1e+12"),
        ("--wan.fragment-bytes 1e300", "must be 0 to 1e+15"),
        ("--protocol.recover-from-peers maybe", "use true or false"),
        ("--protocol.quorum 0", "protocol.quorum is 0"),
        ("--tapes x", "--tapes writes the tapes of one run"),
        ("--hours 0.001", "0.001 hours are shorter than one step of 4.6 s"),
        ("--fast --protocol.wait-steps 0.5", "--fast leaves out the machines that wait"),
        ("--protocol.wait-steps nan", "protocol.wait_steps is nan"),
        ("--methods decoupled --protocol.quorum 5 --hours 0.1", "quorum is 5, but 2 learners"),
        (
            "--methods sync --learners 5000 --hardware.slices 5000 --hours 0.01",
            "--learners is 5000; the protocol's machines run with at most 4096",
        ),
        (
            "--methods sync --protocol.sync-every 1e6 --protocol.num-fragments 1e6 --hours 0.01",
            "--protocol.num-fragments is 1000000; the protocol's machines run with at most 10000",
        ),
        ("--tapes '' --hours 0.1", "--tapes is empty"),
    ],
)
def test_wrong_input_is_one_line(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workers", "1", *shlex.split(options)]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and len(err.strip().splitlines()) == 1


def test_what_is_named_twice_is_simulated_once() -> None:
    options = Options(methods=("sync", "sync"), learners=(2, 2), chips=("600k", "600000"))
    assert len(plan_cells(options)) == 1


# The first interrupt comes while the processes start, the second one later.
@pytest.mark.parametrize("after_s", [0.1, 0.5])
def test_an_interrupt_ends_all_processes(after_s: float) -> None:
    command = [sys.executable, "-m", "diloco_jax", "simulate", "--learners", "16", "--hours", "500", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        assert b"20 simulations on 2 processes" in process.stderr.readline()
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130 and b"Traceback" not in err


def workers_of(parent: int) -> list[int]:
    """Return the processes that simulate, on systems that list child processes."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [
        int(child)
        for child in children.read_text(encoding="ascii").split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def running(process: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found below /proc")
def test_processes_end_with_their_parent_and_are_missed() -> None:
    command = [sys.executable, "-m", "diloco_jax", "simulate", "--learners", "16", "--hours", "500", "--workers", "2"]
    for victim in ("parent", "worker"):
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            wait_for(lambda process=process: len(workers_of(process.pid)) == 2, "two workers")
            workers = workers_of(process.pid)
            time.sleep(0.5)  # they start
            os.kill(process.pid if victim == "parent" else workers[0], signal.SIGKILL)
            wait_for(lambda workers=workers: not any(map(running, workers)), "their end")
            _, err = process.communicate(timeout=HANGS_S)
        if victim == "worker":
            assert process.returncode == 1 and b"was killed" in err and b"Traceback" not in err


def test_tapes_can_be_written_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--methods", "decoupled", "--learners", "2", "--chips", "1.2m", "--hours", "0.05"]
    assert main([*words, "--tapes", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made" / "tape.jsonl").exists()
    refused = {"made": "holds a tape already", "made/tape.jsonl": "is a file", "made/tape.jsonl/x": "is a"}
    for folder, said in refused.items():
        capsys.readouterr()
        assert main([*words, "--tapes", str(tmp_path / folder)]) == 2
        out, err = capsys.readouterr()
        assert not out and said in err and len(err.splitlines()) == 1, "said before anything is simulated"


def test_a_run_that_does_not_end_gives_no_tapes(tmp_path: Path) -> None:
    hardware, folder = Hardware(mtbi_chip_s=1.0), tmp_path / "made"
    with pytest.raises(ValueError, match="did not reach global step 2 within 100 times"):
        simulate(Cell(hardware, "decoupled", 2, 6e5, hours=0.003, seed=0, tapes=folder))
    assert not folder.exists()
