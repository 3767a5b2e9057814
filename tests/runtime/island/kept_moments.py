"""The decoder of the small job, in processes that write down the moments that they save and those that they take over.

DILOCO_TEST_MOMENTS names the folder: ISLAND.saved-NUMBER.HOST.npz and ISLAND.restored.HOST.npz, by leaf and where a
shard begins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco_jax.training.exchanged import OPTIMIZER, ExchangedState, by_name
from tests.runtime.paced import PacedDecoder

KeptDecoder = PacedDecoder
FOLDER = Path(os.environ["DILOCO_TEST_MOMENTS"])
_stage, _load, _saves = ExchangedState.stage_shards, ExchangedState.load_shards, iter(range(1_000_000))


def write(island: ExchangedState, name: str) -> None:
    found = {}
    for leaf, array in by_name(island.state).items():
        for shard in array.addressable_shards if leaf.startswith(OPTIMIZER) else ():
            found[f"{leaf}@{[part.start or 0 for part in shard.index]}"] = np.asarray(shard.data)
    path = FOLDER / f"{sys.argv[sys.argv.index('--island') + 1]}.{name}.{jax.process_index()}.npz"
    # The first process of this name saves its moments.
    if not path.exists():
        np.savez(path, **{key.replace("/", "|"): value for key, value in found.items()})


def stage_shards(island: ExchangedState) -> Any:
    write(island, f"saved-{next(_saves)}")
    return _stage(island)


def load_shards(island: ExchangedState, leaves: Mapping[str, Any]) -> None:
    _load(island, leaves)
    write(island, "restored")


ExchangedState.stage_shards, ExchangedState.load_shards = stage_shards, load_shards  # type: ignore[method-assign]
