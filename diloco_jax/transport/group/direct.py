"""Connections for blocks between the hosts of one island: each host dials the hosts that send to it.

They work like the connections between the leader and the other hosts (group.py), but the leader has no special role.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from diloco_jax.transport.commands import HostShared
from diloco_jax.transport.group.group import SILENCE_S, GroupItem, GroupLeader, GroupMember
from diloco_jax.transport.link import Payload, TransportConfig


class DirectLinks:
    """The connections of one host for blocks: it sends to hosts that dial it, and dials hosts that send to it.

    Args:
        config: Settings from `group_config`, with the address where other hosts reach this one, as `GroupLeader`.

    Attributes:
        address, number: For hosts that dial this one.

    Raises:
        ValueError: As `GroupLeader`.
    """

    def __init__(self, config: TransportConfig, run_id: str, learner_id: str, host: int, hosts: int) -> None:
        self._names = run_id, learner_id, host, hosts
        self._config = config
        self._served = GroupLeader(config, run_id, learner_id, hosts, host)
        self.address, self.number = self._served.address, self._served.number
        # By host: address and number.
        self._known: Sequence[tuple[str, int]] = ()
        self._dialled: list[GroupMember] = []
        self._closed = False

    def meet(self, known: Sequence[tuple[str, int]]) -> None:
        """Take the address and the number of every host."""
        self._known = known

    def dial(self, hosts: Iterable[int], on_item: Callable[[GroupItem], None]) -> None:
        """Connect to the hosts that send to this one; GroupError as `GroupMember`.

        Args:
            on_item: Takes what a host sends, and its end, on a separate thread for each host.
        """
        for host in sorted(hosts):
            address, number = self._known[host]
            member = GroupMember(replace(self._config, address=address), *self._names, number, host)
            self._dialled.append(member)
            threading.Thread(target=self._receive, args=(member, on_item), name=f"host-{host}", daemon=True).start()

    def send(self, command: HostShared, payload: Payload, host: int) -> None:
        """Queue blocks for another host; never blocks. Raises as `GroupLeader.send`."""
        self._served.send(command, payload, host)

    def close(self) -> None:
        """End all connections; safe to call again."""
        self._closed = True
        for member in self._dialled:
            member.close(0.0)
        self._served.close(0.0)

    def _receive(self, member: GroupMember, on_item: Callable[[GroupItem], None]) -> None:
        while not self._closed:
            item = member.receive(SILENCE_S)
            if item is not None and not self._closed:
                on_item(item)
                if item.message is None:
                    return
