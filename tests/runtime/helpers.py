"""Start the real `diloco` command as a user does, on a small job."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import yaml

from diloco_jax.cli.main import main
from diloco_jax.runtime.records.telemetry import read_metrics
from tests.limits import HANGS_S

ROOT = Path(__file__).parents[2]
STEP_S = 0.02
# For runs that wait for events and not for steps: processes that start have the processors to themselves.
SLOW_STEP_S = 0.1
# The processes that tests started, as long as a test has them: `kill_processes` ends those that a failed test left.
STARTED: WeakSet["subprocess.Popen[str]"] = WeakSet()
SMALL: dict[str, Any] = {
    "name": "small",
    "islands": {"count": 2, "devices": 2, "restart_delay_s": 0.1},
    "train": {
        "steps": 80,
        "batch_size": 8,
        "seq_len": 32,
        "eval_every": 40,
        "eval_batches": 2,
        "final_eval_batches": 2,
    },
    "model": {
        "module": "tests.runtime.paced:PacedDecoder",
        "args": {"dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
        | {"seq_len_max": 32},
    },
    "optimizer": {"warmup_steps": 5, "learning_rate": 0.003},
    "protocol": {"sync_every": 6, "num_fragments": 6},
    "trackers": [],
}


def environment(step_s: float | Path = STEP_S) -> dict[str, str]:
    """A user's environment, without what the test session sets for itself.

    Args:
        step_s: inner steps take at least so many seconds, or as many as are in this file (`set_pace`).
    """
    dropped = ("JAX_", "NPROC", "XLA_", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    programs = {
        "JAX_COMPILATION_CACHE_DIR": os.environ["DILOCO_TEST_PROGRAMS"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    return kept | programs | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "DILOCO_TEST_STEP_S": str(step_s)}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested changes."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "args"
        result[key] = merged(result[key], value) if both else value
    return result


def write_config(folder: Path, **changes: Any) -> Path:
    """A config file of the small job with changes."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merged(SMALL, changes)), encoding="utf-8")
    return path


def set_pace(file: Path, step_s: float) -> None:
    """Let each inner step take at least so many seconds from now on; islands read the file while they train."""
    draft = file.with_suffix(".draft")
    draft.write_text(str(step_s))
    draft.replace(file)


def start(*arguments: object, step_s: float | Path = STEP_S) -> subprocess.Popen[str]:
    """The command in the background."""
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco_jax", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(step_s),
        start_new_session=True,
    )
    STARTED.add(process)
    return process


def run(*arguments: object, timeout_s: float = HANGS_S, step_s: float = STEP_S) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "diloco_jax", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(step_s),
        timeout=timeout_s,
    )


def trained(folder: Path, *, timeout_s: float = HANGS_S, **changes: Any) -> Path:
    """Train the small job with changes to its end; returns the run's folder."""
    done = run("train", write_config(folder, **changes), "--run-dir", folder / "run", "--quiet", timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def replayed(run_dir: Path) -> None:
    """Replay a run bit for bit."""
    done = run("replay", run_dir, "--json", step_s=0)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["identical"] and not found["step_difference"], done.stdout + done.stderr


def interrupted(process: "subprocess.Popen[str]") -> str:
    """Interrupt a run as Ctrl-C does, and return its output."""
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130, output
    return str(output)


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, for commands that only read or are refused; a start would cost seconds."""
    words, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        # The parsers of arguments end the process this way.
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def wait_for(
    condition: Callable[[], Any],
    what: str,
    process: "subprocess.Popen[str] | None" = None,
    within_s: float = HANGS_S,
) -> Any:
    """Poll until the condition holds, and return its value; do not wait for a process that has ended."""
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        ended = process is not None and process.poll() is not None
        if value := condition():
            return value
        assert not ended, f"the process ended before {what}: {process.stdout.read()}"
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {within_s:g} s")


def json_lines(path: Path) -> list[Any]:
    """Return the whole lines of a file that may still be written, or whose writer was killed."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def notes(run_dir: Path, kind: str, name: str) -> int:
    """Return the number of records of this kind about an island."""
    path = run_dir / "metrics.jsonl"
    return sum(r["kind"] == kind and name in r["members"] for r in (read_metrics(path) if path.exists() else ()))


def status(run_dir: Path) -> dict[str, Any]:
    """The newest status, or {}."""
    path = run_dir / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def processes_of(run_dir: Path) -> dict[int, str]:
    """pid -> command line of every live process that serves this run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(run_dir) in command and " train " not in command:
            found[int(entry.name)] = command
    return found


def island_pid(run_dir: Path, name: str) -> int:
    """The process of an island, by what it was told."""
    for entry in Path("/proc").iterdir():
        try:
            told = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else ()
        except OSError:
            continue
        if f"DILOCO_ISLAND={name}".encode() in told and f"DILOCO_RUN_DIR={run_dir}".encode() in told:
            return int(entry.name)
    return 0


def kill_processes(folder: Path) -> None:
    """SIGKILL for every process that serves a run in this folder; some may end by themselves meanwhile.

    Commands that a test started and did not wait for end too, and their pipes are closed.
    """
    left = [each for each in STARTED if any(str(folder) in word for word in each.args)]
    for process in left:
        process.kill()
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in left:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
