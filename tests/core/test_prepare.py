"""A merge never waits for a compiler: everything is compiled when its Merger is made, once for all arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# In a process of its own, with a cache of its own: here other tests have merged before.
MERGE = """
import sys
from numba.core import event
import jax
import numpy as np
import optax
from diloco_jax.core.merge import Rule
from diloco_jax.core.passes import Merger, State, Values
from diloco_jax.core.outer import Nesterov, Optax
from tests.core.merging import FORMATS, layout_of, payload_of, random_values

outer = Nesterov(0.7, 0.9) if sys.argv[1] == "nesterov" else Optax(optax.adam(0.1))
layout = layout_of()
rules = [Rule("rda", max(1, (piece.stop - piece.start) // 2)) for piece in layout.pieces]
formats = FORMATS if sys.argv[1] == "nesterov" else ("int4",)  # what optax compiles knows nothing of formats
mergers = {(up, down): Merger(layout, rules, outer, up, down) for up in formats for down in formats}
states = {way: merger.first(layout.flat(random_values(0))) for way, merger in mergers.items()}
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
)
with event.install_recorder("numba:compile") as seen:
    for (up, down), merger in mergers.items():
        state = states[up, down]
        payloads = [payload_of(random_values(seed), up) for seed in (1, 2, 3)]
        moved = [None, layout.flat(random_values(4)), None]
        for frozen in (False, True):  # what came over a pipe, or is shown to somebody, cannot be written to
            for array in (state.value, state.residual, *state.outer.values()) if frozen else ():
                array.flags.writeable = array.size == 0  # empty ones are one for all
            values = Values(payloads, moved)
            merger.update(values, merger.inspect(values), np.full(3, 1 / 3), state)
assert not seen.buffer, f"{len(seen.buffer)} times compiled by Numba"
assert not compiled, compiled
print("merged", len(mergers))
"""


def merge(outer: str, cache: Path, home: Path, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A process that merges, with nothing compiled yet, at this home of a user."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "NUMBA_"))}
    environment |= {"PYTHONPATH": str(package), "HOME": str(home), "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", MERGE, outer], capture_output=True, text=True, env=environment, cwd=package
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with nothing in it before the first process of this module."""
    return tmp_path_factory.mktemp("home") / "cache"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("outer", "count"), [("nesterov", 16), ("adam", 1)])
def test_a_first_merge_compiles_nothing(cache: Path, outer: str, count: int) -> None:
    ran = merge(outer, cache, cache.parent)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"merged {count}"


@pytest.mark.timeout(300)
def test_it_works_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A package that belongs to somebody else, for a user without a home: each process compiles for itself."""
    package, blocked = tmp_path / "package", tmp_path / "blocked"
    for folder in ("diloco_jax", "tests"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    blocked.write_text("a file where a folder would have to be", encoding="utf-8")
    shutil.rmtree(package / "diloco_jax" / "core" / "__pycache__", ignore_errors=True)
    (package / "diloco_jax" / "core" / "__pycache__").write_text("", encoding="utf-8")
    ran = merge("nesterov", blocked / "cache", blocked, package)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "merged 16"
