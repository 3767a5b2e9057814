"""The rule that moves a learning rate, tuned for data parallel, to the islands of a decoupled run.

Both trainings have the same samples per global step. Islands move in different directions, so an average of their moves
is shorter than one of them; RDA keeps the length. Between two merges islands drift apart, more at a high rate. So the
best rate of islands depends on the merge and on H:

    rate = f(merge) min(1, sqrt(3 / H)) rate of data parallel        f(average) = 1, f(RDA) = 0.7

It was fitted to trainings of AdamW with four islands (docs/results/merge.md) and checked against all tuned trainings of
docs/results: the best rate was between half and twice that of the rule.
"""

import math

from diloco_jax.core.merge import MergeConfig
from diloco_jax.protocol.pacing import ProtocolConfig

# An average with this period or a shorter one trains at the rate of data parallel.
CLOSE = 3
_OF_MERGE = {"average": 1.0, "rda": 0.7}
# The best rates that were found lie within this factor of the rule.
OFF_BY = 2.0


def rate_factor(merge: MergeConfig, protocol: ProtocolConfig) -> float:
    """Return the rate of islands as a share of data parallel's; the shortest period of any class counts."""
    period = min(protocol.groups.phases[0].periods)
    return _OF_MERGE[merge.method] * min(1.0, math.sqrt(CLOSE / period))
