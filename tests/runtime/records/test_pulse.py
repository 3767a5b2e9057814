"""A hanging loop ends its process with a reason, and the run continues; a stopped or slow loop does not."""

import gc
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.liveness import read_phases
from diloco_jax.runtime.records.pulse import MEDIAN_OF, TICK_S, Patience, Pulse
from diloco_jax.runtime.records.signals import HUNG
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.settings.run import WatchdogConfig
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.runtime.helpers import SLOW_STEP_S, kill_processes, start, status, wait_for, write_config

CONFIG = WatchdogConfig(least_s=30.0, median_factor=4.0, start_s=100.0)


@pytest.mark.parametrize(
    ("steps", "bound_s"),
    [
        # The first step includes compilation.
        ([], 100.0),
        ([5.0], 30.0),  # the least
        # The bound follows the median of the last steps.
        ([80.0, 9.0, 9.0], 36.0),
        # The bound is never above the one of the start.
        ([60.0], 100.0),
        ([20.0] * MEDIAN_OF + [8.0] * MEDIAN_OF, 32.0),
    ],
)
def test_a_bound_follows_the_last_steps(steps: list[float], bound_s: float) -> None:
    patience = Patience(CONFIG)
    for took_s in steps:
        patience.beat(took_s)
    assert bound_s == CONFIG.bound_s(median(steps[-MEDIAN_OF:]) if steps else None)
    # This count sees the last beat.
    patience.count(0.0)
    for _ in range(int(bound_s)):
        assert not patience.count(1.0)
    assert f"more than the {bound_s:.0f} s" in patience.count(1.0)
    assert patience.long == (not steps)
    patience.beat()
    assert not patience.count(1.0), "the loop continues"


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    patience = Patience(CONFIG)
    patience.beat(1.0)
    patience.count(0.0)
    # Each count comes an hour late and still weighs two ticks.
    for _ in range(15):
        assert not patience.count(3600.0)
    assert patience.count(2 * TICK_S)


@pytest.mark.parametrize("config", [CONFIG, WatchdogConfig(least_s=0.0)])
def test_a_loop_that_rests_or_is_not_watched_never_hangs(config: WatchdogConfig) -> None:
    patience = Patience(config)
    patience.beat(1.0)
    if config.least_s:
        patience.wait(math.inf)
    assert not any(patience.count(1.0) for _ in range(5000))


def test_files_say_that_a_loop_runs_and_is_ready(tmp_path: Path) -> None:
    alive, ready = (tmp_path / "health" / f"a-h1.{kind}" for kind in ("alive", "ready"))
    ready.parent.mkdir()
    # The file is of an earlier process.
    ready.touch()
    with closing(Pulse(WatchdogConfig(least_s=0.0), "a loop", (tmp_path, "a-h1"))) as pulse:
        assert alive.exists() and not ready.exists() and not read_phases(tmp_path)
        pulse.phase("compiling")
        assert [phase[:2] for phase in read_phases(tmp_path)] == [("a-h1", "compiling")]
        written = tmp_path / "health" / "a-h1.phase"
        os.utime(written, (0, time.time() - 400))
        assert [phase.words for phase in read_phases(tmp_path)] == ["compiling"], "it takes long, and runs"
        os.utime(alive, (0, time.time() - 400))
        assert not read_phases(tmp_path), "a killed process left its phase"
        pulse.ready(True)
        assert ready.exists() and not read_phases(tmp_path)
        pulse.phase("recovering")
        assert not read_phases(tmp_path), "it trains"
    assert alive.exists() and not ready.exists()


def test_a_phase_that_lasts_is_logged_again_with_its_newest_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("diloco_jax.runtime.records.pulse.time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO")
    # Its own thread would look at other times.
    monkeypatch.setattr("diloco_jax.runtime.records.pulse._watch", lambda watched, over: None)
    with closing(Pulse(WatchdogConfig(least_s=0.0), "a loop", (tmp_path, "a"))) as pulse:
        pulse.phase("compiling, 0 of 3, now: step")
        for second in range(100):
            clock[0] = float(second)
            if second == 30:
                pulse.phase("compiling, 1 of 3, now: adopt")
            pulse.look(1.0)
        pulse.ready(True)
        clock[0] = 1000.0
        pulse.look(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling",
        "compiling, 0 of 3, now: step, for 10 s",
        "compiling, 0 of 3, now: step, for 20 s",
        "compiling, 1 of 3, now: adopt, for 10 s",
        "compiling, 1 of 3, now: adopt, for 50 s",
    ]


