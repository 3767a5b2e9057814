"""Islands that read their own data in real processes: killed and returned, their batches are those of one reading."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.limits import HANGS_S
from tests.runtime.helpers import (
    ROOT,
    call,
    interrupted,
    island_pid,
    json_lines,
    kill_processes,
    merged,
    notes,
    start,
    wait_for,
)
from tests.runtime.own_loop.test_join import OWN

pytestmark = pytest.mark.net

HERE = Path(__file__).parent
LOOP = HERE / "reading_loop.py"
EVERY = 20
# TensorFlow and torchdata, beside the packages of this interpreter.
OTHERS = Path.home() / ".cache" / "diloco-trainers" / f"loaders-py{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The loops run here, and write their reads here.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path / "run"
    kill_processes(tmp_path)


def train(folder: Path, python: str, **changes: Any) -> "subprocess.Popen[str]":
    own = merged(OWN, {"islands": {"command": [python, str(LOOP)]}, "protocol": {"snapshot_every": EVERY}})
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(merged(own, changes)), encoding="utf-8")
    return start("train", path, "--quiet", "--run-dir", folder / "run", step_s=0.04)


def reads(folder: Path, name: str, host: int = 0) -> dict[int, list[list[int]]]:
    """The batches that each incarnation of an island read, by incarnation."""
    found: dict[int, list[list[int]]] = {}
    for line in (folder / f"{name}.{host}.reads").read_text().splitlines():
        incarnation, step, *samples = map(int, line.split())
        batches = found.setdefault(incarnation, [])
        assert step == len(batches)
        batches.append(samples)
    return found


def uninterrupted(python: str, count: int, batches: int) -> list[list[list[int]]]:
    """The first batches of every island's shard, read in one go by a process that knows no island."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(HERE)!r}); from itertools import islice; import reading_loop\n"
        f"found = [islice(iter(reading_loop.batches(index, {count})), {batches}) for index in range({count})]\n"
        "print(json.dumps([[reading_loop.numbers(batch) for batch in shard] for shard in found]))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def resumed_at(run_dir: Path, name: str, first: int, second: int) -> int:
    """The step of the first incarnation where the second's loader continued; the tape of the first has that save."""
    tapes = [json_lines(run_dir / "tapes" / f"{name}.{incarnation}.jsonl") for incarnation in (first, second)]
    (line,) = [line for line in tapes[1] if line[0] == "loader"]
    saved = [line[1] for line in tapes[0] if line[0] == "saved"]
    assert line[1] == first and line[2] in saved[-2:], (line, saved)
    return int(line[2])


def check_sequence(folder: Path, name: str, want: list[list[int]], host: int = 0) -> tuple[int, int]:
    """Two incarnations read `want` with one bounded overlap; returns where the second began, and the overlap."""
    (first, before), (second, after) = sorted(reads(folder, name, host).items())
    at = resumed_at(folder / "run", name, first, second)
    assert before == want[: len(before)]
    assert after == want[at : at + len(after)] and after
    # The kill may come while the newest save is being written, and then the one before it counts.
    assert at > 0 and 0 <= len(before) - at <= 3 * EVERY
    return at, len(before) - at


def saved_whole(run_dir: Path, name: str) -> bool:
    """Whether an island has a state that its next incarnation continues from, and the tape has its line.

    The island writes the line when it starts to save, and the record of the state last.
    """
    taped = {tuple(line[1:]) for path in tapes_of(run_dir, name) for line in json_lines(path) if line[0] == "saved"}
    for record in (run_dir / "states" / name).rglob("step_*.json"):
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            content = json.loads(record.read_text())
            _, local_step, global_step, *_ = content["name"]
            if "loader" in content and (local_step, global_step) in taped:
                return True
    return False


def tapes_of(run_dir: Path, name: str) -> list[Path]:
    """The tapes of an island's incarnations, oldest first."""
    return sorted((run_dir / "tapes").glob(f"{name}.*"))


def kill_once(process: "subprocess.Popen[str]", run_dir: Path, name: str) -> None:
    """Kill an island that has saved a state, and wait until it makes steps again."""
    wait_for(lambda: saved_whole(run_dir, name), f"a saved state of {name}", process)
    os.kill(island_pid(run_dir, name), signal.SIGKILL)
    wait_for(lambda: notes(run_dir, "joined", name) == 2, f"the return of {name}", process)

    def steps_again() -> bool:
        return sum(line[0] == "step" for line in json_lines(tapes_of(run_dir, name)[-1])) > 5

    wait_for(steps_again, f"steps of {name}", process)


