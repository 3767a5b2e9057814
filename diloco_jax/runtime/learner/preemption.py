"""A notice that this machine will be taken away soon: a learner that hears of it leaves politely, as after SIGTERM.

Most platforms send SIGTERM by themselves. Google Cloud tells its metadata server first (instance/preempted becomes
TRUE, about 30 s before the machine goes); others have a file written by an agent.
"""

import logging
import os
import threading
from pathlib import Path

from diloco_jax.runtime.island.join import ask_metadata

GCE = "gce"
POLL_S = 1.0

log = logging.getLogger(__name__)


def watch(source: str, stop: threading.Event) -> None:
    """Set `stop`, which ends the watch too, when a notice comes from "gce" or as a file; returns at once."""
    threading.Thread(target=_watch, args=(source, stop), name="preemption", daemon=True).start()


def _watch(source: str, stop: threading.Event) -> None:
    told = False
    while not stop.is_set():
        try:
            if ask_metadata("preempted", "HOST").strip() == "TRUE" if source == GCE else os.path.exists(source):
                log.warning(f"preemption notice ({source}): leaving politely")
                stop.set()
            told = False
        except (OSError, ValueError) as error:  # urllib's are OSErrors; an odd answer is a ValueError
            if not told:
                log.warning(f"no preemption notices: {source} cannot be asked ({error}); trying on")
            told = True
        stop.wait(POLL_S)


def check_source(source: str) -> str:
    """Return the source; raise ValueError if its file of notices could never be seen, since it lies in no folder."""
    if source != GCE and not Path(source).absolute().parent.is_dir():
        raise ValueError(
            f"--preemption {source}: there is no folder {Path(source).absolute().parent}; use gce or a path"
        )
    return source
