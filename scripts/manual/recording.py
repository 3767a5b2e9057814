"""Record the live view of a real run while an island is killed and returns: docs/recording.svg, recording-narrow.svg.

    python scripts/manual/recording.py

The command starts the quickstart, sends SIGKILL to island-2 once a third of the run is over, and stops the run once the
island trains again. It takes about two minutes on two idle cores. The pictures repeat forever, at six times the speed;
readers who prefer reduced motion see the moment after the kill. The narrow one is for screens of phones.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from diloco_jax.tools.terminal.view import LiveView, run_in

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Columns of the terminal in each picture.
WIDTHS = {"recording.svg": 100, "recording-narrow.svg": 50}
VICTIM = "island-2"
# Seconds of the run between two frames, and seconds that a frame is shown.
EVERY_S, SHOWN_S = 3.0, 0.5
# The last frame is shown longer, so that a reader sees where the recording ends.
LAST_SHOWN_S = 2.5
KILL_AT, LIMIT_S = 0.33, 900.0
# The run has this time to save and end.
STOP_S = 120.0
# Seconds that are recorded before the kill, and after the return.
BEFORE_S, AFTER_S = 15.0, 15.0
LINE, CELL, MARGIN = 19, 8.4, 14
STYLE = """
  .paper { fill: #ffffff } text { fill: #24292f; white-space: pre }
  .dim { fill: #6e7781 } .green { fill: #1a7f37 } .red { fill: #cf222e }
  .yellow { fill: #9a6700 } .cyan { fill: #0969da } .bold { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #131416 } text { fill: #e6edf3 } .dim { fill: #9198a1 } .green { fill: #56d364 }
    .red { fill: #ff7b72 } .yellow { fill: #e3b341 } .cyan { fill: #79c0ff }
  }
"""


TRAINS, KILLED, RETURNED = "green", "red", "cyan"


class Frame(NamedTuple):
    """The view at one moment of the run."""

    at_s: float
    # Lines of the view for each picture.
    lines: dict[str, list[list[Segment]]]
    # Explanation of the moment, and its colour.
    caption: str = ""
    colour: str = TRAINS

    @property
    def missing(self) -> bool:
        """Return whether the killed island is missing."""
        return self.colour == KILLED


def _tspan(segment: Segment) -> str:
    style = segment.style
    if style is None:
        return escape(segment.text)
    names = [style.color.name] if style.color is not None and style.color.name in STYLE else []
    names += ["dim"] * bool(style.dim) + ["bold"] * bool(style.bold)
    return f'<tspan class="{" ".join(names)}">{escape(segment.text)}</tspan>' if names else escape(segment.text)


def _line(number: int, segments: Sequence[Segment]) -> str:
    text = "".join(map(_tspan, Segment.simplify(segments))).rstrip()
    y = MARGIN + LINE * (number + 1) - 5
    return f'<text x="{MARGIN}" y="{y}" xml:space="preserve">{text}</text>' if text else ""


def _motion(count: int) -> list[str]:
    """Return rules of style that show each of `count` frames once in a turn, and the last one longer."""
    total_s = SHOWN_S * (count - 1) + LAST_SHOWN_S
    rules = []
    for name, shown_s in (("show", SHOWN_S), ("stay", LAST_SHOWN_S)):
        share = 100 * shown_s / total_s
        rules.append(
            f"  @keyframes {name} {{ 0% {{ opacity: 1 }} {share:.3f}% {{ opacity: 0 }} 100% {{ opacity: 0 }} }}"
        )
    return [
        *rules,
        f"  .frame {{ opacity: 0; animation: show {total_s:g}s step-end infinite }}",
        "  .frame.last { animation-name: stay }",
        "  @media (prefers-reduced-motion: reduce) { .frame { animation: none } .still { opacity: 1 } }",
    ]


def draw(frames: Sequence[Frame], name: str) -> str:
    """Return an SVG file that shows the frames one after the other, forever, each below its caption.

    Args:
        frames: At least one; the first frame without the killed island is the still picture.
        name: One of WIDTHS.
    """
    # A caption, a note about the speed, and an empty line are above the view.
    rows = 3 + max(len(frame.lines[name]) for frame in frames)
    width, height = round(2 * MARGIN + CELL * WIDTHS[name]), 2 * MARGIN + LINE * rows
    still = next((number for number, frame in enumerate(frames) if frame.missing), 0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'role="img" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14"'
    speed = f"a real run on two shared cores, shown {EVERY_S / SHOWN_S:g} times as fast"
    drawn = [
        f"{head} {font}>",
        f"<title>The live view of a run on two cores: {VICTIM} is killed, the others continue, and it returns</title>",
        f"<style>{STYLE}\n{chr(10).join(_motion(len(frames)))}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        _line(1, [Segment(speed, Style(dim=True))]),
    ]
    for number, frame in enumerate(frames):
        kind = "frame" + " still" * (number == still) + " last" * (number == len(frames) - 1)
        caption = [Segment(frame.caption, Style(color=frame.colour, bold=True))]
        shown = [_line(0, caption), *(_line(3 + row, each) for row, each in enumerate(frame.lines[name]))]
        lines = "\n".join(filter(None, shown))
        drawn.append(f'<g class="{kind}" style="animation-delay: {number * SHOWN_S:g}s">\n{lines}\n</g>')
    return "\n".join([*drawn, "</svg>\n"])


class Recorder:
    """A reader of a run's folder that draws its view in the width of each picture."""

    def __init__(self, run_dir: Path) -> None:
        self._consoles = {
            name: Console(width=width, force_terminal=True, color_system="standard", file=io.StringIO())
            for name, width in WIDTHS.items()
        }
        self._views = {name: LiveView(run_in(run_dir), console) for name, console in self._consoles.items()}
        self._began_s = time.monotonic()
        # Times when the island was killed, and was first seen to train again.
        self.killed_s = self.returned_s = 0.0
        self._was_missing = False

    @property
    def at_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began_s

    @property
    def share_done(self) -> float:
        """Return the share of the run's global steps that is done."""
        status = next(iter(self._views.values())).status
        return status["global_step"] / status["total_steps"] if status and status["total_steps"] else 0.0

    def look(self) -> Frame:
        """Return the present picture of the run."""
        for view in self._views.values():
            view.poll()
        lines = {
            name: self._consoles[name].render_lines(view.picture(), pad=False) for name, view in self._views.items()
        }
        status = next(iter(self._views.values())).status
        rows = status["learners"] if status is not None else []
        trains = not any(row["learner"] == VICTIM and row["condition"] != "training" for row in rows)
        if self.killed_s and not self.returned_s and trains and self._was_missing:
            self.returned_s = self.at_s
        self._was_missing |= bool(self.killed_s) and not trains
        return Frame(self.at_s, lines, *self._caption())

    def _caption(self) -> tuple[str, str]:
        if not self.killed_s:
            return "four islands train one model", TRAINS
        if self.returned_s:
            return f"{VICTIM} is back, {self.returned_s - self.killed_s:.0f} s after the kill", RETURNED
        if not self._was_missing:
            return f"kill -9 {VICTIM}", KILLED
        return f"{VICTIM} was killed; the other three continue", KILLED


def record(run_dir: Path) -> list[Frame]:
    """Start the quickstart in an empty folder, kill an island, and return the frames around it.

    Raises:
        TimeoutError: The run did not start, or the island did not return, within LIMIT_S.
    """
    command = [sys.executable, "-m", "diloco_jax", "train", "quickstart", "--run-dir", str(run_dir), "--quiet"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    recorder, frames = Recorder(run_dir), list[Frame]()
    try:
        while not recorder.returned_s or recorder.at_s < recorder.returned_s + AFTER_S:
            if recorder.at_s > LIMIT_S or job.poll() is not None:
                raise TimeoutError(f"{VICTIM} was not killed and back within {LIMIT_S:g} s; look at {run_dir}")
            time.sleep(EVERY_S)
            if not recorder.killed_s and recorder.share_done >= KILL_AT:
                os.kill(_process_of(job.pid), signal.SIGKILL)
                recorder.killed_s = recorder.at_s
            frames.append(recorder.look())
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(STOP_S)
    return [frame for frame in frames if frame.at_s >= recorder.killed_s - BEFORE_S]


def _process_of(supervisor: int) -> int:
    """Return the process of the victim among those that a supervisor started; TimeoutError if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            # The name of the program, in brackets, may contain spaces; the second field after it is the parent.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if VICTIM in words and parent == supervisor:
            return int(folder.name)
    raise TimeoutError(f"{VICTIM} has no process")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        # The view names the logs by this path, so it is the one that a reader's run has.
        recorded = record(Path("runs/quickstart"))
    for target in WIDTHS:
        text = draw(recorded, target)
        (DOCS / target).write_text(text, encoding="utf-8")
        print(f"{target}: {len(text) / 1e3:.0f} kB")
