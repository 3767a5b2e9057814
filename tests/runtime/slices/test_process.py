"""What all slices must have in common, and the end of the process of one slice."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np

from diloco_jax.runtime.slices.process import settings_of
from diloco_jax.settings.run import RunConfig

HALVES = ((0, 4),), ((4, 7),)


def settings(gradient: Any, state: Any) -> str:
    """Return the digest of a host that holds these places of one tensor."""
    mesh = SimpleNamespace(shape={"fsdp": 2}, devices=np.array(jax.devices()[:1]))
    shards = [SimpleNamespace(name="x", spans=spans) for spans in state]
    island = SimpleNamespace(mesh=mesh, base=SimpleNamespace(digest=""), shards=lambda: shards)
    parts = SimpleNamespace(places={"x": gradient})
    loop = SimpleNamespace(island=island, parts=parts, corpus="", batch_size=4)
    run = SimpleNamespace(config=RunConfig(name="run"), fingerprint=lambda *_: ())
    return settings_of(cast(Any, run), cast(Any, loop))


def test_hosts_that_hold_other_shards_do_not_connect() -> None:
    """Their messages have the same sizes, so a wrong mean or state would not be noticed."""
    one, other = ([place] for place in HALVES)
    assert settings(one, one) == settings(one, one)
    assert len({settings(one, one), settings(other, one), settings(one, other)}) == 3
    assert settings(one, [*HALVES]) != settings(one, [*reversed(HALVES)]), "states travel shard by shard"
