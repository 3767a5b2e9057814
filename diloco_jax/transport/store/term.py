"""One process's time as the syncer of a run in a bucket: its signs of life, and the notice that a later one leads."""

import logging
import threading
from collections.abc import Callable

from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError

# Between two signs of life, and two looks for a later leader.
BEAT_S = 5.0

log = logging.getLogger(__name__)


class Term:
    """The leadership of this process, from its claim on; a thread keeps it.

    Attributes:
        lost: Why another process leads the run; "" while this one does.
        on_lost: Is called when `lost` changes, on that thread.
    """

    def __init__(self, bucket: Bucket, leader: Leader) -> None:
        self.bucket, self.leader = bucket, leader
        self.lost = ""
        self.on_lost: Callable[[], object] = lambda: None
        self._over = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._keep, name="diloco-term", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            try:
                if not self._beat():
                    return
            except StoreError as error:
                log.info(f"no sign of life was written: {error}")
            # A thread that ended silently would give the run away.
            except Exception:
                log.exception("an error in the signs of life; they continue")
            if self._over.wait(BEAT_S):
                return

    def _beat(self) -> bool:
        """Give a sign of life; False if another process leads the run."""
        ours = self.leader
        newest = self.bucket.lead_on(ours)
        if newest is not None:
            self.lost = f"another process leads the run as the syncer of epoch {newest.epoch}"
            log.error(f"{self.lost}; this one ends")
            self.on_lost()
            return False
        self._count += 1
        self.bucket.write(names.alive(ours.epoch), f"{ours.mark} {self._count}".encode())
        return True

    def close(self, grace_s: float = 5.0) -> None:
        """End the signs of life; safe to call again.

        Args:
            grace_s: Seconds to wait for a sign that is being written.
        """
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace_s)
