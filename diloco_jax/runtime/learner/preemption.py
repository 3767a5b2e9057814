"""Notices of preemption: a learner on a machine that will be taken away soon leaves the run, as after SIGTERM.

Most platforms send SIGTERM by themselves. On Google Cloud the metadata server's instance/preempted becomes TRUE about
30 s before the machine stops. On other platforms an agent can write a file.
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
    """Set `stop` when a notice arrives from "gce" or as a file; return at once. Setting `stop` ends the watch."""
    threading.Thread(target=_watch, args=(source, stop), name="preemption", daemon=True).start()


def _watch(source: str, stop: threading.Event) -> None:
    warned = False
    while not stop.is_set():
        try:
            if ask_metadata("preempted", "HOST").strip() == "TRUE" if source == GCE else os.path.exists(source):
                log.warning(f"preemption notice ({source}): leaving the run")
                stop.set()
            warned = False
        # urllib raises OSErrors; a malformed answer is a ValueError.
        except (OSError, ValueError) as error:
            if not warned:
                log.warning(f"no preemption notices: {source} cannot be read ({error}); still trying")
            warned = True
        stop.wait(POLL_S)


def check_source(source: str) -> str:
    """Return the source of notices; ValueError if the folder of its file does not exist."""
    if source != GCE and not Path(source).absolute().parent.is_dir():
        raise ValueError(
            f"--preemption {source}: there is no folder {Path(source).absolute().parent}; use gce or a path"
        )
    return source
