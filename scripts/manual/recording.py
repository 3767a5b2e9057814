"""Record the live view of a real run while an island is killed and returns: docs/recording.svg.

    python scripts/manual/recording.py [RUN_DIR]

The command starts the quickstart, sends SIGKILL to island-2 once a third of the run is over, and stops the run once the
island trains again. It takes about two minutes on two idle cores. The picture repeats forever, at six times the speed;
readers who prefer reduced motion see the moment after the kill.
"""

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

from diloco_jax.runtime.records.files import STATUS_FILE
from diloco_jax.tools.terminal.view import LiveView, run_in

TARGET = Path(__file__).resolve().parents[2] / "docs" / "recording.svg"
VICTIM = "island-2"
WIDTH = 100
# Seconds of the run between two frames, and seconds that a frame is shown.
EVERY_S, SHOWN_S = 3.0, 0.5
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


class Frame(NamedTuple):
    """The view at one moment of the run."""

    at_s: float
    lines: list[list[Segment]]
    # Whether the killed island is missing.
    missing: bool


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


def draw(frames: Sequence[Frame]) -> str:
    """Return an SVG file that shows the frames one after the other, forever.

    Args:
        frames: At least one; the first frame without the killed island is the still picture.
    """
    rows, total_s = max(len(frame.lines) for frame in frames), SHOWN_S * len(frames)
    width, height = round(2 * MARGIN + CELL * WIDTH), 2 * MARGIN + LINE * rows
    still = next((number for number, frame in enumerate(frames) if frame.missing), 0)
    share = 100 / len(frames)
    motion = [
        f"  @keyframes show {{ 0% {{ opacity: 1 }} {share:.3f}% {{ opacity: 0 }} 100% {{ opacity: 0 }} }}",
        f"  .frame {{ opacity: 0; animation: show {total_s:g}s step-end infinite }}",
        "  @media (prefers-reduced-motion: reduce) { .frame { animation: none } .still { opacity: 1 } }",
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'role="img" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14"'
    drawn = [
        f"{head} {font}>",
        f"<title>The live view of a run on two cores: {VICTIM} is killed, the others continue, and it returns</title>",
        f"<style>{STYLE}\n{chr(10).join(motion)}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
    ]
    for number, frame in enumerate(frames):
        kind = "frame still" if number == still else "frame"
        lines = "\n".join(filter(None, (_line(*each) for each in enumerate(frame.lines))))
        drawn.append(f'<g class="{kind}" style="animation-delay: {number * SHOWN_S:g}s">\n{lines}\n</g>')
    return "\n".join([*drawn, "</svg>\n"])


def look(view: LiveView, console: Console, began_s: float) -> Frame:
    """Return the present picture of a run."""
    view.poll()
    rows = view.status["learners"] if view.status is not None else []
    missing = any(row["learner"] == VICTIM and row["condition"] != "training" for row in rows)
    return Frame(time.monotonic() - began_s, console.render_lines(view.picture(), pad=False), missing)


def record(run_dir: Path) -> list[Frame]:
    """Start the quickstart in an empty folder, kill an island, and return the frames around it.

    Raises:
        TimeoutError: The run did not start, or the island did not return, within LIMIT_S.
    """
    console = Console(width=WIDTH, force_terminal=True, color_system="standard", file=io.StringIO())
    command = [sys.executable, "-m", "diloco_jax", "train", "quickstart", "--run-dir", str(run_dir), "--quiet"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    view, began_s, frames = LiveView(run_in(run_dir), console), time.monotonic(), list[Frame]()
    killed_s = returned_s = 0.0
    try:
        while not returned_s or time.monotonic() < returned_s + AFTER_S:
            if time.monotonic() > began_s + LIMIT_S or job.poll() is not None:
                raise TimeoutError(f"{VICTIM} was not killed and back within {LIMIT_S:g} s; look at {run_dir}")
            time.sleep(EVERY_S)
            frames.append(look(view, console, began_s))
            status = view.status
            if status is None or not status["total_steps"]:
                continue
            if not killed_s and status["global_step"] >= KILL_AT * status["total_steps"]:
                os.kill(_process_of(run_dir), signal.SIGKILL)
                killed_s = time.monotonic()
            elif killed_s and not returned_s and not frames[-1].missing and any(frame.missing for frame in frames):
                returned_s = time.monotonic()
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(STOP_S)
    first_s = killed_s - began_s - BEFORE_S
    return [frame for frame in frames if frame.at_s >= first_s]


def _process_of(run_dir: Path) -> int:
    """Return the process of the victim, which its command line names."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if VICTIM in words and any(str(run_dir) in word for word in words):
            return int(path.parent.name)
    raise TimeoutError(f"no process of {VICTIM} names {run_dir / STATUS_FILE}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = draw(record(Path(sys.argv[1] if len(sys.argv) > 1 else folder) / "recorded"))
    TARGET.write_text(made, encoding="utf-8")
    print(f"{TARGET.name}: {len(made) / 1e3:.0f} kB")
