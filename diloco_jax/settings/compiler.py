"""XLA's compiler: its options for an island, and where compiled programs are kept.

The options are defaults of the island's TPU generation, changed by the config. Preflight compiles with them. Islands
get them in an environment variable, which the compiler reads when JAX starts.
"""

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig

CPU_INFO = Path("/proc/cpuinfo")
# Files of compiled merges in the user's cache: those of several versions of this package, for several processors.
MERGES_MAX = 512

# XLA rejects options of TPUs on other devices.
TPU_VARIABLE, OTHER_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"


def options_of(config: RunConfig, island: IslandConfig) -> dict[str, str]:
    """Return the compiler's options by name; cloud.xla_flags take precedence over the island's TPU generation."""
    table = island.slice.generation.compiler_options if island.slice else {}
    return {name: value for name, value in {**table, **config.cloud.xla_flags}.items() if value}


def compiler_variable(config: RunConfig, island: IslandConfig, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the environment variable with these options, and its value; options that are set already stay."""
    variable = TPU_VARIABLE if island.slice else OTHER_VARIABLE
    words = environment.get(variable, "").split()
    given = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{name}={value}" for name, value in options_of(config, island).items() if name not in given]
    return variable, " ".join([*words, *ours])


def keep_programs(folder: Path) -> None:
    """Store compiled programs for later processes, and load those of earlier ones; call it before Numba is imported.

    XLA's programs depend on the model, so they are stored in the run's folder; JAX_COMPILATION_CACHE_DIR takes
    precedence. The programs of merges are the same for all runs. They are stored in the user's cache, or in the run's
    folder if the cache cannot be written; NUMBA_CACHE_DIR takes precedence.
    """
    own = (folder / host_kind()).absolute()
    if not os.environ.get("NUMBA_CACHE_DIR"):
        # Processes that this one starts inherit the variable.
        cache = users_folder()
        os.environ["NUMBA_CACHE_DIR"] = str(cache or own)
        if cache is not None:
            _remove_old(cache)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(own))
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        # JAX would compile the path of a cache for GPUs into every program, and a program of another folder would not
        # be found.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # Small programs are stored too, since an island compiles several before its first step.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _remove_old(cache: Path) -> None:
    """Remove all but the newest files of compiled merges; each change of their source makes others."""
    with contextlib.suppress(OSError):
        files = sorted((path.stat().st_mtime, path) for path in cache.glob("*/*.nb*"))
        for _, path in files[:-MERGES_MAX]:
            path.unlink(missing_ok=True)


def users_folder() -> Path | None:
    """Return this user's folder for compiled programs, never a folder that others can write to; None without one.

    The folder above it also has prepared data, and its rights depend on the user's umask.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco_jax" / "code"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        # This process will execute what is in the folder.
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        # Python raises RuntimeError for a user without a home.
        return None


def host_kind() -> str:
    """Return a name shared only by machines with the same processor, since XLA compiles for its instructions."""
    about = platform.processor()
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        about += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.blake2b(about.encode(), digest_size=4).hexdigest()}"
