"""docs/examples/tunix_sft.py with a data pipeline that takes DILOCO_TEST_STEP_S per batch."""

import os
import sys
import time

import numpy as np

from docs.examples import tunix_sft

windows = tunix_sft.windows


def paced(text: np.ndarray, starts: np.ndarray) -> tunix_sft.TrainingInput:
    time.sleep(float(os.environ["DILOCO_TEST_STEP_S"]))
    return windows(text, starts)


tunix_sft.windows = paced
tunix_sft.train(*sys.argv[1:])
