"""The faults of a rehearsal: those of `diloco chaos`, and faults of regions, hosts, volumes and certificates."""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.chaos.actions import Saboteur
from diloco_jax.tools.chaos.schedule import FIRST, ChaosFault, deck, draw_details
from diloco_jax.tools.launch.common import region_of
from rehearsal.cluster import Cluster
from rehearsal.services import VALID_S, Renewer

# A deck of 20 cards by kind; kinds of `diloco chaos` keep their names. After a kind that starts with "kill" the target
# returns as another process.
CARDS = {
    # No message gets to or from the islands of a region.
    "lost-region": 1,
    # The syncer gets SIGKILL, and starts on another host with its volume.
    "kill-to-move-syncer": 1,
    # The certificate of an island expires, and then its connections end.
    "expired-certificate": 1,
    # The certificate of the syncer expires, and then all connections end.
    "expired-syncer": 1,
    # The volume of the syncer is full.
    "full-volume": 1,
    "kill-syncer": 2,
    "stop-syncer": 1,
    "kill": 2,
    # The last host of an island gets SIGKILL.
    "kill-host": 2,
    # All hosts of an island get SIGTERM, as in a preemption.
    "kill-politely": 3,
    "stop": 1,
    "cut": 1,
    "black-hole": 1,
    "slow-link": 1,
    "corrupt": 1,
}
AT_SYNCER = {"kill-to-move-syncer", "expired-syncer", "full-volume", "kill-syncer", "stop-syncer"}
REGION_S, FULL_S = 120.0, 20.0
# Faults start in this share of the run, because twice the slowest recovery (200 s here) must be left after each.
LAST = 0.7


def draw(seed: int, config: RunConfig, faults: int, minutes: float, kinds: str) -> list[ChaosFault]:
    """Draw a schedule like `draw_schedule`; a region is lost for 2 minutes, or for a tenth of a shorter run."""
    cards = [kind for kind in kinds.split(",") for _ in range(CARDS[kind])]
    random, steps = Random(seed), config.planned_steps
    deal, islands = deck(random, cards), deck(random, config.islands.names)
    width = (LAST - FIRST) * steps / faults
    lasts = {"lost-region": min(REGION_S, minutes * 6.0), "full-volume": min(FULL_S, minutes * 3.0)}
    lasts |= dict.fromkeys(("expired-certificate", "expired-syncer"), VALID_S + 1.0)
    schedule = []
    for index in range(faults):
        kind = next(deal)
        target = SYNCER if kind in AT_SYNCER else next(islands)
        details = draw_details(random, kind, config.protocol.silence_s)
        details |= {"duration_s": lasts[kind]} if kind in lasts else {}
        at_step = int(FIRST * steps + (index + random.random()) * width)
        schedule.append(ChaosFault(number=index + 1, kind=kind, target=target, at_step=at_step, **details))
    return schedule


def region(config: RunConfig, name: str) -> set[str]:
    """Return the islands of an island's region; an island without a zone has a separate region."""
    where = region_of(config.island(name).zone)
    return {name, *(each for each in config.islands.names if where and region_of(config.island(each).zone) == where)}


class Calamity(Saboteur):
    """Saboteur that also inflicts the faults of a rehearsal."""

    def __init__(self, config: RunConfig, run_dir: Path, cluster: Cluster, renewer: Renewer) -> None:
        ways: Mapping[str, Any] = cluster.relays
        super().__init__(run_dir, cluster, ways)
        self._config, self.cluster, self._renewer, self._ways = config, cluster, renewer, ways

    def inflict(self, fault: ChaosFault) -> bool:
        """Inflict a fault; False without any effect if its target has no process now."""
        pids = self.cluster.pids(fault.target)
        if not pids:
            return False
        match fault.kind:
            case "lost-region":
                lost = [self._ways[name] for name in region(self._config, fault.target)]
                self._undo[fault.number] = lambda: [way.heal() for way in lost]
                for way in lost:
                    way.change("both", hold=True)
            case "kill-to-move-syncer":
                self.cluster.moves += 1
                os.kill(pids[0], signal.SIGKILL)
            case "kill-host":
                os.kill(pids[-1], signal.SIGKILL)
            case "kill-politely":
                for pid in pids:
                    os.kill(pid, signal.SIGTERM)
            case "expired-certificate" | "expired-syncer":
                self._renewer.expire(fault.target)
                hit = [self._ways[name] for name in self._ways if fault.target in (SYNCER, name)]
                self._undo[fault.number] = lambda: [way.cut() for way in hit]
                # After a reconnection the syncer reads the certificate that will expire.
                for way in hit:
                    way.cut()
            case "full-volume":
                return self._fill(fault)
            case _:
                return super().inflict(fault)
        return True

    def _fill(self, fault: ChaosFault) -> bool:
        """Fill the volume; if it is not a separate file system, stop the growth of the syncer's files instead."""
        if not self.cluster.mounted:
            return self._fill_disk(fault)
        path = self.cluster.volumes / "of-somebody-else"
        with path.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(path.parent).free or 1)
        self._undo[fault.number] = lambda: path.unlink(missing_ok=True)
        return True
