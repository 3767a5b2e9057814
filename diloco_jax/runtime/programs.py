"""Compiled programs outlive the process that compiled them: an island that died is back sooner."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax

from diloco_jax.runtime.files import PROGRAMS

CPU_INFO = Path("/proc/cpuinfo")


def keep_programs(run_dir: Path) -> None:
    """Keep XLA's programs in the run's folder, and take them from there; JAX_COMPILATION_CACHE_DIR has precedence.

    Args:
        run_dir: the run's folder.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str((run_dir / PROGRAMS / host_kind()).absolute()))
    # all of them: an island compiles some small ones too before its first step
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def host_kind() -> str:
    """A name that only hosts with the same processor share: XLA compiles CPU programs for the instructions it finds."""
    about = platform.processor()
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        about += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.blake2b(about.encode(), digest_size=4).hexdigest()}"
