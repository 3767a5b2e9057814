"""Sets of compiled programs: which runs share one, and that only complete sets are ever found."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from diloco_jax.runtime.local import programs
from diloco_jax.runtime.local.programs import keeping, name_of_set, restore
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
    yield tmp_path / "cache" / "diloco_jax" / PROGRAMS
    jax.config.update("jax_compilation_cache_dir", before)


def compile_programs(name: str, run_dir: Path, *sizes: int) -> None:
    """Write programs of these sizes as JAX would."""
    with keeping(name, run_dir):
        folder = Path(jax.config.values["jax_compilation_cache_dir"])
        for number, size in enumerate(sizes):
            (folder / f"jit_{number}-cache").write_bytes(bytes(size))


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
    compile_programs("new", tmp_path / "new", 100)
    assert sorted(path.name for path in cache.iterdir()) == ["new", "oldest"]
    compile_programs("large", tmp_path / "large", 60, 41)
    assert found(tmp_path / "large") and not restore("large", tmp_path / "run")


def test_the_name_covers_what_programs_depend_on() -> None:
    config, environment = RunConfig(), {"JAX_NUM_CPU_DEVICES": "2", "PATH": "/bin"}
    name = name_of_set(config, "island-0", environment)
    alike = replace(config, name="again", train=replace(config.train, steps=7))
    assert name and name == name_of_set(alike, "island-1", environment | {"PATH": "/usr/bin"})
    others = [
        name_of_set(replace(config, seed=config.seed + 1), "island-0", environment),
        name_of_set(replace(config, train=replace(config.train, seq_len=7)), "island-0", environment),
        name_of_set(config, "island-0", environment | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
    ]
    assert len({name, *others}) == 4


def test_code_of_the_user_and_a_cache_of_the_user_have_no_set() -> None:
    own_model = RunConfig(model=ModelConfig(module="mine:Model"))
    own_optimizer = RunConfig(optimizer=OptimizerConfig(module="mine:optimizer"))
    assert name_of_set(own_model, "island-0", {}) == name_of_set(own_optimizer, "island-0", {}) == ""
    assert name_of_set(RunConfig(), "island-0", {"JAX_COMPILATION_CACHE_DIR": "/cache"}) == ""
