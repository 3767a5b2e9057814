"""The most islands that the syncer's link can serve, and the remedies if there are more.

The syncer is the centre of a star, so M learners cost it M times the traffic of one:

    in = M up bytes / (H step)        out = M down bytes / (H step)

A bucket as transport stores a broadcast once for all readers, so out no longer grows with M; the syncer still reads
every learner's fragments.
"""

import math
from typing import Any, NamedTuple

from diloco_jax.core.codec import FORMATS, Format
from diloco_jax.sim.goodput.bandwidth import GBIT
from diloco_jax.tools.plan.case import BITS, BUSY_MAX, PAYLOAD_SHARE, Case
from diloco_jax.transport.link import bucket_scheme

# No limit is reported beyond this number of islands.
MANY = 1024


class SyncerRates(NamedTuple):
    """Payload rates of the syncer for each learner, Gbit/s."""

    from_each: float
    to_each: float

    def share(self, learners: int, gbit_per_s: float, *, stored_once: bool = False) -> float:
        """Return the share of a link's payload rate that the rounds of `learners` fill, in the busier direction."""
        outgoing = self.to_each * (1 if stored_once else learners)
        return max(self.from_each * learners, outgoing) / gbit_per_s

    def learners_max(self, gbit_per_s: float, *, stored_once: bool = False) -> int:
        """Return the most learners whose rounds leave room for joins, repairs and states on a link of this rate."""
        room = BUSY_MAX * gbit_per_s
        if stored_once:
            most = room / self.from_each if self.to_each <= room else 0.0
        else:
            most = room / max(self.from_each, self.to_each)
        return min(math.floor(most), MANY)


def syncer_rates(case: Case, up: Format | None = None, down: Format | None = None) -> SyncerRates:
    """Return the syncer's mean rates for each learner, in the given formats or the config's."""
    rounds = case.rounds(up, down)
    seconds = rounds.sync_every * rounds.step_s
    return SyncerRates(rounds.up_total_bytes / seconds / GBIT, rounds.down_total_bytes / seconds / GBIT)


def growth(case: Case) -> dict[str, Any]:
    """Return the most islands that the syncer's link and its process can serve, and the most with each remedy."""
    link = case.assumed.syncer_link_gbit_per_s or case.assumed.link_gbit_per_s
    usable, process = link * PAYLOAD_SHARE, case.assumed.syncer_gb_per_s * BITS
    own = syncer_rates(case)
    wire = case.config.wire
    narrowest = max(FORMATS.index(wire.up), FORMATS.index(wire.down))
    formats = FORMATS[narrowest + 1 :]
    once = bool(bucket_scheme(case.config.transport.address))
    half = SyncerRates(own.from_each / 2, own.to_each / 2)
    remedies = {} if once else {"a bucket as transport": own.learners_max(usable, stored_once=True)}
    remedies |= {
        "every H doubled": half.learners_max(usable, stored_once=once),
        **{f"{way} both ways": syncer_rates(case, way, way).learners_max(usable, stored_once=once) for way in formats},
    }
    most = {"link": own.learners_max(usable, stored_once=once), "process": own.learners_max(process)}
    return {
        "syncer_link_gbit_per_s": link,
        "given": bool(case.assumed.syncer_link_gbit_per_s),
        "from_each_gbit_per_s": own.from_each,
        "to_each_gbit_per_s": own.to_each,
        "share": own.share(case.learners, usable, stored_once=once),
        "learners_max": min(most.values()),
        "limit": min(most, key=lambda name: most[name]),
        "link_learners_max": most["link"],
        "process_learners_max": most["process"],
        "remedies": remedies,
    }
