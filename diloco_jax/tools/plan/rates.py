"""The rule that moves a learning rate, tuned for data parallel, to the islands of a decoupled run.

Both trainings have the same samples per global step. Islands move in different directions, so an average of their moves
is shorter than one of them; RDA keeps the length. Between two merges islands drift apart, more at a high rate. So the
best rate of islands depends on the merge and on H:

    rate = f(merge) sqrt(3 / H) rate of data parallel        f(average) = 1, f(RDA) = 0.7; H from 3 to 6

It was fitted to AdamW on four islands with 0.12M parameters (docs/results/merge.md). Longer periods count as 6: the
best rate of RDA with H = 12 was that with H = 6, and that of averages 1.4 times as high. The best rates of all tuned
trainings of docs/results were between half and twice that of the rule.

The best rate of adapters is about ten times that of the same training of the whole model, for any rank (Schulman et
al., "LoRA Without Regret", Thinking Machines Lab 2025, https://thinkingmachines.ai/blog/lora/). The published
trainings had one machine; nobody has tuned adapters on islands.
"""

import math

from diloco_jax.core.merge import MergeConfig
from diloco_jax.protocol.pacing import ProtocolConfig

# The rule was fitted to these periods.
SHORTEST, LONGEST = 3, 6
_OF_MERGE = {"average": 1.0, "rda": 0.7}
# The best rates that were found are within this factor of the rule.
OFF_BY = 2.0
# The rate of adapters over that of the whole model.
OF_ADAPTERS = 10.0


def rate_factor(merge: MergeConfig, protocol: ProtocolConfig, *, adapters: bool = False) -> float:
    """Return the rate of islands as a share of data parallel's; the shortest period of any class counts.

    Args:
        adapters: whether the islands train adapters; data parallel trains the whole model.
    """
    period = min(max(min(protocol.groups.phases[0].periods), SHORTEST), LONGEST)
    return _OF_MERGE[merge.method] * math.sqrt(SHORTEST / period) * (OF_ADAPTERS if adapters else 1.0)