def kill_and_return(tmp_path: Path, python: str) -> None:
    """Two islands with different loaders: each is killed and returns, and the audit counts what they trained again."""
    run_dir = tmp_path / "run"
    process = train(tmp_path, python, train={"steps": 1_000_000})
    for name in ("island-1", "island-0"):
        kill_once(process, run_dir, name)
    interrupted(process)
    audit = json.loads(call("audit", run_dir, "--json").stdout)
    text = call("audit", run_dir).stdout
    assert "every loop read its own data" in text and "lease" not in text
    assert audit["violations"] == 0 and sorted(audit["data"]) == ["island-0", "island-1"]
    length = max(sum(map(len, reads(tmp_path, name).values())) for name in audit["data"])
    want = uninterrupted(python, 2, length)
    for index, name in enumerate(audit["data"]):
        at, overlap = check_sequence(tmp_path, name, want[index])
        found = audit["data"][name]
        taped, after = (
            [line[1] for line in json_lines(run_dir / "tapes" / f"{name}.{incarnation}.jsonl") if line[0] == "step"]
            for incarnation in sorted(reads(tmp_path, name))
        )
        # What its tape has is counted to the step. The kill may come before the last steps are on the tape, and the run
        # may end before the second incarnation has made all of them again.
        again = min(max(taped) - at, len(after))
        assert found["guarantee"] == "resumed" and found["steps_again"] == again, (found, at, max(taped), len(after))
        assert 0 <= min(overlap, len(after)) - again < EVERY, (found, overlap)
        assert f"{name}: resumed" in text and f"shard {index} of 2" in (run_dir / "logs" / f"{name}.log").read_text()


@pytest.mark.long
def test_two_kinds_of_loaders_continue_after_a_kill_where_the_newest_save_was(tmp_path: Path, run_dir: Path) -> None:
    kill_and_return(tmp_path, sys.executable)


@pytest.fixture(scope="module")
def others() -> str:
    """An interpreter with TensorFlow and torchdata; the other packages are those of this one."""
    python = OTHERS / "bin" / "python"
    if not (OTHERS / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", OTHERS], check=True)
        for words in (["tensorflow-cpu==2.21.0"], ["--no-deps", "torchdata==0.11.0"]):
            done = subprocess.run([python, "-m", "pip", "install", "-q", *words], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip cannot install {words[-1]}: {done.stderr[-300:]}")
        (OTHERS / "complete").touch()
    (site,) = (OTHERS / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")
    return str(python)


@pytest.mark.trainers
@pytest.mark.parametrize("kinds", ["tensorflow,torchdata", "hugging_face,tensorflow"])
def test_loaders_of_other_libraries_continue_after_a_kill(
    kinds: str, tmp_path: Path, run_dir: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_TEST_LOADERS", kinds)
    kill_and_return(tmp_path, others)


@pytest.mark.nightly
def test_all_hosts_of_an_island_continue_at_the_same_batch(tmp_path: Path, run_dir: Path) -> None:
    islands = {"count": 1, "hosts": 2, "devices": 4}
    process = train(tmp_path, sys.executable, islands=islands, train={"steps": 160}, protocol={"sync_every": 3})
    states = run_dir / "states" / "island-0"
    wait_for(
        lambda: all(any(states.glob(f"host-{host}-of-2/*.loader")) for host in (0, 1)), "states of both hosts", process
    )
    wait_for(lambda: len(list(islice(states.glob("host-0-of-2/*.json"), 2))) == 2, "a second state", process)
    os.kill(island_pid(run_dir, "island-0"), signal.SIGKILL)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, output
    (want,) = uninterrupted(sys.executable, 1, 400)
    found = {check_sequence(tmp_path, "island-0", want, host)[0] for host in (0, 1)}
    assert len(found) == 1


@pytest.mark.nightly
def test_a_new_run_does_not_continue_at_the_position_of_another_run_in_its_folder(
    tmp_path: Path, run_dir: Path
) -> None:
    changes = {"islands": {"count": 1}, "train": {"steps": 60}}
    for _ in range(2):
        output, _ = train(tmp_path, sys.executable, **changes).communicate(timeout=HANGS_S)
        assert run_dir.joinpath("summary.json").exists(), output
        # The syncer's part of the folder is lost, as on another machine.
        shutil.move(run_dir / "states", tmp_path / "states")
        log = (run_dir / "logs" / "island-0.log").read_text()
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        shutil.move(tmp_path / "states", run_dir / "states")
    (_, first), (_, second) = sorted(reads(tmp_path, "island-0").items())
    assert first[:20] == second[:20] == uninterrupted(sys.executable, 1, 20)[0]
    assert "are of another run: they have its id" in log
