"""Leased records and shards for MaxText's grain pipeline, without MaxText."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_jax.adapters.maxtext.batches import Leases, leased_pipeline, position_of, replaced, sharded

RECORDS = 10


def transforms(dataset: Any, shuffle: bool, seed: int, *_: Any, **__: Any) -> Any:
    return dataset.to_iter_dataset()


def maxtext_pipeline() -> Any:
    """Return a module with the two names of MaxText's that the island replaces."""
    import grain.python as grain

    module = SimpleNamespace(_apply_mapdataset_transforms=transforms)

    def get_datasets(
        shuffle: bool, dataloading_host_index: int, dataloading_host_count: int, split: str = "train"
    ) -> Any:
        source = grain.MapDataset.range(RECORDS)[dataloading_host_index::dataloading_host_count]
        return module._apply_mapdataset_transforms(
            source, shuffle, 3, 1, dataloading_host_index, dataloading_host_count
        )

    module.get_datasets = get_datasets
    return module


def test_a_step_reads_its_leased_records() -> None:
    pipeline, leases = maxtext_pipeline(), Leases()
    with leased_pipeline(pipeline, leases):
        stream = pipeline.get_datasets(False, 0, 1).map(lambda record: record * 2).batch(2)
        held_out = list(pipeline.get_datasets(False, 0, 1, split="eval"))
    batches = iter(stream)
    for samples in ([3, 0], [7, 12]):
        leases.next_samples = lambda samples=samples: np.array(samples)
        leases.start_step(0, 1)
        assert next(batches).tolist() == [2 * (sample % RECORDS) for sample in samples]
        leases.check_finished()
    # Evaluations read all data held out.
    assert held_out == list(range(RECORDS))
    assert pipeline._apply_mapdataset_transforms is transforms


def test_each_epoch_has_its_own_order() -> None:
    pipeline, leases = maxtext_pipeline(), Leases()
    with leased_pipeline(pipeline, leases):
        stream = iter(pipeline.get_datasets(True, 0, 1))
    leases.next_samples = lambda: np.arange(2 * RECORDS)
    leases.start_step(0, 1)
    seen = [next(stream) for _ in range(2 * RECORDS)]
    assert sorted(seen[:RECORDS]) == sorted(seen[RECORDS:]) == list(range(RECORDS)) and seen[:RECORDS] != seen[RECORDS:]
    assert leases.corpus == "maxtext: 10 records, seed 3"


def test_hosts_share_the_samples_of_a_step() -> None:
    leases = Leases()
    leases.next_samples = lambda: np.arange(4)
    parts = []
    for host in range(2):
        leases.start_step(host, 2)
        parts.append([leases.take() for _ in range(2)])
    assert parts == [[0, 1], [2, 3]]


def test_a_pipeline_that_packs_is_refused() -> None:
    leases = Leases()
    leases.next_samples = lambda: np.arange(2)
    leases.start_step(0, 1)
    with pytest.raises(ValueError, match="has not read 2 of the step's samples"):
        leases.check_finished()
    leases.take(), leases.take()
    with pytest.raises(ValueError, match="reads more records than the step has samples"):
        leases.take()


def test_shards_of_islands_and_hosts_are_disjoint() -> None:
    get, parts = maxtext_pipeline().get_datasets, []
    for island in range(2):
        for host in range(2):
            part = sharded(get, island, 2)(False, dataloading_host_index=host, dataloading_host_count=2)
            parts.append(list(part))
    assert sorted(itertools.chain(*parts)) == list(range(RECORDS))
    held_out = sharded(get, 1, 2)(False, dataloading_host_index=0, dataloading_host_count=1, split="eval")
    assert list(held_out) == list(range(RECORDS))


def test_replaced_names_come_back_after_an_error() -> None:
    module = SimpleNamespace(name=1)
    with pytest.raises(RuntimeError), replaced(module, "name", 2):
        raise RuntimeError
    assert module.name == 1


def test_iterators_without_a_position() -> None:
    import grain.python as grain

    assert position_of(SimpleNamespace()) is None and position_of([]) is None
    inner = iter(grain.MapDataset.range(3).to_iter_dataset())
    assert position_of(SimpleNamespace(local_iterator=inner)) is inner
