"""Tests are stricter than production: JAX on eight emulated CPU devices, no silent broadcasting, shapes checked.

Everything is set through the environment, before anything imports JAX, so that tests of protocol and simulator never
pay for importing it, and processes that a test starts inherit the settings unless they choose their own.
"""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests.drawn import examples
from tests.extras import pytest_runtest_setup  # noqa: F401
from tests.limits import pytest_collection_modifyitems  # noqa: F401
from tests.meter import Meter

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    # XLA sizes its CPU thread pool by this. With one thread per device a multi-device program that nobody waits for can
    # fill the pool, and the next rendezvous then never completes: the process aborts after 40 s.
    "NPROC": "16",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_ENABLE_X64": "0",
    # Its default makes the path of the folder of programs a part of every program's name.
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}

PROGRAMS_KEPT_S = 7 * 86400


def programs_folder() -> Path:
    """Return this user's folder of compiled programs on this machine; programs of last week are removed."""
    folder = Path(tempfile.gettempdir()) / f"diloco-test-programs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Tests run these programs, so nobody else may write them. A link has its own owner here.
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="diloco-test-programs-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for program in folder.glob("*-cache"):
        with contextlib.suppress(OSError):
            if time.time() - program.stat().st_mtime > PROGRAMS_KEPT_S:
                program.unlink()
    return folder


assert "jax" not in sys.modules, (
    "something imported jax before tests/conftest.py could set it up; see pytest -p options"
)
if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
    # pytest -m device, started by somebody who has an accelerator and says so
    del SETTINGS["JAX_PLATFORMS"], SETTINGS["JAX_NUM_CPU_DEVICES"]
os.environ.update(SETTINGS)

# Most of the suite's processor time is compilation, so tests and the processes that they start share compiled programs,
# and these are kept between runs of the suite. JAX names a program by its code, its options and JAX's version.
# Workers of pytest-xdist inherit the name of the folder. DILOCO_TEST_PROGRAMS=FOLDER chooses another one.
if not os.environ.get("DILOCO_TEST_PROGRAMS"):
    os.environ["DILOCO_TEST_PROGRAMS"] = str(programs_folder())
os.environ.update(
    JAX_COMPILATION_CACHE_DIR=os.environ["DILOCO_TEST_PROGRAMS"],
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
)
os.environ.setdefault("NUMBA_CACHE_DIR", os.path.join(os.environ["DILOCO_TEST_PROGRAMS"], "numba"))

# A shell's background job ignores interrupts, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline would measure the machine.
hypothesis.settings.register_profile(
    "diloco",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=examples(100),
)
hypothesis.settings.load_profile("diloco")

# Under test every annotated array is checked against its shape and dtype; in production nobody pays for it.
jaxtyping.install_import_hook(["diloco_jax.core", "diloco_jax.training"], "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost. Ignore damaged programs: a test may have killed the process that wrote one."""
    config.pluginmanager.register(Meter(config))
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and let it pass over modules and tests from then on.

    These are half a million objects that are never freed. Walking them takes a quarter of the processor time of
    collection, and a third of a second in each later `gc.collect()`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
