"""The command `train`: a local run from its config to its report, with a live view."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console

from diloco_jax.runtime.local.check_input import memory_bytes, oversized
from diloco_jax.runtime.local.processes import Machines
from diloco_jax.runtime.local.run import LocalRun, RunFailed
from diloco_jax.runtime.records.files import (
    LOGS,
    SAMPLE_FILE,
    SUMMARY_FILE,
    command,
    has_begun,
    resume_command,
)
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.runtime.records.telemetry import replace_text
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.page.page import write_report
from diloco_jax.tools.terminal.closing import alarm_lines, ending, onward
from diloco_jax.tools.terminal.view import LiveView, run_in, show_cursor


@contextmanager
def _machines(
    config: RunConfig, run_dir: Path, say: Callable[[str], None]
) -> Iterator[tuple[RunConfig, Machines | None]]:
    """Yield the config of a run for the machines of its islands, and these machines; None for this machine."""
    if not config.islands.ray:
        yield config, None
        return
    from diloco_jax.tools.ray.cluster import on_cluster

    with on_cluster(config, run_dir, say) as (reachable, machines):
        yield reachable, machines


def _run(
    config: RunConfig, run_dir: Path, console: Console, say: Callable[[str], None], *, live: bool, resume: bool
) -> None:
    """Run syncer and islands to the end; RunFailed or ValueError if that cannot happen."""
    with _machines(config, run_dir, say) as (there, machines):
        # Ray handles signals in its own way when it connects, so our handlers come after it.
        stop = stop_on_signals(lambda: show_cursor(console))
        if machines is not None:
            machines.watch(stop)
        run = LocalRun(there, run_dir, say, stop, resume=resume, machines=machines)
        say(f"run folder {run_dir}, logs in {run_dir / LOGS}")
        if warning := oversized(config, memory_bytes()):
            say(warning)
        with LiveView(run_in(run_dir), console) if live else nullcontext():
            run.run()


def train_locally(config: RunConfig, run_dir: Path, *, live: bool, quiet: bool, resume: bool = False) -> dict[str, Any]:
    """Run syncer and islands to the end, or resume a run that ended early, then write the report.

    Returns the summary; it is empty when the run failed, after a message with the reason. ValueError if a setting is
    wrong.
    """
    # Ray writes to standard output, which is redirected then; this console keeps the real one.
    console = Console(file=sys.stderr if quiet else sys.stdout)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    try:
        _run(config, run_dir, console, say, live=live, resume=resume)
    except RunFailed as error:
        if error.wrong_input:
            raise ValueError(str(error)) from error
        Console(stderr=True).print(f"diloco train: {error}", highlight=False, markup=False, soft_wrap=True)
        return {}
    summary_file = run_dir / SUMMARY_FILE
    if not summary_file.exists():
        say(
            f"stopped while no syncer was running; to continue: {resume_command(run_dir)}"
            if has_begun(run_dir)
            else "stopped before training began"
        )
        return {"complete": False}
    summary: dict[str, Any] = json.loads(summary_file.read_text(encoding="utf-8"))
    say(ending(summary, config))
    # The import loads JAX with its compiler, which this process did not need until now.
    from diloco_jax.cli.inference import written

    if summary["complete"] and not quiet and (text := written(run_dir, 200)):
        say(f"the merged model writes ({command('sample', run_dir)}):\n{indent(text, '    ')}")
        # The report and the page show it too.
        replace_text(run_dir / SAMPLE_FILE, text)
    try:
        say(f"report {write_report(run_dir)}")
    except ValueError as error:
        # The run stopped before its first step.
        say(f"no report: {error}")
    for text in alarm_lines(summary, run_dir):
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
    # This is the last line, so that a reader finds it.
    if text := onward(summary, config, run_dir):
        say(text)
    return summary
