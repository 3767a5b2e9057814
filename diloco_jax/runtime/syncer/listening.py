"""The start of the syncer's listener, and the announcements that it makes to learners."""

import logging
import resource
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.runtime.syncer.begin import FAILOVER
from diloco_jax.runtime.syncer.leading import Leading
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.ends import listen
from diloco_jax.transport.link import bucket_scheme, split_address
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.session.listener import Listener

# A restarted syncer waits so long until the process before it has freed its ports.
LISTEN_PATIENCE_S = 30.0
LISTEN_RETRY_S = 0.5
# Open files that a syncer allows itself, if the system does.
FILES_MAX = 1 << 16

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class SyncerStart(NamedTuple):
    """One process of the syncer: how it starts, and what it announces."""

    mode: str
    epoch: int
    stop: threading.Event
    # Returns what learners must agree on; any thread may call it.
    expected: Callable[[], Mapping[str, str]]
    # A loop of a user asks for this before it joins.
    description: Description
    # The number of each island that asks for it, by name.
    number_of: Callable[[str], int] = lambda _: 0
    # Id of the run; "" if an older release started it.
    run: str = ""
    # This process as the leader of the run in its bucket.
    leading: Leading | None = None


def files_allowed() -> int:
    """Return how many files this process may open, once its soft limit is raised: the hard limit, or FILES_MAX."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)


def raise_file_limit() -> None:
    """Raise the soft limit of open files, which is often 1,024: strangers that connect would soon use these up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files_allowed():
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_allowed(), hard))


def open_listener(config: RunConfig, run_dir: Path, start: SyncerStart) -> Listener:
    """Open the syncer's listener, after a failover at the old address, where learners look for it.

    ValueError if the address is in use or not allowed.
    """
    raise_file_limit()
    transport, file = config.transport, run_dir / ADDRESS_FILE
    # Learners know the address of a process before this one.
    known = start.mode == FAILOVER or config.model.own
    bucket = bool(bucket_scheme(transport.address))
    if known and file.exists() and not bucket and split_address(transport.address)[1] == 0:
        transport = replace(transport, address=file.read_text(encoding="utf-8"))
    patience_s = LISTEN_PATIENCE_S if known else 0.0
    most = config.syncer.subscribers_max
    term = None if start.leading is None else start.leading.term
    made = partial(
        listen,
        transport,
        run_id=config.name,
        epoch=start.epoch,
        subscribers_max=most,
        run=start.run,
        term=term,
    )
    listener = patiently(made, patience_s, start.stop)
    # An unchanged file is not written again, since the disk may be full.
    if not file.exists() or file.read_text(encoding="utf-8") != listener.address:
        file.write_text(listener.address, encoding="utf-8")
    log.info(f"listening at {listener.address}")
    listener.announce(start.expected, start.description, start.number_of)
    return listener


def patiently(begin: Callable[[], ResultT], patience_s: float, stop: threading.Event) -> ResultT:
    """Call `begin` until an earlier process has freed its port; return the result. ValueError after `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return begin()
        except ValueError as error:
            if time.monotonic() >= until_s or stop.wait(LISTEN_RETRY_S):
                raise
            log.info(f"waiting for the port of the process before: {error}")
