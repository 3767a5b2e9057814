"""An early island loads after one line of its supervisor, joins after another, and ends if its supervisor does."""

import io
import signal
from typing import Any

import pytest

from diloco_jax.runtime.local import loading
from diloco_jax.runtime.local.loading import AWAITING, COMPILING, come_early
from diloco_jax.runtime.local.standby import COMPILED
from diloco_jax.settings.run import RunConfig


class Recorder:
    """Signs of life that only record what they get."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def phase(self, words: str) -> None:
        self.calls.append(words)

    def rest(self) -> None:
        self.calls.append("rest")

    def patient(self) -> None:
        self.calls.append("patient")


@pytest.mark.parametrize(
    ("lines", "loads", "result"),
    [
        (COMPILED + " set-1\n" + "127.0.0.1:5\n", True, ("127.0.0.1:5", "loop")),
        (COMPILED + " set-1\n" + "127.0.0.1:5\n", False, ("127.0.0.1:5", None)),
        (COMPILED + "\n", True, None),
        ("", True, None),
    ],
)
def test_what_an_early_island_makes_of_its_lines(
    monkeypatch: pytest.MonkeyPatch, lines: str, loads: bool, result: tuple[str, str | None] | None
) -> None:
    pulse: Any = Recorder()

    def load(config: RunConfig, name: str, report: Any, *, evaluates: bool) -> str:
        ends_at_once = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(ends_at_once)
        assert ends_at_once != -1, "a signal would have to wait for the compiler"
        assert not evaluates, "the island compiles the evaluation beside its first steps"
        pulse.calls.append("loads")
        return "loop"

    monkeypatch.setattr(loading, "compiled_loop", load)
    monkeypatch.setattr(loading, "_import_rest", lambda: None)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert come_early(RunConfig(), "island-0", pulse, loads=loads) == result
    # The watchdog counts while the island loads, and not while it waits.
    waits = [COMPILING, "rest"]
    joins = ["patient", *(["loads"] * loads), AWAITING, "rest", "patient"]
    assert pulse.calls == waits + joins * bool(lines)
