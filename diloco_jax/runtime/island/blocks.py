"""The blocks of fragments that each host of an island holds, and the way of each block to its hosts.

One holder of a block gets it from the syncer, so an island receives every block of a version once, however its tensors
are sharded. Hosts that hold blocks together divide them into equal shares, and each host gets one share from the
syncer. They pass on the shares in steps 0, 1, ..., as Bruck's all-gather does:

    in step i the host at place k < 2^i sends the share to the host at place k + 2^i

A place counts from the host that got the share, in a ring of the holders. So every share enters a host once, after at
most log2(holders) hops, and every holder sends as many bytes as it gets from others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import Blocks, Box, HeldBlocks, blocks_of_boxes, table_of
from diloco_jax.core.layout import Layout, whole
from diloco_jax.runtime.model.cuts import HostCut, pack_blocks

# By host: the boxes of each slice that its devices hold, by key.
Boxes = Mapping[int, Mapping[str, Collection[Box]]]
_NONE: Blocks = np.empty(0, np.int64)


class PassingStep(NamedTuple):
    """The blocks of a fragment that a host sends to other hosts, and gets from other hosts, in one step; by host."""

    to: dict[int, HeldBlocks]
    of: dict[int, HeldBlocks]


class IslandBlocks:
    """The blocks of one host of an island.

    Args:
        boxes: Returns what the devices of each host hold of a fragment.
        host: This host.
        hosts: Number of the island's hosts.

    Raises:
        ValueError: The host's blocks take more rows than the syncer reads.
    """

    def __init__(
        self, fragments: Sequence[Fragment], boxes: Callable[[Fragment], Boxes], host: int, hosts: int
    ) -> None:
        self.host = host
        # By fragment: what this host holds, and what it gets from the syncer. Together the hosts get each block once.
        self.held: list[HeldBlocks] = []
        self.got: list[HeldBlocks] = []
        # By fragment: the steps of getting the other blocks from hosts, and of passing blocks on.
        self.steps: list[list[PassingStep]] = []
        for fragment in fragments:
            self._add(whole(fragment), boxes(fragment), hosts)
        self.statement = pack_blocks([HostCut(*pair) for pair in zip(self.held, self.got, strict=True)])

    @property
    def sources(self) -> set[int]:
        """Return the hosts that pass on blocks to this one."""
        return {host for steps in self.steps for step in steps for host in step.of}

    def _add(self, layout: Layout, boxes: Boxes, hosts: int) -> None:
        held, got = list[Blocks](), list[list[Blocks]]()
        # (step, whether this host sends them, the other host) -> the blocks of each slice.
        moving: dict[tuple[int, bool, int], list[list[Blocks]]] = {}

        def move(step: int, leaves: bool, other: int, blocks: Blocks) -> None:
            moving.setdefault((step, leaves, other), [[] for _ in layout.pieces])[len(got) - 1].append(blocks)

        for number, piece in enumerate(layout.pieces):
            of_host = [blocks_of_boxes(piece.shape, boxes.get(each, {}).get(piece.key, ())) for each in range(hosts)]
            held.append(of_host[self.host])
            got.append([])
            for holders, blocks in _by_holders(of_host, self.host):
                count, mine = len(holders), holders.index(self.host)
                # The first shares of small slices are larger, so another host gets the first share in each slice.
                for first, share in enumerate(np.array_split(blocks, count), number):
                    place = (mine - first) % count
                    if place == 0:
                        got[-1].append(share)
                    else:
                        step = place.bit_length() - 1
                        move(step, False, holders[(mine - (1 << step)) % count], share)
                    # The host has the share from this step on.
                    step = place.bit_length()
                    while place + (1 << step) < count:
                        move(step, True, holders[(mine + (1 << step)) % count], share)
                        step += 1
        self.held.append(_blocks(layout, [[each] for each in held]))
        steps = [PassingStep({}, {}) for _ in range(1 + max((step for step, *_ in moving), default=-1))]
        for (step, leaves, other), shares in sorted(moving.items()):
            # Slices with fewer blocks than holders have empty shares.
            if any(share.size for of_slice in shares for share in of_slice):
                (steps[step].to if leaves else steps[step].of)[other] = _blocks(layout, shares)
        self.got.append(_blocks(layout, got) if any(step.of for step in steps) else self.held[-1])
        self.steps.append(steps)


def _blocks(layout: Layout, by_slice: Sequence[Sequence[Blocks]]) -> HeldBlocks:
    return HeldBlocks(layout, tuple(table_of(np.sort(np.concatenate([_NONE, *each]))) for each in by_slice))


def _by_holders(of_host: Sequence[Blocks], host: int) -> Iterator[tuple[list[int], Blocks]]:
    """Group the blocks of one slice that a host holds by the hosts that hold them, in ascending order."""
    mine = of_host[host]
    groups = np.zeros(mine.size, np.int64)
    for blocks in of_host:
        groups = 2 * groups + np.isin(mine, blocks)
        # Numbers without a gap stay below the number of blocks.
        groups = (np.cumsum(np.bincount(groups) > 0) - 1)[groups]
    for number in range(int(groups.max(initial=-1)) + 1):
        blocks = mine[groups == number]
        yield [each for each, held in enumerate(of_host) if np.isin(blocks[0], held)], blocks
