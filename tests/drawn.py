"""How many seeds and examples the tests draw: by default enough for every fault that was tried, more on request.

The numbers beside `seeds` and `examples` were chosen with faults in the sources that only drawn runs find. The default
is several times the first seed that fails on the fault that hides longest. Rare faults need other seeds, and not more
of the same. So `DILOCO_EXAMPLES=N` draws N times as many, and starts at another seed on each day. A failing test prints
its seed; `DILOCO_FIRST_SEED=SEED` starts there.
"""

import os
import time

# The seeds of one day are not those of the next one, as long as a test draws fewer.
SEEDS_PER_DAY = 10_000
TIMES = int(os.environ.get("DILOCO_EXAMPLES", "1"))
# Processes of one session draw the same, also when the day changes.
if TIMES > 1:
    os.environ.setdefault("DILOCO_FIRST_SEED", str(int(time.time() / 86400) % 100_000 * SEEDS_PER_DAY))
FIRST_SEED = int(os.environ.get("DILOCO_FIRST_SEED", "0"))


def seeds(count: int) -> range:
    """Return the seeds of a test that usually draws `count` runs."""
    return range(FIRST_SEED, FIRST_SEED + count * TIMES)


def examples(count: int) -> int:
    """Return the number of hypothesis' examples of a test that usually draws `count`."""
    return count * TIMES
