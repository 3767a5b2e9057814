"""A process of a slice without a model: elects, follows and leads over real connections, and prints what happens.

python -m tests.runtime.slices.one_slice OWN CHANGE FLOODS ADDRESS ADDRESS
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from diloco_jax.runtime.slices.following import FollowingSlice
from diloco_jax.runtime.slices.hosts import SliceHosts
from diloco_jax.runtime.slices.leading import Leadership, SliceLost
from diloco_jax.runtime.slices.member import HeldState
from diloco_jax.runtime.slices.messages import MESSAGES, Mean
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.slices.links import SliceLinks

TERM = 64
PATIENCE_S = 1.5
POLL_S = 0.1
# More than the buffers of a connection take.
FLOOD = np.zeros(16 << 20, np.float32)
PULSE = cast(Any, SimpleNamespace(beat=lambda: None, ready=lambda trains: None))


def say(event: str, **fields: int) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def flood(links: SliceLinks) -> None:
    """Send more than a connection takes to each slice that begins to stand still."""
    while True:
        time.sleep(POLL_S)
        for other in links.connected:
            if PATIENCE_S / 3 < links.silent_s(other) < PATIENCE_S and not links.waiting_bytes(other):
                links.send(other, Mean(TERM, 9, 0, 0), FLOOD)


def lead(leadership: Leadership, links: SliceLinks) -> None:
    """Lead without steps, until another slice leads in a newer term."""
    while True:
        leadership.look()
        time.sleep(POLL_S)
        for other in links.connected:
            if (silent_s := links.silent_s(other)) > PATIENCE_S:
                leadership._lose(other, f"it was silent for {silent_s:.1f} s")


def main(own: int, change: int, floods: bool, addresses: Sequence[str]) -> None:
    def nothing(*ignored: object) -> None:
        del ignored

    links = SliceLinks(TransportConfig(), "run", "island-0", own, addresses, MESSAGES)
    member = SimpleNamespace(
        own=own,
        links=links,
        receive=links.receive,
        standing=HeldState(TERM, change),
        begin_term=lambda term: vars(member).update(standing=HeldState(term, member.standing.change)),
        end_term=nothing,
        route=nothing,
        hosts=SliceHosts(),
        exchange=None,
        receiving=None,
        computing=None,
        complete=False,
        give=nothing,
    )
    if floods:
        threading.Thread(target=flood, args=(links,), daemon=True).start()
    follower = FollowingSlice(cast(Any, member), len(addresses), 1, PATIENCE_S, lambda: False, PULSE)
    while (chosen := follower.elect()) is not None:
        say("leads" if chosen.leader == own else "follows", leader=chosen.leader, term=chosen.term)
        if chosen.leader == own:
            try:
                lead(Leadership(cast(Any, member), chosen, 1, PATIENCE_S, lambda: False), links)
            except SliceLost:
                say("resigns")
                return
        # Without a model, a state is only its number.
        member.standing = chosen.base
        follower.follow(chosen)
        say("loses")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])), sys.argv[4:])
