"""MaxText's data as an island reads it: leased records, or a separate shard."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grain.python as grain
import numpy as np

# The arguments of MaxText's function that turns an indexed dataset into a stream; the others are not needed here.
Transform = Callable[..., Any]
TRAIN = "train"


class IndexedRecords(Protocol):
    """An indexed dataset of grain."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Leases:
    """The positions that this host reads for the next step, for the iterator that MaxText built before the island.

    Attributes:
        next_samples: Returns all positions of the next step, on each host; set when the island has joined.
        corpus: Description of the records that positions mean, to be equal on all islands; "" before MaxText's
            pipeline is built.
    """

    def __init__(self) -> None:
        self.next_samples: Callable[[], np.ndarray] | None = None
        self.corpus = ""
        self._left: list[int] = []

    def start_step(self, host: int, hosts: int) -> None:
        """Take the positions of the next step; each host reads an equal part of them."""
        assert self.next_samples is not None, "the island has joined"
        positions = self.next_samples()
        self._left = [int(position) for position in np.split(positions, hosts)[host]][::-1]

    def take(self) -> int:
        """Return the position of the next record.

        Raises:
            ValueError: MaxText's pipeline reads more records than a step has samples.
        """
        if not self._left:
            raise ValueError(
                "MaxText's pipeline reads more records than the step has samples: with --data leased each sequence "
                "must be one record (packing=false, no read-ahead)"
            )
        return self._left.pop()

    def check_finished(self) -> None:
        """Check that the step has read each of its samples; ValueError if the pipeline left some out."""
        if self._left:
            raise ValueError(
                f"MaxText's pipeline has not read {len(self._left)} of the step's samples: with --data leased each "
                "sequence must be one record (packing=false)"
            )


class LeasedRecords(grain.IterDataset):
    """A stream of the records at leased positions."""

    def __init__(self, source: IndexedRecords, leases: Leases) -> None:
        super().__init__()
        self._source = source
        self._leases = leases

    def __iter__(self) -> "LeasedIterator":
        return LeasedIterator(self._source, self._leases)


class LeasedIterator(grain.DatasetIterator):
    """Reads the records at leased positions, without an end; its position is the syncer's."""

    def __init__(self, source: IndexedRecords, leases: Leases) -> None:
        super().__init__()
        self._source = source
        self._leases = leases

    def __next__(self) -> Any:
        return self._source[self._leases.take()]

    def get_state(self) -> dict[str, Any]:
        """Return nothing: the syncer knows which samples were trained."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing, as for `get_state`."""


def leased_transform(leases: Leases) -> Transform:
    """Return a function in place of MaxText's that shuffles, repeats, cuts and streams an indexed dataset.

    Position p of the run is record p of the dataset, in an endless order that is shuffled again in each epoch.
    """

    def transform(dataset: Any, shuffle: bool, shuffle_seed: int, *_: Any, **__: Any) -> Any:
        leases.corpus = f"maxtext: {len(dataset)} records, seed {shuffle_seed if shuffle else None}"
        ordered = dataset.shuffle(seed=shuffle_seed) if shuffle else dataset
        return LeasedRecords(ordered.repeat(None), leases)

    return transform


def sharded(get_datasets: Callable[..., Any], index: int, count: int) -> Callable[..., Any]:
    """Return a function in place of MaxText's `get_datasets` whose training data are part `index` of `count` parts."""

    def get(
        *args: Any, dataloading_host_index: int, dataloading_host_count: int, split: str = TRAIN, **more: Any
    ) -> Any:
        if split == TRAIN:
            dataloading_host_index += index * dataloading_host_count
            dataloading_host_count *= count
        hosts = {"dataloading_host_index": dataloading_host_index, "dataloading_host_count": dataloading_host_count}
        return get_datasets(*args, **hosts, split=split, **more)

    return get


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute of a module until the end of the block, and return the old one."""
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield old
    finally:
        setattr(module, name, old)


@contextlib.contextmanager
def leased_pipeline(pipeline: Any, leases: Leases) -> Iterator[None]:
    """Let MaxText's grain pipeline read leased positions for training, until the end of the block."""
    get_datasets, transform = pipeline.get_datasets, leased_transform(leases)

    def get(*args: Any, split: str = TRAIN, **more: Any) -> Any:
        if split != TRAIN:
            return get_datasets(*args, split=split, **more)
        with replaced(pipeline, "_apply_mapdataset_transforms", transform):
            return get_datasets(*args, split=split, **more)

    with replaced(pipeline, "get_datasets", get):
        yield


def position_of(iterator: Any) -> Any:
    """Return the part of MaxText's iterator whose position an island can save; None if it has none."""
    inner = getattr(iterator, "local_iterator", None)
    return inner if hasattr(inner, "get_state") and hasattr(inner, "set_state") else None
