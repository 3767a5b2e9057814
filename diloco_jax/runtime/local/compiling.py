"""Programs that islands share: those that are alike load what one process has compiled while the syncer begins.

Compiling takes an emulated island several times as long as everything else before its first step, and islands that
share cores would all do it at the same time. Real accelerators are left to their islands.
"""

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import jax

from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.local.machine import Machine, emulated_devices
from diloco_jax.runtime.records.files import PROGRAMS
from diloco_jax.settings.run import RunConfig

CPU_INFO = Path("/proc/cpuinfo")


def shared_by_several(config: RunConfig, machine: Machine) -> list[str]:
    """Name one island of each kind that has several members, all of them emulated in a process of their own."""
    if not machine.emulates or config.islands.controller == "single" or config.islands.command:
        return []
    kinds: dict[str, list[str]] = {}
    for name in config.islands.names:
        own = config.island(name)
        if own.hosts == 1 and not own.topology:
            kind = own._replace(name="", zone="", devices=emulated_devices(config, name))
            kinds.setdefault(repr(kind), []).append(name)
    return [names[0] for names in kinds.values() if len(names) > 1]


def compiled_loop(config: RunConfig, island: str) -> BuiltInLoop:
    """Return the loop of an island with all that it runs compiled, and kept where `keep_programs` said."""
    loop = BuiltInLoop(config, island)
    host = Host(config, loop.island, loop.warm_up, loop.evaluate)
    host.warm_up()
    host.warm_up_evaluation()
    return loop


def keep_programs(run_dir: Path) -> None:
    """Keep compiled programs, and take them from where earlier processes kept them.

    XLA's go into the run's folder, since they are of its model; JAX_COMPILATION_CACHE_DIR has precedence. Those of the
    merge are the same for all runs, and go into the user's cache, or into the run's folder if there is none that can be
    written to; NUMBA_CACHE_DIR has precedence. To be called before anything imports Numba.
    """
    own = (run_dir / PROGRAMS / host_kind()).absolute()
    if not os.environ.get("NUMBA_CACHE_DIR"):
        os.environ["NUMBA_CACHE_DIR"] = str(_users_folder() or own)  # merge shards inherit it
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(own))
    # all of them: an island compiles some small ones too before its first step
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _users_folder() -> Path | None:
    """Return this user's folder for compiled merges, never one that others can write to; None without one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco_jax"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None


def host_kind() -> str:
    """Return a name that only hosts with the same processor share: XLA compiles for the instructions that it finds."""
    about = platform.processor()
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        about += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.blake2b(about.encode(), digest_size=4).hexdigest()}"
