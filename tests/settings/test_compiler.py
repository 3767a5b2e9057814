"""A process that starts again takes its compiled programs from the run's folder."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings import compiler
from diloco_jax.settings.compiler import host_kind, keep_programs, users_folder
from tests.limits import HANGS_S
from tests.runtime.helpers import environment, write_config

# One process loads the package. Copies of it, made before JAX starts its backend, are the processes of a run: a
# learner, the one that replaces it, and the next one. That one finds damaged files, because the one before it was
# killed while it wrote them.
PROCESSES = """
import os, sys
from pathlib import Path
import jax
from diloco_jax.settings.compiler import keep_programs
from diloco_jax.settings.text import load

load(sys.argv[2])
assert "numba" not in sys.modules, "its settings are read when it is imported"
folder = Path(sys.argv[1])

def compile_in_a_process():
    if (copy := os.fork()) != 0:
        assert os.waitpid(copy, 0)[1] == 0
        return
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "/cache_hits" in event else None)
    keep_programs(folder)
    print(int(jax.jit(lambda x: 2 * x + 1)(20)), len(hits), flush=True)
    os._exit(0)

compile_in_a_process()
compile_in_a_process()
for path in folder.rglob("*-cache"):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
compile_in_a_process()
keep_programs(folder)
import numba
print(numba.config.CACHE_DIR)
"""


def test_the_second_process_compiles_nothing_and_damage_costs_only_time(tmp_path: Path) -> None:
    kept = {name: value for name, value in environment().items() if not name.startswith(("JAX_COMP", "NUMBA_"))}
    command = [sys.executable, "-c", PROCESSES, str(tmp_path / PROGRAMS), str(write_config(tmp_path))]
    ran = subprocess.run(
        command, env=kept | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=HANGS_S
    )
    assert ran.returncode == 0, ran.stderr
    first, second, damaged, merges = ran.stdout.splitlines()
    assert first == damaged == "41 0" and second.startswith("41 ") and int(second.split()[1]) >= 1
    assert "Error reading persistent compilation cache entry" in ran.stderr
    assert [path for path in (tmp_path / PROGRAMS / host_kind()).iterdir() if path.name.endswith("-cache")]
    assert merges == str(tmp_path / "diloco_jax" / "code"), (
        "the process that imports Numba later stores its programs there"
    )


def test_the_users_own_cache_has_precedence(tmp_path: Path) -> None:
    # The tests of this process started with a separate folder.
    own = os.environ["JAX_COMPILATION_CACHE_DIR"]
    keep_programs(tmp_path / "run")
    assert jax.config.values["jax_compilation_cache_dir"] == own and not (tmp_path / "run").exists()


def test_merges_are_kept_for_the_user_or_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, home, caches, run_dir = (tmp_path / name for name in ("blocked", "user", "caches", "run"))
    blocked.write_text("a file where a folder would have to be", encoding="utf-8")
    home.mkdir()

    def kept(**changes: Path) -> Path:
        """Return the folder where a process of a run keeps compiled merges."""
        for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, folder in changes.items():
            monkeypatch.setenv(name, str(folder))
        keep_programs(run_dir / PROGRAMS)
        return Path(os.environ["NUMBA_CACHE_DIR"])

    assert kept(HOME=home) == home / ".cache" / "diloco_jax" / "code"
    assert kept(HOME=blocked, XDG_CACHE_HOME=caches) == caches / "diloco_jax" / "code"
    assert kept(HOME=blocked) == run_dir / PROGRAMS / host_kind()
    assert kept(HOME=blocked, NUMBA_CACHE_DIR=tmp_path) == tmp_path


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux tells here what a processor can do")
def test_hosts_of_another_kind_keep_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_kind()
    other = tmp_path / "cpuinfo"
    other.write_text("processor : 0\nflags : fpu sse2\n", encoding="utf-8")
    monkeypatch.setattr(compiler, "CPU_INFO", other)
    assert host_kind() != here and host_kind().startswith(os.uname().machine)


def test_the_newest_merges_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiler, "MERGES_MAX", 2)
    folder = tmp_path / "diloco_jax" / "code" / "core_1"
    folder.mkdir(parents=True, mode=0o700)
    for age, name in enumerate(("new.nbc", "old.nbc.tmp.1", "older.nbi", "oldest.nbc")):
        (folder / name).touch()
        os.utime(folder / name, (10.0 - age, 10.0 - age))
    keep_programs(tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == ["new.nbc", "old.nbc.tmp.1"]


def test_code_is_never_kept_where_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "group"))
    before = os.umask(0o002)
    try:
        folder = users_folder()
    finally:
        os.umask(before)
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    for mode, kept in ((0o755, folder), (0o775, None), (0o757, None)):
        folder.chmod(mode)
        assert users_folder() == kept
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert users_folder() is None
