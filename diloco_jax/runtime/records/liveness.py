"""Signs of life of a run: its last status, whether the process that wrote it still runs, and phases of starting ones.

A status names its process, so that a reader on the same machine can detect a file that no process updates any more.

A starting process has a file health/NAME.phase with one line for people, until it trains or listens. Progress follows a
comma: "compiling or loading programs, 3 of 7 are ready, now: adopt of fragment 1".

`diloco train` writes health/NAME.restart when an island's process has ended, and the alarm about the island shows it.
"""

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.runtime.records.files import CONFIG_FILE, HEALTH, SUMMARY_FILE, TAPE_FILE, command, resume_command
from diloco_jax.runtime.records.signals import PARENT_ENV

# Ten times the pause between two status files of a syncer.
QUIET_S = 5.0
# Readers repeat the words of a phase that lasts after this time, and then each time when it has lasted twice as long.
REPEAT_S = 10.0
# The limit for another machine's folder, because shared disks show files late and clocks differ.
FAR_QUIET_S = 60.0
# A starting process writes nothing until the model is built.
BEGIN_S = 300.0
NOT_RUNNING, SILENT, AWAY = "not running", "silent", "without a syncer"
DEAD = (NOT_RUNNING, SILENT)
ENDED = ("complete", "stopped")
PHASE_SUFFIX = ".phase"
RESTART_SUFFIX = ".restart"
PHASE_LENGTH_MAX, RESTART_LENGTH_MAX = 200, 1000
# A supervisor may notice the end of a process so long before the syncer does.
NOTICED_S = 10.0

Ask = Callable[[], Mapping[str, Any] | None]


def signature() -> dict[str, Any]:
    """Return this process's identity and the time, for a status that it writes."""
    parent = os.environ.get(PARENT_ENV)
    return {
        "machine": _machine(),
        "process": _name(os.getpid()),
        "supervisor": _name(int(parent)) if parent is not None else None,
        "unix_s": round(time.time(), 3),
    }


def _machine() -> str:
    """Return the machine and its namespace of process numbers; containers of one machine may have separate ones."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}".strip()


def machine_number() -> int:
    """Return a number of this machine: processes with equal ones can signal each other by process number."""
    return zlib.crc32(_machine().encode())


class _Seen(NamedTuple):
    """The system's information about a process."""

    # Clock ticks from the machine's start to the process's start; -1 if unknown.
    began: int
    stopped: bool


