"""A process that starts again takes its compiled programs from the run's folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings.compiler import host_kind
from tests.limits import HANGS_S
from tests.runtime.helpers import environment, write_config

PROCESS = """
import sys
from pathlib import Path
import jax
from diloco_jax.settings.compiler import keep_programs

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
keep_programs(Path(sys.argv[1]))
print(int(jax.jit(lambda x: 2 * x + 1)(20)), len(hits))
"""


def python(words: str, *arguments: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", words, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=True)


def start(run_dir: Path, **changes: str) -> tuple[str, str]:
    """Value and number of hits, and what went to standard error."""
    kept = {key: value for key, value in environment().items() if not key.startswith("JAX_COMPILATION_CACHE")}
    ran = python(PROCESS, run_dir / PROGRAMS, env=kept | changes)
    return ran.stdout.strip(), ran.stderr


def test_the_second_process_compiles_nothing_and_damage_costs_only_time(tmp_path: Path) -> None:
    assert start(tmp_path)[0] == "41 0"
    value, hits = start(tmp_path)[0].split()
    assert value == "41" and int(hits) >= 1
    entries = [path for path in (tmp_path / PROGRAMS / host_kind()).iterdir() if path.name.endswith("-cache")]
    assert len(entries) >= 1
    # The process was killed in the middle of writing these files.
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    value, error = start(tmp_path)
    assert value == "41 0" and "Error reading persistent compilation cache entry" in error


def test_the_users_own_cache_has_precedence(tmp_path: Path) -> None:
    start(tmp_path / "run", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert not (tmp_path / "run").exists() and any((tmp_path / "own").iterdir())


MERGES = """
import os, sys
from pathlib import Path
from diloco_jax.settings.text import load
from diloco_jax.settings.compiler import keep_programs

load(sys.argv[2])
assert "numba" not in sys.modules, "its settings are read when it is imported"
keep_programs(Path(sys.argv[1]))
import numba
print(numba.config.CACHE_DIR)
"""


def merges_kept(run_dir: Path, config: Path, **changes: str) -> Path:
    """Return the folder where a process of a run keeps compiled merges."""
    dropped = ("JAX_COMPILATION_CACHE", "XDG_", "NUMBA_", "HOME")
    kept = {key: value for key, value in environment().items() if not key.startswith(dropped)}
    return Path(python(MERGES, run_dir / PROGRAMS, config, env=kept | changes).stdout.strip())


def test_merges_are_kept_for_the_user_or_with_the_run(tmp_path: Path) -> None:
    config, blocked = write_config(tmp_path), tmp_path / "blocked"
    blocked.write_text("a file where a folder would have to be", encoding="utf-8")
    run_dir, own = tmp_path / "run", tmp_path / "run" / PROGRAMS / host_kind()
    home = tmp_path / "user"
    home.mkdir()
    assert merges_kept(run_dir, config, HOME=str(home)) == home / ".cache" / "diloco_jax"
    caches = tmp_path / "caches"
    assert merges_kept(run_dir, config, HOME=str(blocked), XDG_CACHE_HOME=str(caches)) == caches / "diloco_jax"
    assert merges_kept(run_dir, config, HOME=str(blocked)) == own
    assert merges_kept(run_dir, config, HOME=str(blocked), NUMBA_CACHE_DIR=str(tmp_path)) == tmp_path


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux tells here what a processor can do")
def test_hosts_of_another_kind_keep_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_jax.settings import compiler

    here = host_kind()
    other = tmp_path / "cpuinfo"
    other.write_text("processor : 0\nflags : fpu sse2\n", encoding="utf-8")
    monkeypatch.setattr(compiler, "CPU_INFO", other)
    assert host_kind() != here and host_kind().startswith(os.uname().machine)
