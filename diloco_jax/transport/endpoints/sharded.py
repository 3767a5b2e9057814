"""A learner's sessions with a syncer that has merge shards, as one link.

The learner dials the syncer, which names its shards, and then each shard. All deliveries go to one inbox. The link cuts
a fragment's value into parts for the shards that hold the fragment, and joins the parts of new versions; its driver
sees one whole payload each way. A hello goes to the syncer and to every shard, because the shards answer learners
directly. Every other message goes to the syncer alone.

The link ends as a whole when one of its sessions ends. The memory for incomplete versions is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from diloco_jax.core.codec import Format
from diloco_jax.core.host_bytes import cut_host_bytes
from diloco_jax.core.shards import Shares, fill, split
from diloco_jax.protocol.messages import (
    NO_VERSION,
    SYNCER,
    FragmentValue,
    GlobalFragment,
    Hello,
    HostBlocks,
    LearnerMessage,
    MetricsReport,
)
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, connect
from diloco_jax.transport.link import Delivery, Payload, TransportConfig
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.session.inbox import Inbox

# An incomplete version has parts of some shards; of each fragment, the newest versions are kept.
INCOMPLETE_MAX = 2


class _Incomplete(NamedTuple):
    payload: bytearray
    missing: set[int]


class Dialler:
    """Connector of a learner to its syncer; it keeps the incomplete payloads of sessions that were cut.

    Args:
        host: Number of this host in its island; host 0 leads.
        hosts: Number of the island's hosts. With more than one, the payload of every FragmentValue that is sent is
            this host's bytes of it (core/host_bytes.py), empty if the host has no value to send.
        statement: The blocks of the fragments that this host holds, sent first on every link (runtime/model/cuts.py);
            b"" if it is the only host.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        run_id: str,
        learner_id: str,
        incarnation: int,
        shares: Shares,
        up: Format,
        down: Format,
        host: int = 0,
        hosts: int = 1,
        statement: bytes = b"",
    ) -> None:
        self._config = config
        self._blocks = HostBlocks(learner_id, incarnation), statement
        names = {"run_id": run_id, "learner_id": learner_id, "incarnation": incarnation, "host": host, "hosts": hosts}
        self._dial = partial(connect, **names)  # type: ignore[arg-type]
        self._share = partial(ShardedLink, shares=shares, up=up, down=down, in_parts=hosts > 1)
        shards = shares.count if shares.count > 1 else 0
        self._partials = [Partials(config.payload_bytes_max, config.resume_s) for _ in range(shards + 1)]

    def connect(self, epoch: int, number: int = 0) -> ShardedLink | GrpcLink:
        """Open a link of a learner, or of one host of an island of several, by `grpc_link.connect`.

        A host that is not the leader sends values with its own bytes, and receives its blocks of every version.
        Its session ends together with the leader's. Close it after the leader's, or messages that the leader has not
        sent yet are lost.

        Args:
            epoch: Newest epoch of the syncer that we know; the leader's, for a host that is not the leader.
            number: Number of the leader's link, for a host that is not the leader.
        """
        inbox = Inbox()
        dial = partial(self._dial, epoch=epoch, inbox=inbox)
        control = dial(self._config, partials=self._partials[0], number=number)
        if self._blocks[1]:
            control.send(*self._blocks)
        if not control.shards or len(control.shards) + 1 != len(self._partials):
            # The syncer is one process, or has another config than ours: its answer to our hello says so.
            return control

        def dial_shard(shard: int) -> GrpcLink:
            config, partials = replace(self._config, address=control.shards[shard]), self._partials[shard + 1]
            return dial(config, partials=partials, peer=f"shard-{shard}", number=control.number)

        with ThreadPoolExecutor(len(control.shards), "diloco-dial") as pool:
            dialled = [pool.submit(dial_shard, shard) for shard in range(len(control.shards))]
        links = [each.result() for each in dialled if each.exception() is None]
        if len(links) < len(dialled):
            for link in [*links, control]:
                link.close(0.0)
            raise next(error for each in dialled if (error := each.exception()) is not None)
        return self._share(control, links, inbox)


