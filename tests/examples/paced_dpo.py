"""docs/examples/dpo_loop.py with batches that take DILOCO_TEST_STEP_S each."""

import os
import time
from collections.abc import Iterable

import numpy as np

from docs.examples import dpo_loop

pairs = dpo_loop.pairs


def paced(positions: Iterable[int]) -> np.ndarray:
    time.sleep(float(os.environ["DILOCO_TEST_STEP_S"]))
    return pairs(positions)


dpo_loop.pairs = paced
dpo_loop.train()
