"""Sets of compiled programs: which runs share one, and that only complete sets are ever found."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache

from diloco_jax.runtime.local import programs
from diloco_jax.runtime.local.programs import keeping, kept_if_complete, mend, name_of_set, restore
from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings.compiler import host_kind
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig

NAME = "0123abcd"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the user an empty cache, and undo the change of JAX's settings."""
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "diloco_jax" / "code" / PROGRAMS
    jax.config.update("jax_compilation_cache_dir", before)


def compile_programs(name: str, run_dir: Path, *sizes: int) -> None:
    """Write programs of about these sizes as JAX would."""
    with keeping(name, run_dir):
        write_programs(Path(jax.config.values["jax_compilation_cache_dir"]), *sizes)


def write_programs(folder: Path, *sizes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        # Compression does not make random bytes smaller.
        (folder / f"jit_{number}-cache").write_bytes(compilation_cache.compress_executable(os.urandom(size)))


def cut(path: Path) -> None:
    """Leave a file as a full disk or a kill does."""
    path.write_bytes(path.read_bytes()[:-1])


def found(run_dir: Path) -> list[str]:
    folder = run_dir / PROGRAMS / host_kind()
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_run_finds_the_programs_of_an_earlier_one(tmp_path: Path) -> None:
    assert not restore(NAME, tmp_path / "first")
    compile_programs(NAME, tmp_path / "first", 10, 20)
    assert found(tmp_path / "first") == ["jit_0-cache", "jit_1-cache"]
    assert restore(NAME, tmp_path / "second") and found(tmp_path / "second") == found(tmp_path / "first")
    assert not restore("another", tmp_path / "third") and not restore("", tmp_path / "third")


def test_programs_of_a_compiler_that_fails_are_not_kept(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(OSError, match="full"), keeping(NAME, tmp_path / "run"):
        Path(jax.config.values["jax_compilation_cache_dir"], "jit_0-cache").write_bytes(b"half")
        raise OSError("the disk is full")
    assert not restore(NAME, tmp_path / "run") and found(tmp_path / "run") == [] and not [*cache.iterdir()]


def test_a_damaged_program_is_neither_kept_nor_restored(tmp_path: Path, cache: Path) -> None:
    with keeping(NAME, tmp_path / "full"):
        made = Path(jax.config.values["jax_compilation_cache_dir"])
        write_programs(made, 10, 20)
        cut(made / "jit_1-cache")
    assert found(tmp_path / "full") == ["jit_0-cache"] and not restore(NAME, tmp_path / "full")
    # A program is damaged later, or a cleaner of the cache removes all of them.
    for harm in (cut, Path.unlink):
        compile_programs(NAME, tmp_path / "run", 10)
        harm(cache / NAME / "jit_0-cache")
        assert not restore(NAME, tmp_path / "next") and not (cache / NAME).exists()
    assert not found(tmp_path / "next")


def test_a_disk_that_fills_up_leaves_only_whole_programs(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_programs(NAME, tmp_path / "run", 10, 20)
    whole = programs.shutil.copyfile

    def fill(path: Path, to: Path) -> None:
        whole(path, to)
        if path.name == "jit_1-cache":
            cut(to)
            raise OSError("no space is left")

    monkeypatch.setattr(programs.shutil, "copyfile", fill)
    assert not restore(NAME, tmp_path / "next") and set(found(tmp_path / "next")) <= {"jit_0-cache"}


def test_what_killed_processes_left_in_a_run_is_removed_before_it_starts(tmp_path: Path) -> None:
    mend(tmp_path)
    folder = tmp_path / PROGRAMS / host_kind()
    write_programs(folder, 10, 20)
    cut(folder / "jit_1-cache")
    (folder / "jit_0-cache.123").write_bytes((folder / "jit_0-cache").read_bytes())
    (folder / "numba").mkdir()
    mend(tmp_path)
    assert found(tmp_path) == ["jit_0-cache", "numba"]


def test_a_set_that_lacks_a_program_is_removed(tmp_path: Path, cache: Path) -> None:
    compile_programs(NAME, tmp_path / "run", 10)
    with kept_if_complete(NAME):
        pass
    assert restore(NAME, tmp_path / "run")
    with kept_if_complete(NAME):
        jax.monitoring.record_event(programs.MISS)
    assert not (cache / NAME).exists()


def test_jax_reports_a_program_that_it_did_not_find(tmp_path: Path) -> None:
    compile_programs(NAME, tmp_path / "run", 10)
    # The test session keeps programs, and this one is never among them.
    with kept_if_complete(NAME):
        jax.jit(lambda x: x + time.time_ns() % 10**9)(1).block_until_ready()
    assert not restore(NAME, tmp_path / "next")


def test_a_colleague_can_read_the_programs_of_a_shared_run(tmp_path: Path) -> None:
    compile_programs(NAME, tmp_path / "run", 10)
    assert restore(NAME, tmp_path / "next")
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "next" / PROGRAMS / host_kind()).stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_the_cache_has_few_sets_and_none_that_is_too_large(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "SETS_MAX", 2)
    monkeypatch.setattr(programs, "SET_BYTES_MAX", 100)
    for age, name in enumerate(["oldest", "old"], start=1):
        compile_programs(name, tmp_path / name, 10)
        os.utime(cache / name, (10.0 - age, 10.0 - age))
    # A set that is used becomes the newest.
    assert restore("oldest", tmp_path / "run")
    (cache / "killed.x1").mkdir()
    os.utime(cache / "killed.x1", (0.0, 0.0))
    compile_programs("new", tmp_path / "new", 80)
    assert sorted(path.name for path in cache.iterdir()) == ["new", "oldest"]
    compile_programs("large", tmp_path / "large", 60, 45)
    assert found(tmp_path / "large") and not restore("large", tmp_path / "run")


def test_the_name_covers_what_programs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config, environment = RunConfig(), {"JAX_NUM_CPU_DEVICES": "2", "PATH": "/bin"}
    name = name_of_set(config, "island-0", environment)
    alike = replace(config, name="again", train=replace(config.train, steps=7))
    assert name and name == name_of_set(alike, "island-1", environment | {"PATH": "/usr/bin"})
    others = [
        name_of_set(replace(config, seed=config.seed + 1), "island-0", environment),
        name_of_set(replace(config, train=replace(config.train, seq_len=7)), "island-0", environment),
        name_of_set(config, "island-0", environment | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
    ]
    monkeypatch.setattr(programs, "version", lambda package: f"another {package}")
    others.append(name_of_set(config, "island-0", environment))
    assert len({name, *others}) == 5


def test_code_of_the_user_and_a_cache_of_the_user_have_no_set() -> None:
    own_model = RunConfig(model=ModelConfig(module="mine:Model"))
    own_optimizer = RunConfig(optimizer=OptimizerConfig(module="mine:optimizer"))
    assert name_of_set(own_model, "island-0", {}) == name_of_set(own_optimizer, "island-0", {}) == ""
    assert name_of_set(RunConfig(), "island-0", {"JAX_COMPILATION_CACHE_DIR": "/cache"}) == ""