def _look(pid: int) -> _Seen | None:
    """Look up a process of this machine; None if it has ended."""
    if os.path.exists("/proc/self/stat"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else _Seen(int(fields[19]), fields[0] in "Tt")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # somebody else's
        pass
    return _Seen(-1, False)


def _name(pid: int) -> list[int]:
    """Return the number of a process and its start, which distinguishes later processes of that number."""
    seen = _look(pid)
    return [pid, seen.began if seen is not None else -1]


def _living(name: list[int] | None) -> _Seen | None:
    seen = _look(name[0]) if name is not None else None
    return seen if seen is not None and name is not None and seen.began == name[1] else None


def judge(run_dir: Path, status: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """Check the status of a folder against the processes of its run, and return it, or a newer one.

    If the run does not continue as its status says, `state` becomes "not running", "silent" (the process exists) or
    "without a syncer" (the supervisor starts it again), and `remedy` says what to do. `ask` requests the status from
    the syncer itself.
    """
    said = status.get("said") or {}
    if status["state"] in ENDED and (run_dir / SUMMARY_FILE).exists():
        return dict(status)
    here = said.get("machine") == _machine()
    process = _living(said.get("process")) if here else None
    limit_s = (BEGIN_S if status["state"] == "starting" else QUIET_S) if here else FAR_QUIET_S
    # The syncer evaluates for the last time.
    if process is not None and status["state"] in ENDED:
        return dict(status)
    if (process is not None or not here) and _age_s(said) < limit_s and not (process and process.stopped):
        return dict(status)
    # On a full disk the file stays old while the syncer works.
    answer = None if here and process is None else ask()
    if answer is not None and answer.get("said", {}).get("process") == said.get("process"):
        said, status = answer["said"], answer
        if _age_s(said) < FAR_QUIET_S:
            return dict(status)
    return {**status, **_trouble(run_dir, said, process, here=here), "said_s_ago": round(_age_s(said), 1)}


def _age_s(signature: Mapping[str, Any]) -> float:
    return max(0.0, time.time() - signature.get("unix_s", 0.0))


def _trouble(run_dir: Path, signature: Mapping[str, Any], process: _Seen | None, *, here: bool) -> dict[str, str]:
    """Return state and remedy of a run that does not continue as its last status says."""
    again = f"`{resume_command(run_dir)}` continues from the newest snapshot"
    if not (run_dir / TAPE_FILE).exists():
        again = "a data-parallel run cannot continue: start it again"
    elif signature.get("supervisor") is None:
        syncer = command("syncer", run_dir / CONFIG_FILE, "--run-dir", run_dir)
        again = f"`{syncer}` continues with the running islands; "
        again += "if none runs, add --rewind, or let `diloco train` with --resume start all of them on one machine"
    if process is not None:
        pid = signature["process"][0]
        cause = f"process {pid} was stopped by a signal: kill -CONT {pid} lets it continue"
        if not process.stopped:
            cause = f"process {pid} exists, but writes no status: it is stuck, or its disk is"
        return {"state": SILENT, "remedy": f"{cause}; after kill -9 {pid}, {again}"}
    if here and (supervisor := _living(signature.get("supervisor"))) is not None and not supervisor.stopped:
        number = signature["supervisor"][0]
        return {"state": AWAY, "remedy": f"`diloco train` (process {number}) starts it again by itself"}
    starts = [each for each in read_phases(run_dir) if each.name == "syncer" and each.ago_s < BEGIN_S]
    if here and starts:
        return {"state": AWAY, "remedy": f"one is starting: {starts[0].words}"}
    where = "" if here else f"it ran on {signature.get('machine', 'another machine').split()[0]}, look there too; "
    return {"state": NOT_RUNNING, "remedy": where + again}


def repeats(lasted_s: float) -> int:
    """Return how often the words of a phase that lasts so many seconds were due again."""
    return max(0, int(lasted_s // REPEAT_S)).bit_length()


class StartPhase(NamedTuple):
    """A starting process, and its phase before its first step."""

    # The syncer, an island, or another process of the run.
    name: str
    words: str
    ago_s: float  # age


def loop_name(learner_id: str, number: int = 0) -> str:
    """Return the name of the files of a loop: of an island, of one of its hosts above 0, or of a slice.

    The slice that leads writes the files of the island as well.
    """
    return f"{learner_id}-h{number}" if number else learner_id


def slice_loop(own: int, slices: int, host: int = 0) -> int:
    """Return the number of the loop of one host of slice `own`, for `loop_name`."""
    return 1 + own + slices * host


def tell_phase(run_dir: Path, name: str, words: str) -> None:
    """Write the phase of a starting process, or remove it with ""; errors of the disk are ignored."""
    path = run_dir / HEALTH / f"{name}{PHASE_SUFFIX}"
    with contextlib.suppress(OSError):
        if words:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def read_phases(run_dir: Path) -> list[StartPhase]:
    """Return the present phases of the starting processes of this folder, by name, without those that are long dead."""
    phases, now_s = [], time.time()
    for path in sorted((run_dir / HEALTH).glob(f"*{PHASE_SUFFIX}")):
        with contextlib.suppress(OSError):  # it is over
            words = path.read_text(encoding="utf-8", errors="replace")[:PHASE_LENGTH_MAX]
            name, ago_s = path.name.removesuffix(PHASE_SUFFIX), max(0.0, now_s - path.stat().st_mtime)
            if ago_s < BEGIN_S or _beats(path.with_name(f"{name}.alive"), now_s):
                phases.append(StartPhase(name, words, ago_s))
    return [phase for phase in phases if phase.words]


def _beats(alive: Path, now_s: float) -> bool:
    """Return whether a process has touched its sign of life lately; a killed one leaves its phase behind."""
    with contextlib.suppress(OSError):
        return now_s - alive.stat().st_mtime < BEGIN_S
    return False


def tell_restart(run_dir: Path, name: str, words: str) -> None:
    """Write what the supervisor does about a process that has ended; errors of the disk are ignored."""
    path = run_dir / HEALTH / f"{name}{RESTART_SUFFIX}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words, encoding="utf-8")


def read_restart(run_dir: Path, name: str, ended_s: float) -> str:
    """Return what the supervisor does about a process that ended `ended_s` seconds ago; "" without a supervisor."""
    path = run_dir / HEALTH / f"{name}{RESTART_SUFFIX}"
    try:
        # An older file is about an earlier end of the process.
        if time.time() - path.stat().st_mtime > ended_s + NOTICED_S:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")[:RESTART_LENGTH_MAX]
    except OSError:
        return ""


def forget_phases(run_dir: Path) -> None:
    """Remove the phases of earlier processes."""
    for path in (run_dir / HEALTH).glob(f"*{PHASE_SUFFIX}"):
        tell_phase(run_dir, path.name.removesuffix(PHASE_SUFFIX), "")
