"""The place of an island among all islands, for its shard of the data."""

import logging
from dataclasses import dataclass

from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.link import TransportConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataShard:
    """An island's shard: `index` from 0, the same at every start, of `count` shards."""

    index: int
    count: int


def find_place(transport: TransportConfig, config: RunConfig, name: str) -> DataShard:
    """Ask the syncer for the island's place among `islands.count` shards.

    Raises:
        ValueError: The syncer gives this island no number.
        TransportError: The syncer cannot be reached.
    """
    count, names = config.islands.count, config.islands.names
    number = ask_description(transport, name, numbered=True).number
    if not number:
        if name not in names:
            raise ValueError(
                f"the syncer at {transport.address} gave {name} no number: it is of an earlier release, or too many "
                f"names have one. Use the names {names[0]} to {names[-1]}, or shard the data by your own number"
            )
        number = names.index(name) + 1
    if number > count:
        log.warning(
            f"{name} is island number {number} of a run with islands.count {count}, so it reads the shard of another "
            "island too; raise islands.count for a separate shard"
        )
    return DataShard((number - 1) % count, count)
