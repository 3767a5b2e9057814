"""Programs that islands share: those that are alike load what one process has compiled while the syncer begins.

Compiling takes an emulated island several times as long as everything else before its first step, and islands that
share cores would all do it at the same time. Real accelerators are left to their islands.
"""

from diloco_jax.runtime.island.built_in import LOADING, BuiltInLoop
from diloco_jax.runtime.island.host import Host, Told
from diloco_jax.runtime.local.machine import Machine, emulated_devices
from diloco_jax.settings.run import RunConfig


def shared_by_several(config: RunConfig, machine: Machine) -> list[str]:
    """Name one island of each kind that has several members, all of them emulated in a process of their own."""
    if not machine.emulates or config.islands.controller == "single" or config.islands.command:
        return []
    kinds: dict[str, list[str]] = {}
    for name in config.islands.names:
        own = config.island(name)
        if own.hosts == 1 and not own.topology:
            kind = own._replace(name="", zone="", devices=emulated_devices(config, name))
            kinds.setdefault(repr(kind), []).append(name)
    return [names[0] for names in kinds.values() if len(names) > 1]


def compiled_loop(config: RunConfig, island: str, told: Told = lambda words: None) -> BuiltInLoop:
    """Return the loop of an island with all that it runs compiled, and kept where `keep_programs` said."""
    told(LOADING)
    loop = BuiltInLoop(config, island)
    host = Host(config, loop.island, loop.warm_up, loop.evaluate)
    host.warm_up(told)
    told("compiling the evaluation")
    host.warm_up_evaluation()
    return loop