def test_a_forgotten_pulse_watches_nothing() -> None:
    """A run that could not start leaves its pulse behind; half an hour later it would end the user's process."""
    before = set(threading.enumerate())
    pulse = Pulse(CONFIG, "a loop that never ran", None)
    (watchdog,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "watchdog")
    assert watchdog.is_alive()
    del pulse
    gc.collect()
    watchdog.join(20 * TICK_S)
    assert not watchdog.is_alive()


@pytest.mark.parametrize("rewind", [True, False])
def test_a_syncer_that_failed_watches_nothing(tmp_path: Path, rewind: bool) -> None:
    """The error keeps the failed object; an open pulse would end the process half an hour later."""
    before = set(threading.enumerate())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = load(write_config(tmp_path, syncer={"metrics": address}))
        syncer = SyncerRun(config, tmp_path / "run", threading.Event(), Evaluator(config), rewind=rewind)
        # Without `rewind` the address fails; with it the run fails before it opens anything.
        with pytest.raises(ValueError, match="nothing to go back to" if rewind else address) as failed:
            syncer.run()
    for watchdog in (thread for thread in set(threading.enumerate()) - before if thread.name == "watchdog"):
        watchdog.join(20 * TICK_S)
        assert not watchdog.is_alive(), failed


HANGS = """
import sys, threading
from pathlib import Path
from diloco_jax.runtime.records.liveness import read_phases
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.settings.run import WatchdogConfig
pulse = Pulse(WatchdogConfig(least_s=0.5, start_s=0.5), "the loop of a", (Path(sys.argv[1]), "a"))
pulse.last_word = lambda reason: (print("last word:", reason, flush=True), threading.Event().wait())
def waits_for_ever(): threading.Event().wait()
waits_for_ever()
"""


def test_a_process_that_hangs_ends_with_its_stacks_and_a_reason(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, tmp_path], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == HUNG
    assert "in waits_for_ever" in done.stderr
    assert "last word: the loop of a hung: no progress" in done.stdout


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.parametrize(
    ("islands", "host", "words"),
    [
        ({}, 0, r"island-\d ended with status 124: .*the loop of island-\d hangs: no progress"),
        ({"controller": "single"}, 0, r"islands ended with status 124: .*the loop of island-\d hangs: no progress"),
        ({"devices": 4, "hosts": 2}, 1, r"island-\d(.host-1)? ended with status 124: .* hangs: no progress"),
    ],
    ids=["alone", "one controller", "a follower"],
)
def test_an_island_whose_step_blocks_forever_restarts_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, islands: dict[str, object], host: int, words: str
) -> None:
    monkeypatch.setenv("DILOCO_TEST_HANG", str(tmp_path / "hang.file"))
    model = {"module": "tests.runtime.paced:HangingDecoder"}
    watchdog = {"least_s": 5.0, "start_s": 600.0}
    changes = {"islands": islands, "model": model, "watchdog": watchdog, "train": {"steps": 200, "eval_every": 0}}
    path, run_dir = write_config(tmp_path, **changes), tmp_path / "run"
    process = start("train", path, "--quiet", "--run-dir", run_dir, step_s=SLOW_STEP_S)
    try:
        wait_for(lambda: status(run_dir).get("global_step", 0) > 10, "training")
        assert {p.name for p in (run_dir / "health").glob("*.ready")} >= {"syncer.ready", "island-0.ready"}
        (tmp_path / f"hang.{host}").touch()
        output, _ = process.communicate(timeout=HANGS_S)
    finally:
        kill_processes(tmp_path)
    assert process.returncode == 0 and re.search(words, output), output
    assert not list((run_dir / "health").glob("*.ready"))
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("island*.log"))
    assert "_hang_if_told" in logs  # among the stacks
    assert '"complete": true' in (run_dir / "summary.json").read_text()
