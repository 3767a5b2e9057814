"""The blocks of arriving versions at one host of an island: it passes some on to other hosts, and gets some from them.

The syncer sends all hosts of an island the same versions in the same order. So the number of the session and a number
within the session identify a version. Blocks of a later session may arrive before this host has a link of that session.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_jax.core.codec import Bytes, Format
from diloco_jax.core.held import HeldBlocks, one_buffer, regrouped
from diloco_jax.protocol.messages import GlobalFragment
from diloco_jax.runtime.island.blocks import IslandBlocks
from diloco_jax.transport.commands import HostShared
from diloco_jax.transport.link import Payload


@dataclass(eq=False)
class _Arriving:
    """A version whose blocks arrive."""

    message: GlobalFragment
    # From the syncer.
    own: Bytes | None = None
    # From other hosts, by step and host.
    shared: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    # The next step; this host has sent its blocks of all earlier steps.
    step: int = 0
    complete: bool = False


class Passing:
    """The blocks of versions on their way through one host; any thread may call the methods.

    Args:
        format_of: Returns the format of a version's payload.
        send: Sends a command with its payload to another host; never blocks.
        on_complete: Called with the number of a version when all its blocks have arrived.
    """

    def __init__(
        self,
        blocks: IslandBlocks,
        format_of: Callable[[GlobalFragment], Format],
        send: Callable[[HostShared, Payload, int], None],
        on_complete: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._blocks = blocks
        self._format_of = format_of
        self._send = send
        self._on_complete = on_complete
        self._changed = threading.Condition()
        # The present session, and the newest of its versions that the leader has handled.
        self._handled = 0, 0
        self._arriving: dict[tuple[int, int], _Arriving] = {}

    def begin(self, session: int) -> None:
        """Forget the versions of earlier sessions."""
        self._forget((session, 0))

    def handled(self, number: int) -> None:
        """Forget the versions up to this one: the leader has handled them."""
        self._forget((self._handled[0], number))

    def arrived(self, number: int, message: GlobalFragment, payload: Bytes) -> None:
        """Take this host's blocks of a version from the syncer; ValueError if the payload is damaged."""
        got = self._blocks.got[message.fragment_id]
        size, expected = memoryview(payload).nbytes, got.layout.payload_bytes(self._format_of(message))
        if size != expected:
            raise ValueError(f"has {size} bytes, but the blocks of this host take {expected}")
        with self._changed:
            if (arriving := self._open((self._handled[0], number), message)) is not None:
                arriving.own = payload
                self._pass_on(number, arriving)

    def on_shared(self, host: int, command: HostShared, payload: Bytes) -> None:
        """Take blocks that another host has passed on."""
        with self._changed:
            if (arriving := self._open((command.session, command.number), command.value)) is not None:
                arriving.shared[command.step, host] = payload
                self._pass_on(command.number, arriving)

    def take(self, number: int, timeout_s: float = 0.0) -> Bytes | None:
        """Return the payload of all blocks that this host holds; None if some do not arrive within `timeout_s`."""
        with self._changed:
            key = self._handled[0], number
            if not self._changed.wait_for(lambda: key in self._arriving and self._arriving[key].complete, timeout_s):
                return None
            arriving = self._arriving.pop(key)
        message = arriving.message
        held, sources = self._blocks.held[message.fragment_id], self._sources(arriving)
        assert sources is not None and arriving.own is not None, "a complete version has all blocks"
        return one_buffer(regrouped(sources, held, self._format_of(message))) if len(sources) > 1 else arriving.own

    def _open(self, key: tuple[int, int], message: GlobalFragment) -> _Arriving | None:
        """Return the version with this key; None if the leader has handled it."""
        return None if key <= self._handled else self._arriving.setdefault(key, _Arriving(message))

    def _forget(self, handled: tuple[int, int]) -> None:
        with self._changed:
            self._handled = handled
            self._arriving = {key: each for key, each in self._arriving.items() if key > handled}

    def _pass_on(self, number: int, arriving: _Arriving) -> None:
        """Send the blocks of each step whose blocks have arrived, in the order of the steps."""
        message = arriving.message
        steps, format = self._blocks.steps[message.fragment_id], self._format_of(message)
        while arriving.step < len(steps) and (sources := self._sources(arriving, arriving.step)) is not None:
            command = HostShared(message, self._handled[0], number, arriving.step)
            for host, blocks in steps[arriving.step].to.items():
                self._send(command, regrouped(sources, blocks, format), host)
            arriving.step += 1
        if self._sources(arriving) is not None:
            arriving.complete = True
            self._changed.notify_all()
            self._on_complete(number)

    def _sources(self, arriving: _Arriving, step: int | None = None) -> list[tuple[HeldBlocks, Bytes]] | None:
        """Return the blocks from the syncer and those of all steps before `step`; None if some have not arrived."""
        fragment_id, own = arriving.message.fragment_id, arriving.own
        due = [
            (blocks, arriving.shared.get((number, host)))
            for number, each in enumerate(self._blocks.steps[fragment_id][:step])
            for host, blocks in each.of.items()
        ]
        found = [
            (blocks, payload) for blocks, payload in [(self._blocks.got[fragment_id], own), *due] if payload is not None
        ]
        return found if len(found) == 1 + len(due) else None
