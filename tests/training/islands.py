"""Helpers to train an island and to read its state."""

from collections.abc import Callable, Mapping

import numpy as np

from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island

MakeIsland = Callable[..., Island]  # the fixture
# The arguments of the smallest decoder.
TINY = {"vocab_size": 16, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 32}


def train(island: Island, batches: list[Sample], learning_rate: float = 1e-2, start: int = 0) -> list[float]:
    """Make a step on each batch, waiting for each; `start` is the number of batches before them."""
    return [
        island.wait(island.step(island.put_batch(batch), learning_rate, (start + index) * len(batch["tokens"])))["loss"]
        for index, batch in enumerate(batches)
    ]


def part(batch: Sample, count: int) -> Sample:
    """Return the first samples of a batch."""
    return {name: value[:count] for name, value in batch.items()}


def state_of(island: Island) -> bytes:
    layout = island.state_layout
    return b"".join(layout.slices(0, layout.num_bytes, island.stage_state().leaf))


def pointers(island: Island, path: str) -> list[int]:
    """Return the addresses of a parameter's shards."""
    return [shard.data.unsafe_buffer_pointer() for shard in island.state.params[path].addressable_shards]


def assert_same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Bit for bit, dtypes included."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
