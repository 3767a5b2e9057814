"""The time that a replay will take, from the figures of the run that it repeats."""

from contextlib import suppress
from pathlib import Path

from diloco_jax.runtime.figures.facts import RunFacts
from diloco_jax.runtime.figures.forms import format_duration
from diloco_jax.runtime.records.files import STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.telemetry import read_object


def expected_time(run_dir: Path, until: int | None = None) -> str:
    """Return a line about the time of a replay; "" if the run's folder does not show how long the run trained.

    Islands that shared a machine shared its cores, so one process needs about as long as all of them together did.
    """
    found = []
    for name in (STATUS_FILE, SUMMARY_FILE):
        with suppress(OSError, ValueError):
            found.append(read_object(run_dir / name))
    facts = RunFacts()
    # Another program may have written the files.
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        facts = RunFacts.of(*found)
    if not facts.wall_s or not facts.global_step:
        return ""
    # The uptime leaves out the time when the run was stopped.
    trained_s = facts.wall_s * (1.0 if facts.uptime is None else facts.uptime)
    share = 1.0 if until is None else min(1.0, until / facts.global_step)
    return (
        f"one process compiles, and then repeats the steps of all islands: about {format_duration(share * trained_s)}, "
        "as long as the run trained, on an equal and otherwise idle machine; longer if each island had a separate one"
    )
