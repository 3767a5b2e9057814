"""Sets of compiled programs in the user's cache, so that a run like an earlier one compiles nothing at its start.

A set has the programs of one kind of emulated islands. Its name is a digest of the settings, the code and the machine
that the programs depend on. JAX compares every program that it loads with a separate key, so a set with other programs
costs only time. A set is written to a separate folder, and gets its name when it is complete; a damaged program
would be reported at every later start.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import jax

from diloco_jax.protocol.releases import RELEASE
from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings.compiler import host_kind, users_folder
from diloco_jax.settings.run import OF_TOKENS, RunConfig

# The newest sets that are kept, and the size of the largest set.
SETS_MAX, SET_BYTES_MAX = 8, 1 << 28
# A folder of a process that was killed is removed after this time.
STALE_S = 86400.0
# Sections and settings without influence on programs.
WITHOUT = ("name", "runs_dir", "trackers", "callbacks", "transport", "watchdog", "checkpoints", "syncer", "cloud")
WITHOUT_IN_TRAIN = ("steps", "tokens", "eval_every")
VARIABLES = ("JAX_", "XLA_", "NPROC")


def name_of_set(config: RunConfig, island: str, environment: Mapping[str, str]) -> str:
    """Return the name of the set of an island; "" if none is kept, because its programs have code of the user.

    Args:
        environment: that of the island's process.
    """
    ours = config.model.module in OF_TOKENS and not (config.optimizer.module or config.outer.module)
    if not ours or environment.get("JAX_COMPILATION_CACHE_DIR"):
        return ""
    settings = {name: value for name, value in asdict(config).items() if name not in WITHOUT}
    settings["train"] = {name: value for name, value in settings["train"].items() if name not in WITHOUT_IN_TRAIN}
    variables = sorted(item for item in environment.items() if item[0].startswith(VARIABLES))
    versions = RELEASE, jax.__version__, sys.version, host_kind(), _code()
    about = repr((settings, config.island(island)._replace(name=""), variables, versions))
    return blake2b(about.encode(), digest_size=16).hexdigest()


def _code() -> list[tuple[str, int, int]]:
    """Describe the files of this package, which change in a checkout without a new release."""
    root = Path(__file__).parents[2]
    files = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _folder() -> Path | None:
    """Return the folder of all sets; None if this user has no cache."""
    cache = users_folder()
    return None if cache is None else cache / PROGRAMS


def restore(name: str, run_dir: Path) -> bool:
    """Copy a set into the folder of a run that has not started; False if there is none."""
    folder = _folder()
    if not name or folder is None or not (folder / name).is_dir():
        return False
    target = run_dir / PROGRAMS / host_kind()
    try:
        # The oldest sets are removed first.
        os.utime(folder / name)
        shutil.copytree(folder / name, target, dirs_exist_ok=True)
    except OSError:
        # Another run has removed the set, or the disk is full. Then the run compiles.
        return False
    return True


@contextlib.contextmanager
def keeping(name: str, run_dir: Path) -> Iterator[None]:
    """Keep the programs that the block compiles for the run, and as a set if it has a name; call it before JAX starts.

    An error of the disk costs the set, or the programs, and nothing else.
    """
    folder = _folder()
    made: Path | None = None
    if name and folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))
    if made is None or folder is None:
        yield
        return
    try:
        jax.config.update("jax_compilation_cache_dir", str(made))
        yield
        with contextlib.suppress(OSError):
            _hand_over(made, run_dir / PROGRAMS / host_kind())
            if sum(path.stat().st_size for path in made.iterdir()) <= SET_BYTES_MAX:
                # Another run may have kept the same set meanwhile.
                made.rename(folder / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        _remove_old(folder)


def _hand_over(made: Path, target: Path) -> None:
    """Copy programs to the folder of a run, where other processes may read and write at the same time."""
    target.mkdir(parents=True, exist_ok=True)
    for path in made.iterdir():
        partial = target / f"{path.name}.{os.getpid()}"
        shutil.copyfile(path, partial)
        partial.rename(target / path.name)


def _remove_old(folder: Path) -> None:
    """Remove all but the newest sets, and what killed processes have left."""
    with contextlib.suppress(OSError):
        sets = sorted((path.stat().st_mtime, path) for path in folder.iterdir() if "." not in path.name)
        left = [(path.stat().st_mtime, path) for path in folder.iterdir() if "." in path.name]
        old = [path for _, path in sets[: max(0, len(sets) - SETS_MAX)]]
        old += [path for stamp, path in left if stamp < time.time() - STALE_S]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