@dataclass(eq=False)
class ShardedLink:
    """One link over several sessions, opened by a Dialler."""

    control: GrpcLink
    links: Sequence[GrpcLink]  # shard order
    inbox: Inbox
    shares: Shares
    up: Format
    down: Format
    # True if this process is one of several hosts, so that it sends its own bytes instead of whole values.
    in_parts: bool = False
    _incomplete: dict[int, dict[GlobalFragment, _Incomplete]] = field(default_factory=dict)  # fragment -> versions

    @property
    def number(self) -> int:
        """Return the session's number, the same at the syncer and its shards."""
        return self.control.number

    @property
    def open(self) -> bool:
        return self.control.open and all(link.open for link in self.links)

    def wake(self) -> None:
        """Make a waiting `receive` return None soon."""
        self.inbox.wake()

    def send(self, message: LearnerMessage | MetricsReport | HostBlocks, payload: Payload = b"") -> None:
        if isinstance(message, FragmentValue):
            for shard in self.shares.holders(message.fragment_id):
                self.links[shard].send(message, self._cut(message.fragment_id, shard, payload))
            return
        if isinstance(message, Hello):
            for link in self.links:
                link.send(message)
        self.control.send(message, payload)

    def _cut(self, fragment_id: int, shard: int, payload: Payload) -> Payload:
        """Return a shard's part of a value; an answer without a value is empty, and the syncer waits for it too."""
        ranges = self.shares.ranges(fragment_id, shard, self.up)
        if self.in_parts:
            return cut_host_bytes(payload, ranges)
        buffers = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
        size = sum(memoryview(piece).nbytes for piece in buffers)
        has_value = size == self.shares.wholes[fragment_id].payload_bytes(self.up)
        return split(buffers, ranges if has_value else ())

    def receive(self, timeout_s: float) -> Delivery | None:
        until_s = time.monotonic() + timeout_s
        while True:
            item = self.inbox.get(max(0.0, until_s - time.monotonic()))
            if item is None:
                return None
            delivery = item[1]
            _, of_shard, number = delivery.peer.partition("shard-")
            if not of_shard:
                return delivery
            shard = int(number)
            if delivery.kind == "disconnected":
                return delivery._replace(peer=SYNCER, reason=f"merge shard {shard}: {delivery.reason}")
            if isinstance(delivery.message, GlobalFragment):
                payload = self._join(shard, delivery.message, delivery.payload)
                if payload is not None:
                    return delivery._replace(peer=SYNCER, payload=payload)

    def _join(self, shard: int, message: GlobalFragment, part: bytes | memoryview) -> bytes | memoryview | None:
        """Return the whole payload once all parts have arrived, else None.

        A payload with a wrong part is empty, so that decoding it fails.
        """
        shares, fragment_id = self.shares, message.fragment_id
        format = "float32" if message.base == NO_VERSION else self.down
        if not 0 <= fragment_id < len(shares.wholes):
            return b""
        of_fragment = self._incomplete.setdefault(fragment_id, {})
        if message not in of_fragment:
            size = shares.wholes[fragment_id].payload_bytes(format)
            of_fragment[message] = _Incomplete(bytearray(size), set(shares.holders(fragment_id)))
            if len(of_fragment) > INCOMPLETE_MAX:
                del of_fragment[next(iter(of_fragment))]
        whole = of_fragment[message]
        ranges = shares.ranges(fragment_id, shard, format)
        if shard not in whole.missing:
            return None
        if len(part) != sum(stop - start for start, stop in ranges):
            del of_fragment[message]
            return b""
        fill(memoryview(whole.payload), ranges, part)
        whole.missing.remove(shard)
        if whole.missing:
            return None
        del of_fragment[message]
        return memoryview(whole.payload).toreadonly()

    def close(self, grace_s: float = 5.0) -> None:
        until_s = time.monotonic() + grace_s
        for link in (*self.links, self.control):
            link.close(max(0.0, until_s - time.monotonic()))
