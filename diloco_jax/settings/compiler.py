"""XLA's compiler: its options for an island, and where compiled programs are kept.

The options are those of the island's TPU generation, and what the config changes. Preflight compiles with them. Islands
get them in a variable that the compiler reads when JAX starts.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig

CPU_INFO = Path("/proc/cpuinfo")

TPU_VARIABLE, OTHER_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"  # XLA on other devices knows no option of TPUs


def options_of(config: RunConfig, island: IslandConfig) -> dict[str, str]:
    """Return the compiler's options by name: cloud.xla_flags go before those of the island's TPU generation."""
    table = island.slice.generation.compiler_options if island.slice else {}
    return {name: value for name, value in {**table, **config.cloud.xla_flags}.items() if value}


def compiler_variable(config: RunConfig, island: IslandConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that gives an island's processes these options, and its value; those that are set stay."""
    variable = TPU_VARIABLE if island.slice else OTHER_VARIABLE
    words = environment.get(variable, "").split()
    given = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{name}={value}" for name, value in options_of(config, island).items() if name not in given]
    return variable, " ".join([*words, *ours])


def keep_programs(folder: Path) -> None:
    """Keep compiled programs, and take them from where earlier processes kept them.

    XLA's go into the run's folder, since they are of its model; JAX_COMPILATION_CACHE_DIR has precedence. Those of the
    merge are the same for all runs, and go into the user's cache, or into the run's folder if there is none that can be
    written to; NUMBA_CACHE_DIR has precedence. To be called before anything imports Numba.
    """
    own = (folder / host_kind()).absolute()
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
