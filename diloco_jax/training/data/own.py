"""The user's own source of samples (`data.module`), with random access like the sources of grain.

The source has `len(source)` samples. `source[index]` is a dict of arrays, or an array of train.seq_len + 1 token ids,
which counts as {"tokens": ...}. Every read of an index must return the same sample, because leases, returning islands
and replays name a sample only by its position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS, Sample
from diloco_jax.training.named import failure, make_named

# The kinds of dtypes that a device can hold: bool, integers, floats.
KINDS = "biuf"
# NumPy's dtypes that JAX does not have, with those that replace them.
NARROWER = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32, "float128": np.float32}
# The most samples that the shuffle can number.
SAMPLES_MAX = 2**32 - 1
# The number of evenly spaced samples in the digest of a source.
DESCRIBED = 64


@dataclass(frozen=True, slots=True)
class OwnSamples:
    """Samples start..stop-1 of the user's source; each is checked when it is read."""

    source: Any
    module: str
    seq_len: int
    vocab_size: int
    start: int
    stop: int
    like: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]] = field(default_factory=dict)
    """Shape and dtype of each array of the first sample; all samples must have the same."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = self.start + index
        try:
            given = self.source[number]
            arrays = given if isinstance(given, Mapping) else {TOKENS: given}
            sample = {str(name): np.asarray(arrays[name]) for name in sorted(arrays)}
        except OSError as error:
            # A disk or a network failed; an island that restarts may reach it again.
            raise ConnectionError(f"data.module '{self.module}' cannot read sample {number}: {error}") from error
        except (Exception, SystemExit) as error:
            raise failure("data.module", self.module, error) from error
        where = f"data.module '{self.module}' gives as sample {number}"
        sample = {name: self._checked(name, value, where) for name, value in sample.items()}
        found = {name: (value.shape, value.dtype) for name, value in sample.items()}
        if TOKENS in found and found.get(SEGMENTS, found[TOKENS]) != found[TOKENS]:
            raise ValueError(f"{where} {_words(found[SEGMENTS])} as '{SEGMENTS}'; make it like '{TOKENS}'")
        if (
            TOKENS in found
            and WEIGHTS in found
            and (found[WEIGHTS][0] != found[TOKENS][0] or (sample[WEIGHTS] < 0).any())
        ):
            raise ValueError(f"{where} {_words(found[WEIGHTS])} as '{WEIGHTS}'; give a number from 0 on for each token")
        for name in sorted({*found} | {*self.like}) if self.like else ():
            if found.get(name) != self.like.get(name):
                had, has = (_words(of.get(name)) for of in (self.like, found))
                raise ValueError(f"{where} as '{name}' {has}, the first sample has {had}; all must be alike")
        return sample

    def _checked(self, name: str, value: np.ndarray, where: str) -> np.ndarray:
        """Return an array in a dtype that devices have; ValueError if its shape or values do not fit."""
        if name != TOKENS:
            if value.dtype.kind not in KINDS:
                raise ValueError(f"{where} as '{name}' {_words((value.shape, value.dtype))}; give numbers")
            with np.errstate(over="ignore"):
                narrow = value.astype(NARROWER.get(value.dtype.name, value.dtype.newbyteorder("=")))
            held = np.array_equal if value.dtype.kind in "iu" else _held
            if narrow.itemsize < value.itemsize and not held(narrow, value):
                raise ValueError(f"{where} as '{name}' numbers from {value.min()} to {value.max()}; they need 32 bits")
            return narrow
        size = self.seq_len + 1
        if value.shape != (size,) or not np.issubdtype(value.dtype, np.integer):
            must = f"with train.seq_len {self.seq_len} it must be an array of {size} integers"
            raise ValueError(f"{where} {_words((value.shape, value.dtype))}; {must}")
        low, high = value.min(), value.max()
        if low < 0 or high >= self.vocab_size:
            raise ValueError(f"{where} ids from {low} to {high}; data.vocab_size is {self.vocab_size}, correct one")
        return value.astype(np.int32)

    def described(self) -> str:
        """Return the number of samples and a digest of evenly spaced ones, at most `DESCRIBED`."""
        hasher, count = xxhash.xxh3_64(), min(len(self), DESCRIBED)
        for number in range(count):
            for value in self[number * (len(self) - 1) // max(1, count - 1)].values():
                hasher.update(value.tobytes())
        return f"{len(self):,} samples with digest {hasher.hexdigest()}"


def open_own(module: str, args: Mapping[str, Any], seq_len: int, vocab_size: int) -> OwnSamples:
    """Make the user's source; ValueError if it is not a source, or if its first sample does not fit."""
    source = make_named("data", module, args)
    try:
        count, _ = len(source), source.__getitem__
    except (Exception, SystemExit) as error:
        raise failure("data.module", module, error) from error
    if count > SAMPLES_MAX:
        raise ValueError(f"data.module '{module}' has {count} samples; give at most {SAMPLES_MAX}")
    samples = OwnSamples(source, module, seq_len, vocab_size, 0, count)
    if not count:
        return samples
    first = samples[0]
    if TOKENS not in first and (seq_len != 1 or not first):
        raise ValueError(
            f"the samples of data.module '{module}' have {', '.join(first) or 'nothing'} and no '{TOKENS}', so each "
            f"counts as one token: set train.seq_len, which is {seq_len}, to 1"
        )
    return replace(samples, like={name: (value.shape, value.dtype) for name, value in first.items()})


def _held(narrow: np.ndarray, value: np.ndarray) -> bool:
    return bool((np.isfinite(narrow) | ~np.isfinite(value)).all())


def _words(described: tuple[tuple[int, ...], np.dtype[Any]] | None) -> str:
    return "nothing" if described is None else f"{described[1]} of shape {described[0]}"
