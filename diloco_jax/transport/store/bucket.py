"""The sealed objects of one run in its bucket, and who leads the run.

The syncer of an epoch is the process that has created `leader/EPOCH`. A later epoch ends the earlier one: islands look
for the newest leader when they connect and whenever their syncer is silent, and objects of different epochs have
different names. So a process that was stopped while another one took over can write, and nobody reads it.
"""

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.link import TransportConfig, bucket_scheme
from diloco_jax.transport.store import names
from diloco_jax.transport.store.seal import SEAL_BYTES, Seal, Unsealed
from diloco_jax.transport.store.store import ObjectStore, Requests, StoreError, TooLarge
from diloco_jax.transport.trust.security import read_token

LEADER_BYTES_MAX = 4096
# Leaders with a false name in a listing are passed over; more than these are not looked at.
LOOKED_AT_MAX = 20
# Listings, while objects disappear between a listing and their reading.
LOOKS_MAX = 3
# A leader without a sign of life for this long has ended; it gives one every five seconds.
LIFE_S = 12.0
# Places where no stranger reads what is written.
LOCAL = ("file", "memory")
# Stands for the name of a run whose leader wrote its claim in a form that this release cannot read.
OTHER_RELEASE = "of another release"
# Names that wait to be deleted while the store does not answer. What is forgotten is deleted at the end of the run.
LEFT_MAX = 20_000
DELETED_MAX = 1000

log = logging.getLogger(__name__)


class Leader(NamedTuple):
    """The syncer of an epoch."""

    epoch: int
    # The run's name and id.
    run_id: str
    run: str
    # Drawn by the process, so that it recognises its own object.
    mark: str


