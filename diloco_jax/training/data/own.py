"""A source of samples of the user's own (`data.module`): random access, as grain's sources have it.

`len(source)` samples; `source[index]` is an array of train.seq_len + 1 token ids, the same each time that it is asked
for: leases, islands that return and replays name a sample by nothing but its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int32

from diloco_jax.training.named import failure, make_named

SAMPLES_MAX = 2**32 - 1  # as many as the shuffle can number
DESCRIBED = 64  # samples at equal distances that are read before training


@dataclass(frozen=True, slots=True)
class OwnSamples:
    """Samples start..stop-1 of the user's source, each checked when it is read."""

    source: Any
    module: str
    seq_len: int
    vocab_size: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Int32[np.ndarray, " t"]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = self.start + index
        try:
            sample = np.asarray(self.source[number])
        except OSError as error:  # a disk or a network, which an island that starts again may reach
            raise ConnectionError(f"data.module '{self.module}' cannot read sample {number}: {error}") from error
        except (Exception, SystemExit) as error:
            raise failure("data.module", self.module, error) from error
        where, size = f"data.module '{self.module}' gives as sample {number}", self.seq_len + 1
        if sample.shape != (size,) or not np.issubdtype(sample.dtype, np.integer):
            must = f"with train.seq_len {self.seq_len} it must be an array of {size} integers"
            raise ValueError(f"{where} {sample.dtype} of shape {sample.shape}; {must}")
        low, high = sample.min(), sample.max()
        if low < 0 or high >= self.vocab_size:
            raise ValueError(f"{where} ids from {low} to {high}; data.vocab_size is {self.vocab_size}, correct one")
        return sample.astype(np.int32)

    def described(self) -> str:
        """Return the number of the samples, and a digest of a bounded number of them, at equal distances."""
        hasher, count = xxhash.xxh3_64(), min(len(self), DESCRIBED)
        for number in range(count):
            hasher.update(self[number * (len(self) - 1) // max(1, count - 1)].data)
        return f"{len(self):,} samples with digest {hasher.hexdigest()}"


def open_own(module: str, args: Mapping[str, Any], seq_len: int, vocab_size: int) -> OwnSamples:
    """Make the user's source.

    Raises:
      ValueError: it cannot be made, has no random access, or too many samples.
    """
    source = make_named("data", module, args)
    try:
        count, _ = len(source), source.__getitem__
    except (Exception, SystemExit) as error:
        raise failure("data.module", module, error) from error
    if count > SAMPLES_MAX:
        raise ValueError(f"data.module '{module}' has {count} samples; give at most {SAMPLES_MAX}")
    return OwnSamples(source, module, seq_len, vocab_size, 0, count)
