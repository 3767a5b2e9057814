"""Tests are stricter than production: JAX on eight emulated CPU devices, no silent broadcasting, shapes checked.

Everything is set through the environment, before anything imports JAX, so that tests of protocol and simulator never
pay for importing it, and processes that a test starts inherit the settings unless they choose their own.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile

import hypothesis
import jaxtyping

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    # XLA sizes its CPU thread pool by this. With one thread per device a multi-device program that nobody waits for can
    # fill the pool, and the next rendezvous then never completes: the process aborts after 40 s.
    "NPROC": "16",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_ENABLE_X64": "0",
}

assert "jax" not in sys.modules, (
    "something imported jax before tests/conftest.py could set it up; see pytest -p options"
)
if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
    # pytest -m device, started by somebody who has an accelerator and says so
    del SETTINGS["JAX_PLATFORMS"], SETTINGS["JAX_NUM_CPU_DEVICES"]
os.environ.update(SETTINGS)

# Processes that tests start share their compiled programs, for one run of the suite.
if "DILOCO_TEST_PROGRAMS" not in os.environ:  # not a worker of pytest-xdist
    os.environ["DILOCO_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="diloco-test-programs-")
    atexit.register(shutil.rmtree, os.environ["DILOCO_TEST_PROGRAMS"], ignore_errors=True)

# A shell's background job ignores interrupts, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline would measure the machine.
hypothesis.settings.register_profile("diloco", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("diloco")

# Under test every annotated array is checked against its shape and dtype; in production nobody pays for it.
jaxtyping.install_import_hook(["diloco_jax.core", "diloco_jax.training"], "beartype.beartype")