class Bucket:
    """The objects of one run; any thread may call the methods.

    Args:
        config: Settings with a bucket as address.
        requests: As for `ObjectStore`.

    Raises:
        ValueError: The address, the environment or the token cannot be used, a package is not installed, or anybody who
            reads the bucket could read the run.
    """

    def __init__(self, config: TransportConfig, requests: Requests | None = None) -> None:
        check_secrecy(config)
        self.config = config
        self.store = ObjectStore(config.address, requests)
        self.seal = Seal(read_token(config))
        self._lock = threading.Lock()
        self._left: deque[str] = deque(maxlen=LEFT_MAX)

    def read(self, key: str, bytes_max: int) -> bytes | None:
        """Return an object's content; None if there is none.

        Raises:
            TooLarge: It is larger than allowed.
            Unsealed: It is damaged, or of another run.
            StoreError: The store did not answer.
        """
        data = self.store.get(key, bytes_max + SEAL_BYTES)
        return None if data is None else self.seal.open(key, data)

    def write(self, key: str, *parts: bytes | bytearray | memoryview) -> int:
        """Write an object, in place of an earlier one, and return its size in bytes; StoreError if that fails."""
        data = self.seal.close(key, parts)
        self.store.put(key, data)
        return len(data)

    def create(self, key: str, content: bytes, until_s: float = 0.0) -> bool:
        """Write an object unless its name is taken; return whether the object of that name is this one.

        Args:
            until_s: Time on the monotonic clock until which it is tried again if the store does not answer.

        Raises:
            StoreError: The store did not answer in time. The object may have been written.
        """
        data = self.seal.close(key, (content,))
        while True:
            try:
                # A request whose answer was lost may have succeeded, and then finds its own object.
                return self.store.create(key, data) or self.store.get(key, len(data)) == data
            except TooLarge:
                return False
            except StoreError:
                if time.monotonic() + self.config.poll_s >= until_s:
                    raise
            time.sleep(self.config.poll_s)

    def discard(self, keys: Iterable[str]) -> None:
        """Delete objects that nobody needs, now or when the store answers again."""
        with self._lock:
            self._left.extend(keys)
        self.tidy()

    def tidy(self) -> None:
        """Delete what could not be deleted before."""
        with self._lock:
            keys = [self._left.popleft() for _ in range(min(len(self._left), DELETED_MAX))]
        try:
            self.store.delete(keys)
        except StoreError as error:
            log.info(f"{len(keys)} objects wait to be deleted: {error}")
            with self._lock:
                self._left.extend(keys)

    def delete_below(self, prefix: str) -> int:
        """Delete all objects whose names start with `prefix`, and return how many; StoreError if that fails."""
        count, before = 0, list[str]()
        # Some listings show for a while what is deleted already.
        while (found := self.store.list(prefix)) and found != before:
            self.store.delete(found)
            count, before = count + len(found), found
        return count

    def leader(self) -> Leader | None:
        """Return the newest leader; None if there is none. StoreError if the store does not answer."""
        return self.leaders()[0]

    def leaders(self) -> tuple[Leader | None, list[str]]:
        """Return the newest leader, None if there is none, and the names of later ones that cannot be read.

        StoreError if the store does not answer.
        """
        for _ in range(LOOKS_MAX):
            gone, unreadable = False, list[str]()
            # `diloco clean` deletes what is ours alone, so nothing else may keep a syncer from leading.
            numbers = [(names.epoch_of(key), key) for key in self.store.list(names.LEADER) if names.is_ours(key)]
            for epoch, key in sorted(numbers, reverse=True)[:LOOKED_AT_MAX]:
                try:
                    content = self.read(key, LEADER_BYTES_MAX)
                except (TooLarge, Unsealed):
                    unreadable.append(key)
                    continue
                if content is not None:
                    return _read_leader(epoch, content), unreadable
                gone = True
            if not gone:
                return None, unreadable
            # A later leader has deleted what was listed, and its own object is in the next listing.
        raise StoreError(f"cannot read the leader in {self.store.url}: objects that are listed are not there")

    def lead(self, epoch: int, run_id: str, run: str, place: str = "") -> Leader:
        """Make this process the syncer of an epoch, and return it as leader.

        Args:
            place: As for `claim`.

        Raises:
            ValueError: Another process is the syncer of this epoch or of a later one, or the bucket has another run.
            StoreError: The store does not answer.
        """
        ours = Leader(epoch, run_id, run, f"{place}.{secrets.token_hex(16)}")
        known, unreadable = self.leaders()
        where = f"transport.address {self.config.address}"
        if known is None and unreadable:
            raise ValueError(
                f"{where} has {unreadable[0]}, which is damaged or of another run: use that run's transport.token_file "
                "if it is this one, or else another prefix, or remove what an ended run left with `diloco clean "
                f"{self.config.address}`"
            )
        if known is not None and (known.run_id, known.run) != (run_id, run):
            raise ValueError(
                f"{where} has objects of run {known.run_id!r} ({known.run or 'no id'}): use another prefix for this "
                f"run, or remove that run's objects with `diloco clean {self.config.address}`"
            )
        if known is not None and known.epoch >= epoch:
            raise ValueError(
                f"{where} has a syncer of epoch {known.epoch}, this one is of epoch {epoch}: stop the other process, "
                f"or remove what an ended run left with `diloco clean {self.config.address}`"
            )
        # What cannot be read at our name is a stranger's, and must not keep everybody from leading.
        self.store.delete([key for key in unreadable if key == names.leader(epoch)])
        try:
            created = self._claim_epoch(ours)
        except StoreError:
            # The object may be there nevertheless, because the library does not repeat a request that creates.
            created = False
        newest = self.leader()
        if newest == ours:
            return ours
        if created:
            # This process was stopped before it wrote, and a later leader had already deleted the object of this epoch.
            self.store.delete([names.leader(epoch)])
        if newest is None:
            raise StoreError(f"cannot write {names.leader(epoch)} in {self.store.url}: it is not there")
        raise ValueError(f"{where}: another process became the syncer of epoch {newest.epoch} at the same time")

    def claim(self, run_id: str, run: str, place: str) -> Leader:
        """Make this process the run's next syncer, after the newest one has ended.

        Args:
            place: Text that processes have in common that cannot run at the same time, such as those of one folder.

        Raises:
            ValueError: Another process leads the run, or the bucket has another run.
            StoreError: The store does not answer.
        """
        known = self.leader()
        if known is not None and known.run == run and not known.mark.startswith(f"{place}.") and self.lives(known):
            raise ValueError(
                f"transport.address {self.config.address} has a syncer that is alive, of epoch {known.epoch}, on "
                "another machine or in another folder: stop it, or let this one wait for its end (`diloco syncer "
                "--standby`)"
            )
        return self.lead(1 if known is None else known.epoch + 1, run_id, run, place)

    def lives(self, leader: Leader, wait_s: float = LIFE_S) -> bool:
        """Tell whether a leader gives a sign of life within `wait_s` seconds."""
        until_s, first = time.monotonic() + wait_s, self.sign_of(leader)
        while time.monotonic() < until_s:
            time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
            if self.sign_of(leader) != first:
                return True
        return False

    def sign_of(self, leader: Leader) -> bytes:
        """Return the newest sign of life of a leader; it only differs from earlier ones. StoreError as `leader`."""
        try:
            return self.read(names.alive(leader.epoch), LEADER_BYTES_MAX) or b""
        except (TooLarge, Unsealed):
            return b""

    def lead_on(self, ours: Leader) -> Leader | None:
        """Return the process that leads in place of ours, None if ours still does; StoreError if that fails.

        Its object is written again if somebody has deleted or damaged it, and objects that cannot be read are deleted.
        """
        newest, unreadable = self.leaders()
        if newest is not None and newest != ours and newest.epoch >= ours.epoch:
            return newest
        if unreadable:
            log.warning(f"{len(unreadable)} objects, such as {unreadable[0]}, are not of this run, and deleted")
            self.store.delete(unreadable)
        # If another process of the same epoch was quicker, it is found with the next look.
        if newest is None or newest.epoch < ours.epoch:
            log.warning(f"the object {names.leader(ours.epoch)} was deleted or replaced; writing it again")
            self._claim_epoch(ours)
        return None

    def _claim_epoch(self, leader: Leader) -> bool:
        return self.create(names.leader(leader.epoch), json.dumps(leader._asdict()).encode())


def check_secrecy(config: TransportConfig) -> None:
    """Check that a bucket is on this machine, or its objects are encrypted, or that it may be read.

    Raises:
        ValueError: None of that is so.
    """
    if bucket_scheme(config.address) in LOCAL or config.token_file or config.allow_plaintext:
        return
    raise ValueError(
        f"transport.address {config.address!r} is a bucket and nothing would be encrypted: set transport.token_file "
        "(`diloco certs` makes it), or transport.allow_plaintext if anyone with access to the bucket may read "
        "and change the run"
    )


def _read_leader(epoch: int, content: bytes) -> Leader:
    """Return the leader that a sealed object describes; one of another run if only another release can read it.

    Only a process with the run's token can have written it, so it leads, and must be neither ignored nor deleted.
    """
    try:
        read = json.loads(content)
        return Leader(epoch, *(clean(str(read[name]), REASON_LENGTH_MAX) for name in ("run_id", "run", "mark")))
    except (ValueError, KeyError, TypeError):
        return Leader(epoch, OTHER_RELEASE, "", "")
