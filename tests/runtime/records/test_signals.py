"""Exit statuses: their consequences, and those of programs whose authors handle no error of this package."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.runtime.records.signals import AFTER_END, ASKED_TO_END, FAILED, INTERRUPTED, WRONG_INPUT, after_end

DOCS = Path(__file__).resolve().parents[3] / "docs"

PROGRAM = """
from diloco_jax.runtime.records.signals import RefusedForGood, end_refused
end_refused()
end_refused()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        ('RefusedForGood("the run has another model")', WRONG_INPUT, ["diloco_jax: the run has another model"]),
        ('ValueError("the loop\'s own")', FAILED, ["ValueError: the loop's own"]),
    ],
)
def test_only_a_refusal_ends_a_program_so_that_nobody_restarts_it(error: str, status: int, lines: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == status
    printed = ended.stderr.splitlines()
    assert printed[-1:] == lines and ("Traceback" in ended.stderr) == (status == FAILED)


def test_the_manual_lists_every_status_with_its_meaning() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [f"| {status} | {then.meaning} | {'no' if not then.again else ''}" for status, then in AFTER_END.items()]
    assert [row for row in rows if row not in text] == []
    assert ASKED_TO_END == (130, 143)


def test_a_signal_has_the_consequence_of_the_status_that_a_shell_would_report() -> None:
    assert after_end(-signal.SIGTERM) == AFTER_END[143] and after_end(-signal.SIGINT) == AFTER_END[INTERRUPTED]
    assert after_end(-signal.SIGKILL) == after_end(77) == AFTER_END[FAILED]


# A derivation of keys is a long call of C that no handler of Python interrupts, as a compilation is.
PREPARES = """
import hashlib, os, signal, threading
from diloco_jax.runtime.records.signals import ended_at_once, stop_on_signals
stop = stop_on_signals()
{before}
with ended_at_once(lambda: print("ends", flush=True)):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.{name})).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
print("prepared")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_process_that_prepares_even_inside_of_a_long_call(name: str) -> None:
    program = PREPARES.format(before="", name=name, rounds=2_000_000_000)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (INTERRUPTED, "ends\n"), ended.stderr


def test_other_signals_and_later_ones_end_nothing() -> None:
    before = "signal.signal(signal.SIGUSR1, lambda *_: None)"
    program = PREPARES.format(before=before, name="SIGUSR1", rounds=3_000_000)
    program += "os.kill(os.getpid(), signal.SIGTERM)\nprint('stopped', stop.is_set())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "prepared\nstopped True\n"), ended.stderr
