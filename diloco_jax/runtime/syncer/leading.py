"""The leadership of a run in a bucket: the syncer's claim before it reads its tape, and a standby's wait for its turn.

The order makes a takeover safe. A syncer writes an input to the copy of its tape, then looks whether a later leader
exists, and only then lets an effect of that input leave. A standby claims the run, and only then reads the copy. So
every effect that anybody has seen is on the tape that the standby continues, whatever was paused or slow in between.
"""

import contextlib
import json
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from diloco_jax.runtime.records.files import LEADING_FILE, has_begun
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.runtime.syncer.copies import Mirror, TapeCopy
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import bucket_scheme
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError
from diloco_jax.transport.store.term import Term

# A standby takes over from a leader without a sign of life for this long; it gives one every five seconds.
LEASE_S = 20.0
LOOK_S = AGAIN_S = 1.0
ID_BYTES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leading:
    """This process leads the run in a bucket.

    `copy` keeps the tape there; None if no standby is wanted.
    """

    term: Term
    copy: TapeCopy | None


def begin_to_lead(config: RunConfig, run_dir: Path, stop: threading.Event) -> Leading | None:
    """Claim the run's bucket, and begin its copy; None if the address is none, or `stop` was set before.

    Raises:
        ValueError: Another process leads the run or has continued it, or the bucket has another run.
    """
    if not bucket_scheme(config.transport.address):
        return None
    bucket = Bucket(config.transport)
    run, place = _known(run_dir)
    term: Term | None = None
    while not stop.is_set():
        try:
            if term is None:
                _check_history(bucket, run_dir, place)
                term = Term(bucket, bucket.claim(config.name, run, place))
                log.info(f"leads the run in {config.transport.address} as the syncer of epoch {term.leader.epoch}")
            return leading(config, term, run_dir)
        except StoreError as error:
            log.warning(f"the bucket does not answer, trying again: {error}")
            stop.wait(AGAIN_S)
    if term is not None:
        term.close()
    log.info("stopped before the bucket answered")
    return None


def _check_history(bucket: Bucket, run_dir: Path, place: str) -> None:
    """Check that no other process has continued the run, whose history is then not the one of this folder.

    Raises:
        ValueError: One has.
        StoreError: The store does not answer.
    """
    newest = bucket.leader()
    ours = newest is None or newest.mark.startswith(f"{place}.")
    if not ours and newest is not None and has_begun(run_dir) and bucket.store.exists(names.base(newest.epoch)):
        raise ValueError(
            f"another process has continued this run, as the syncer of epoch {newest.epoch}, and {run_dir} lacks what "
            "it decided; start this one with --standby and an empty folder (--run-dir)"
        )


def leading(config: RunConfig, term: Term, run_dir: Path) -> Leading:
    """Return this process as the leader of a run, with a copy of the tape if it shall keep one; StoreError as it."""
    if not config.syncer.standby:
        return Leading(term, None)
    copy = TapeCopy(term.bucket, term.leader)
    copy.begin(run_dir)
    return Leading(term, copy)


def _known(run_dir: Path) -> tuple[str, str]:
    """Return the run's id in its bucket, and the id of this folder; new ones in a new folder."""
    path = run_dir / LEADING_FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        return str(kept["run"]), str(kept["folder"])
    run, folder = secrets.token_hex(ID_BYTES), secrets.token_hex(ID_BYTES)
    write_json(path, {"run": run, "folder": folder})
    return run, folder


def stand_by(config: RunConfig, run_dir: Path, stop: threading.Event) -> Leading | None:
    """Keep a copy of the run until its syncer is lost, and then lead it; None if the run ended or `stop` was set.

    Raises:
        ValueError: The folder has a run, the address is not a bucket, or the bucket cannot be used.
    """
    if not (bucket_scheme(config.transport.address) and config.syncer.standby):
        raise ValueError(
            "--standby needs a bucket as transport.address, and syncer.standby: true for the syncer that leads, which "
            "then keeps a copy of its tape there"
        )
    if has_begun(run_dir):
        raise ValueError(f"{run_dir} has a run already; name an empty folder for the standby with --run-dir")
    bucket, place = Bucket(config.transport), _known(run_dir)[1]
    mirror = Mirror(bucket, run_dir)
    log.info(f"standing by at {config.transport.address}")
    known: Leader | None = None
    sign, since_s = b"", time.monotonic()
    while not stop.wait(LOOK_S):
        try:
            newest = bucket.leader()
            if newest is None:
                if known is not None:
                    log.info("the run has ended, or its syncer was stopped; nothing is left to take over")
                    return None
                continue
            seen = bucket.sign_of(newest)
            if newest != known or seen != sign:
                if newest != known:
                    log.info(f"the syncer of epoch {newest.epoch} leads the run")
                known, sign, since_s = newest, seen, time.monotonic()
            # Decided before the copy is read, which may take longer than the lease.
            silent = time.monotonic() - since_s > LEASE_S
            mirror.refresh(newest.epoch)
            if silent and not mirror.complete:
                log.warning("the run has no complete copy in its bucket, so nobody can take over: set syncer.standby")
                since_s = time.monotonic()
            elif silent and bucket.sign_of(newest) == seen:
                return _take_over(config, bucket, newest, place, mirror, stop)
        except StoreError as error:
            # A store that does not answer this process may answer the leader.
            since_s = time.monotonic()
            log.info(f"the bucket does not answer: {error}")
        except (OSError, ValueError) as error:
            log.warning(f"not taken over: {error}")
            since_s = time.monotonic()
    return None


def _take_over(
    config: RunConfig, bucket: Bucket, lost: Leader, place: str, mirror: Mirror, stop: threading.Event
) -> Leading:
    log.warning(f"no sign of life of the syncer of epoch {lost.epoch} for {LEASE_S:g} s; taking over")
    began_s = time.monotonic()
    leader = bucket.lead(lost.epoch + 1, config.name, lost.run, place)
    term = Term(bucket, leader)
    try:
        mirror.finish(lost.epoch, stop)
        write_json(mirror.run_dir / LEADING_FILE, {"run": lost.run, "folder": place})
        log.info(f"leads the run as the syncer of epoch {leader.epoch}, {time.monotonic() - began_s:.1f} s later")
        while True:
            try:
                return leading(config, term, mirror.run_dir)
            except StoreError as error:
                log.warning(f"the bucket does not answer, trying again: {error}")
                if stop.wait(AGAIN_S):
                    raise
    except BaseException:
        term.close()
        raise
