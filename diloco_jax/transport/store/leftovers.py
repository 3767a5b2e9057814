"""Objects that a run has left in a bucket, for `diloco clean`, its newest leader, and whether that one is alive.

Names tell what belongs to a run, and a change of the sign of life tells that a syncer is alive. So nothing here needs
the run's token but the name of the run.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import LEADER_BYTES_MAX, LIFE_S, Bucket, Leader
from diloco_jax.transport.store.store import LISTED_MAX, ObjectStore

LOOK_S = 0.5


class Left(NamedTuple):
    """The content of a bucket below one prefix."""

    # Names that a run gives its objects; the leaders come last.
    ours: list[str]
    # Number of other objects.
    others: int
    # Newest epoch with a leader; None without one.
    epoch: int | None
    # The newest leader that the caller's token opens.
    leader: Leader | None
    # Age of the newest sign of life in seconds, by the clocks of the store and of this machine.
    sign_s_ago: float | None

    @property
    def copied(self) -> int:
        """Return the number of objects of a tape's copy and of snapshots, which a standby needs."""
        return sum(key.startswith(names.COPIES) for key in self.ours)


def find_left(config: TransportConfig) -> Left:
    """Return what is below the address of `config`.

    Raises:
        ValueError: The bucket cannot be opened, or the token cannot be read.
        StoreError: The store does not answer.
    """
    # Listing needs no secret, and names are not encrypted.
    bucket = Bucket(replace(config, allow_plaintext=True))
    found = list(_all_names(bucket.store))
    ours = sorted(filter(names.is_ours, found), key=lambda key: key.startswith(names.LEADER))
    epochs = [number for key in ours if key.startswith(names.LEADER) and (number := names.number_of(key)) is not None]
    signs = [bucket.store.modified_s(key) for key in ours if key.startswith(names.ALIVE)]
    newest_s = max((unix_s for unix_s in signs if unix_s is not None), default=None)
    ago_s = None if newest_s is None else max(0.0, time.time() - newest_s)
    return Left(ours, len(found) - len(ours), max(epochs, default=None), bucket.leader(), ago_s)


def is_alive(config: TransportConfig, wait_s: float = LIFE_S) -> bool:
    """Return whether a syncer gives a sign of life within `wait_s` seconds. Raises as `find_left`."""
    store, until_s = ObjectStore(config.address), time.monotonic() + wait_s
    first = _signs(store)
    while first and time.monotonic() < until_s:
        time.sleep(min(LOOK_S, max(0.0, until_s - time.monotonic())))
        # A leader that ends deletes its sign. Each one has a new nonce, so its bytes differ.
        if any(now is not None and now != first.get(key) for key, now in _signs(store).items()):
            return True
    return False


def delete_left(config: TransportConfig) -> int:
    """Delete the objects of a run, its leaders last, and return how many. Raises as `find_left`."""
    ours = find_left(config).ours
    ObjectStore(config.address).delete(ours)
    return len(ours)


def _signs(store: ObjectStore) -> dict[str, bytes | None]:
    return {key: store.get(key, LEADER_BYTES_MAX) for key in store.list(names.ALIVE) if names.is_ours(key)}


def _all_names(store: ObjectStore) -> Iterator[str]:
    after = ""
    while page := store.list("", LISTED_MAX, after):
        yield from page
        if len(page) < LISTED_MAX:
            return
        after = page[-1]
