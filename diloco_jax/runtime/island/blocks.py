"""The blocks of fragments that each host of an island holds, and the way of each block to its hosts.

Blocks that one host holds come from the syncer to that host. Blocks that several hosts hold come once, to the leader,
which passes them on. So an island receives every block of a version once, however its tensors are sharded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import Blocks, Box, HeldBlocks, blocks_of_boxes, one_buffer, regrouped, table_of
from diloco_jax.core.layout import whole
from diloco_jax.runtime.model.cuts import HostCut, pack_blocks
from diloco_jax.transport.group.group import LEADER

# By host: the boxes of each slice that its devices hold, by key.
Boxes = Mapping[int, Mapping[str, Collection[Box]]]


class IslandBlocks:
    """The blocks of one host, and on the leader also those that it passes on.

    Args:
        boxes: Returns what the devices of each host hold of a fragment.
        host: This host.
        hosts: Number of the island's hosts.
    """

    def __init__(
        self, fragments: Sequence[Fragment], boxes: Callable[[Fragment], Boxes], host: int, hosts: int
    ) -> None:
        self.host = host
        # By fragment: what this host holds, and gets from the syncer.
        self.held: list[HeldBlocks] = []
        self.got: list[HeldBlocks] = []
        # By fragment: what this host sends the syncer of a value that all hosts hold, each block once.
        self.owned: list[HeldBlocks] = []
        # By fragment: host -> the blocks that it gets from the leader; here for the leader, or for one other host.
        self.passed: list[dict[int, HeldBlocks]] = []
        for fragment in fragments:
            self._add(fragment, boxes(fragment), hosts)
        self.statement = pack_blocks([HostCut(*pair) for pair in zip(self.held, self.got, strict=True)])

    def _add(self, fragment: Fragment, boxes: Boxes, hosts: int) -> None:
        layout, receivers = whole(fragment), range(1, hosts) if self.host == LEADER else [self.host]
        held, got, owned = list[Blocks](), list[Blocks](), list[Blocks]()
        passed: dict[int, list[Blocks]] = {host: [] for host in receivers}
        for piece in layout.pieces:
            of_host = [blocks_of_boxes(piece.shape, boxes.get(each, {}).get(piece.key, ())) for each in range(hosts)]
            holders = np.bincount(np.concatenate(of_host))
            mine, shared = of_host[self.host], np.flatnonzero(holders > 1)
            earlier = np.concatenate([np.empty(0, np.int64), *of_host[: self.host]])
            held.append(mine)
            got.append(np.union1d(mine, shared) if self.host == LEADER else np.setdiff1d(mine, shared))
            owned.append(np.setdiff1d(mine, earlier))
            for host, blocks in passed.items():
                blocks.append(np.intersect1d(of_host[host], shared))

        def made(blocks: Sequence[Blocks]) -> HeldBlocks:
            return HeldBlocks(layout, tuple(map(table_of, blocks)))

        self.held.append(made(held))
        same = all(map(np.array_equal, held, got))
        self.got.append(self.held[-1] if same else made(got))
        self.owned.append(made(owned))
        self.passed.append({host: made(blocks) for host, blocks in passed.items() if any(map(len, blocks))})

    def is_passed(self, fragment_id: int) -> bool:
        """Return whether this host, which does not lead, gets blocks of the fragment from the leader."""
        return self.host in self.passed[fragment_id]

    def for_others(self, fragment_id: int, payload: Bytes, format: Format) -> dict[int, Bytes]:
        """Return what the leader passes on of a payload that it got, by host; ValueError if the payload is damaged."""
        got = [(self.got[fragment_id], payload)]
        return {host: one_buffer(regrouped(got, each, format)) for host, each in self.passed[fragment_id].items()}

    def for_own(self, fragment_id: int, payload: Bytes, shared: Bytes, format: Format) -> Bytes:
        """Return the payload of the blocks that this host holds; ValueError if a payload is damaged.

        Args:
            payload: From the syncer.
            shared: From the leader; b"" if nothing is passed to this host.
        """
        held, got = self.held[fragment_id], self.got[fragment_id]
        if got is held:
            return payload
        sources = [(got, payload)]
        if self.host in self.passed[fragment_id]:
            sources.append((self.passed[fragment_id][self.host], shared))
        return one_buffer(regrouped(sources, held, format))
