"""Sets of compiled programs in the user's cache, so that a run like an earlier one compiles nothing at its start.

A set has the programs of one kind of emulated islands. Its name is a digest of the settings, the code and the machine
that the programs depend on. JAX compares every program that it loads with a separate key, so a set with other programs
costs only time, and is removed. A set is written to a separate folder, and gets its name when it is complete and every
program is whole; a damaged program would be reported at every later start.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import jax
from jax._src import compilation_cache

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
# The packages whose code is part of programs.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# The end of the name of a whole program; while it is copied, more follows.
WHOLE = "-cache"
# JAX's event when it has compiled a program that it did not find.
MISS = "/jax/compilation_cache/cache_misses"


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
    versions = RELEASE, [version(each) for each in PACKAGES], sys.version, host_kind(), _code()
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
    """Copy a set into the folder of a run that has not started; False if there is none. Remove a damaged set."""
    folder = _folder()
    if not name or folder is None or not (folder / name).is_dir():
        return False
    try:
        if _remove_damaged(folder / name) or not any((folder / name).iterdir()):
            shutil.rmtree(folder / name, ignore_errors=True)
            return False
        # The oldest sets are removed first.
        os.utime(folder / name)
        _hand_over(folder / name, _programs_of(run_dir))
    except OSError:
        # Another run has removed the set, or the disk is full. Then the run compiles.
        return False
    return True


def mend(run_dir: Path) -> None:
    """Remove the damaged programs of a run; call it before its processes start.

    A process that is killed, or whose disk is full, leaves a part of a program. JAX would report it at every later
    start, and never replace it.
    """
    with contextlib.suppress(OSError):
        _remove_damaged(_programs_of(run_dir))


@contextlib.contextmanager
def kept_if_complete(name: str) -> Iterator[None]:
    """Remove a set if the block compiles a program, which the set should have had; the next run then compiles it."""
    folder, missed = _folder(), threading.Event()

    def listen(event: str, **_: object) -> None:
        if event == MISS:
            missed.set()

    jax.monitoring.register_event_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(listen)
    if name and folder is not None and missed.is_set():
        shutil.rmtree(folder / name, ignore_errors=True)


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
            # JAX only warns of a full disk.
            damaged = _remove_damaged(made)
            _hand_over(made, _programs_of(run_dir))
            if not damaged and 0 < sum(path.stat().st_size for path in made.iterdir()) <= SET_BYTES_MAX:
                # Another run may have kept the same set meanwhile.
                made.rename(folder / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        _remove_old(folder)


def _programs_of(run_dir: Path) -> Path:
    """Return the folder of a run's programs for this kind of machine."""
    return run_dir / PROGRAMS / host_kind()


def _hand_over(made: Path, target: Path) -> None:
    """Copy programs to the folder of a run, where other processes may read and write at the same time."""
    target.mkdir(parents=True, exist_ok=True)
    for path in made.iterdir():
        partial = target / f"{path.name}.{os.getpid()}"
        try:
            shutil.copyfile(path, partial)
            partial.rename(target / path.name)
        finally:
            partial.unlink(missing_ok=True)


def _remove_damaged(folder: Path) -> bool:
    """Remove the programs in a folder that are not whole; True if there were any."""
    damaged = [path for path in folder.glob(f"*{WHOLE}*") if not sound(path)]
    for path in damaged:
        path.unlink(missing_ok=True)
    return bool(damaged)


def sound(path: Path) -> bool:
    """Tell whether a file is a whole program, which JAX can decompress."""
    try:
        compilation_cache.decompress_executable(path.read_bytes())
    except Exception:
        # The error depends on the compression, which depends on the packages that are installed.
        return False
    return path.name.endswith(WHOLE)


def _remove_old(folder: Path) -> None:
    """Remove all but the newest sets, and what killed processes have left."""
    with contextlib.suppress(OSError):
        sets = sorted((path.stat().st_mtime, path) for path in folder.iterdir() if "." not in path.name)
        left = [(path.stat().st_mtime, path) for path in folder.iterdir() if "." in path.name]
        old = [path for _, path in sets[: max(0, len(sets) - SETS_MAX)]]
        old += [path for stamp, path in left if stamp < time.time() - STALE_S]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
