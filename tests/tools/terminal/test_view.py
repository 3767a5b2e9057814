"""The live view of a run: it survives what it reads, disturbs nothing, and ends when the run does."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from diloco_jax.cli import main as cli
from diloco_jax.runtime.records.liveness import tell_phase
from diloco_jax.runtime.records.signals import FAILED, WRONG_INPUT
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.tools.terminal.picture import History
from diloco_jax.tools.terminal.view import LiveView, run_in, show_cursor
from tests.tools.terminal.made import drawn, status, words


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=False), out


def picture_of(view: LiveView) -> str:
    view.poll()
    return words(drawn(view.picture()))


@pytest.mark.parametrize("content", [None, "", '{"run": "quick', "[1, 2]", "{}", "\x00\xff"])
def test_a_missing_or_torn_file_is_survived(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "status.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    console, out = plain_console()
    view = LiveView(run_in(tmp_path), console)
    assert picture_of(view) == "starting 0 s"
    view.print_change()
    assert out.getvalue() == ""

    write_json(path, status())
    assert "step 400" in picture_of(view)
    path.write_text(json.dumps(status(global_step=401))[:40])
    assert "step 400" in picture_of(view), "the last good picture stays"
    path.unlink()
    assert "step 400" in picture_of(view)


def test_phases_are_shown_before_there_is_a_status(tmp_path: Path) -> None:
    tell_phase(tmp_path, "syncer", "importing")
    tell_phase(tmp_path, "island-0", "compiling, 3 of 7 programs")
    console, out = plain_console()
    view = LiveView(run_in(tmp_path), console)
    assert picture_of(view) == "starting 0 s island-0 compiling, 3 of 7 programs 0 s syncer importing 0 s"
    view.print_change()
    assert out.getvalue() == "[start 0 s] island-0: compiling, 3 of 7 programs\n"
    tell_phase(tmp_path, "island-0", "")
    assert picture_of(view) == "starting 0 s syncer importing 0 s"


def test_without_a_terminal_it_prints_plain_lines_of_changes(tmp_path: Path) -> None:
    write_json(tmp_path / "status.json", status())
    console, out = plain_console()
    with LiveView(run_in(tmp_path), console) as view:
        assert not view.ended.is_set()
    assert out.getvalue().splitlines()[0] == "[1 min 40 s] quickstart is running"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_it_leaves_the_last_picture(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    out = io.StringIO()
    with LiveView(run_in(tmp_path), Console(file=out, width=100, force_terminal=True, color_system=None)) as view:
        write_json(path, status(state="complete", global_step=1600))
    assert "step 1,600 of 1,600" in out.getvalue()
    assert view.ended.is_set()


def test_the_curves_restart_with_another_run() -> None:
    history = History()
    for wall_s in range(10):
        history.add(status(wall_s=float(wall_s), global_step=wall_s))
    assert len(history.curves()["training loss"]) == 10
    history.add(status(wall_s=1.0, global_step=0))
    assert history.curves() == {}, "a new run in the same folder"
    for step in (4, 5, 1):
        history.add(status(wall_s=2.0 + step, global_step=step))
    assert history.curves() == {}, "back to a snapshot"


def test_an_old_status_is_not_shown_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr("diloco_jax.tools.terminal.view.time.monotonic", lambda: clock_s)
    path = tmp_path / "status.json"
    write_json(path, status())
    console, out = plain_console()
    view = LiveView(run_in(tmp_path), console)
    assert "running" in picture_of(view)
    clock_s = 12.0
    text = picture_of(view)
    silent = "the syncer, which has said nothing for 12 s"
    assert "quickstart silent" in text and " left" not in text
    assert f"waiting for: {silent}" in text
    view.print_change()
    assert out.getvalue() == f"[1 min 40 s] quickstart is silent, waiting for: {silent}\n"
    write_json(path, status(wall_s=101.0))
    assert "running" in picture_of(view)
    write_json(path, status(state="complete"))
    view.poll()
    clock_s = 1000.0
    assert "complete" in picture_of(view), "the last evaluation may take long"


def test_a_watch_ends_with_the_run_and_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handle: None)
    watch = ["status", str(tmp_path), "--watch"]
    write_json(tmp_path / "status.json", status(state="complete", global_step=1600))
    (tmp_path / "summary.json").write_text("{}")
    assert cli.main(watch) == 0
    assert capsys.readouterr().out.splitlines()[0] == "[1 min 40 s] quickstart is complete"
    (tmp_path / "summary.json").unlink()
    # The process of this status does not exist.
    write_json(tmp_path / "status.json", status())
    assert cli.main(watch) == FAILED
    assert capsys.readouterr().out.startswith("[1 min 40 s] quickstart is not running, waiting for: round 401")
    assert cli.main([*watch, "--json"]) == WRONG_INPUT
    assert "--watch draws for people" in capsys.readouterr().err
    assert cli.main(["status", str(tmp_path / "none"), "--watch"]) == WRONG_INPUT


def test_the_cursor_comes_back_on_a_terminal_only(tmp_path: Path) -> None:
    for terminal, written in ((True, b"\x1b[?25h"), (False, b"")):
        with (tmp_path / "out").open("w", encoding="utf-8") as out:
            show_cursor(Console(file=out, force_terminal=terminal))
        assert (tmp_path / "out").read_bytes() == written
