"""The leadership of a run in a bucket: the syncer's claim before it reads its tape, and a standby's wait for its turn.

The order makes a takeover safe. A syncer writes an input to the copy of its tape, then looks whether a later leader
exists, and only then lets an effect of that input leave. A standby claims the run, and only then reads the copy. So
every effect that anybody has seen is on the tape that the standby continues, whatever was paused or slow in between.
"""

import json
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from diloco_jax.runtime.records.files import LEADING_FILE, has_begun
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.runtime.syncer.copies import Mirror, TapeCopy
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import bucket_scheme
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError
from diloco_jax.transport.store.term import Term

# A standby takes over from a leader without a sign of life for this long; it gives one every five seconds.
LEASE_S = 20.0
LOOK_S = 1.0
ID_BYTES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leading:
    """This process leads the run in a bucket.

    `copy` keeps the tape there; None if no standby is wanted.
    """

    term: Term
    copy: TapeCopy | None


def begin_to_lead(config: RunConfig, run_dir: Path) -> Leading | None:
    """Claim the run's bucket; None if the address is none.

    Raises:
        ValueError: Another process leads the run, or the bucket has another run.
        StoreError: The store does not answer.
    """
    if not bucket_scheme(config.transport.address):
        return None
    bucket = Bucket(config.transport)
    run, place = _known(run_dir)
    leader = bucket.claim(config.name, run, place)
    log.info(f"leads the run in {config.transport.address} as the syncer of epoch {leader.epoch}")
    return leading(config, Term(bucket, leader))


def leading(config: RunConfig, term: Term) -> Leading:
    """Return this process as the leader of a run, with a copy of the tape if it shall keep one."""
    return Leading(term, TapeCopy(term.bucket, term.leader) if config.syncer.standby else None)


def _known(run_dir: Path) -> tuple[str, str]:
    """Return the run's id in its bucket, new for a new run, and the name of this folder."""
    path = run_dir / LEADING_FILE
    place = f"{socket.gethostname()}:{run_dir.resolve()}"
    if has_begun(run_dir) and path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run"]), place
    run = secrets.token_hex(ID_BYTES)
    write_json(path, {"run": run})
    return run, place


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
            mirror.refresh(newest.epoch)
            if time.monotonic() - since_s > LEASE_S:
                return _take_over(config, bucket, newest, place, mirror)
        except StoreError as error:
            # A store that does not answer this process may answer the leader.
            since_s = time.monotonic()
            log.info(f"the bucket does not answer: {error}")
        except ValueError as error:
            log.info(f"not taken over: {error}")
            since_s = time.monotonic()
    return None


def _take_over(config: RunConfig, bucket: Bucket, lost: Leader, place: str, mirror: Mirror) -> Leading:
    log.warning(f"no sign of life of the syncer of epoch {lost.epoch} for {LEASE_S:g} s; taking over")
    began_s = time.monotonic()
    leader = bucket.lead(lost.epoch + 1, config.name, lost.run, place)
    term = Term(bucket, leader)
    try:
        write_json(mirror.run_dir / LEADING_FILE, {"run": lost.run})
        mirror.finish(lost.epoch)
    except BaseException:
        term.close()
        raise
    log.info(f"leads the run as the syncer of epoch {leader.epoch}, {time.monotonic() - began_s:.1f} s later")
    return leading(config, term)
