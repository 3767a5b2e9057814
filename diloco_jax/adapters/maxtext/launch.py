"""MaxText's pre-training as an island, from its arguments to its end."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import absl.flags
import absl.logging
import jax
from maxtext.input_pipeline import grain_data_processing as pipeline
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

from diloco_jax.adapters.maxtext.arguments import Data, read_arguments, refusal_named, with_defaults
from diloco_jax.adapters.maxtext.batches import Leases, leased_pipeline, replaced, sharded
from diloco_jax.adapters.maxtext.command import configs_folder
from diloco_jax.adapters.maxtext.loop import IslandLoop
from diloco_jax.runtime.own_loop.data_shard import find_place
from diloco_jax.runtime.own_loop.enter import reach
from diloco_jax.runtime.own_loop.surroundings import COORDINATOR_ENV, HOST_ENV, HOSTS_ENV
from diloco_jax.settings.text import parse_text
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.link import listening_address


def run(
    words: Sequence[str],
    syncer: str | None = None,
    *,
    name: str | None = None,
    data: Data = "seed",
    **options: Any,
) -> None:
    """Train with MaxText as an island, until the run ends.

    Args:
        words: Arguments of MaxText: a config file such as base.yml, and `key=value`.
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        name: Name of the island. If None, DILOCO_ISLAND.
        data: What the island reads; docs/maxtext.md explains the choices.
        options: Further options of `diloco_jax.join`: `run_dir`, `transport`, `preemption`, `coordinator` and `axes`.
            MaxText's config decides the others.

    Raises:
        ValueError: An argument is wrong, or the run has another model.
        ConnectionError: The syncer cannot be reached.
        RuntimeError: MaxText ended before the run, for instance because its data ended.
        RunComplete: The run is complete.
    """
    given = read_arguments(words, configs_folder())
    # MaxText's own lines and those of the island, as when MaxText is started by its own command.
    absl.logging.use_absl_handler()
    absl.logging.set_verbosity(absl.logging.INFO)
    joining = {**options, "name": name}
    here, transport = reach(syncer, joining)
    config = parse_text(ask_description(transport, here.name).config, f"the config from the syncer at {here.syncer}")
    hosts = int(os.environ.get(HOSTS_ENV) or 1)
    arguments = with_defaults(
        given, run=config.name, island=here.name, steps=config.planned_steps, hosts=hosts, data=data
    )
    if hosts > 1:
        _meet_processes(hosts)
    leases = Leases() if data == "leased" else None
    with ExitStack() as stack:
        loop = IslandLoop(
            train.training_loop_iteration, stack, leases, "steps" in given.values, {**joining, "syncer": syncer}
        )
        stack.enter_context(replaced(train, "training_loop_iteration", loop))
        # The run decides when training ends, also after a checkpoint of MaxText.
        stack.enter_context(replaced(train_utils, "validate_completed_steps", lambda *_: None))
        if leases is not None:
            stack.enter_context(leased_pipeline(pipeline, leases))
        if data == "shard":
            place = find_place(transport, config, here.name)
            stack.enter_context(
                replaced(pipeline, "get_datasets", sharded(pipeline.get_datasets, place.index, place.count))
            )
        # MaxText's own command does so; grain reads a flag when it starts a worker process.
        absl.flags.FLAGS(sys.argv[:1] or [""])
        stack.enter_context(refusal_named())
        train.main([train.__file__, *arguments.as_words()])
        if loop.trouble:
            raise RuntimeError(f"MaxText ended before the run: {loop.trouble}")


def _meet_processes(hosts: int) -> None:
    """Start JAX's runtime with the other processes of the island, before MaxText uses a device."""
    if jax.distributed.is_initialized():
        return
    coordinator, host = os.environ.get(COORDINATOR_ENV, ""), os.environ.get(HOST_ENV, "")
    if not coordinator or not host.isdigit():
        raise ValueError(
            f"{HOSTS_ENV} is {hosts}, so each process of this island needs {COORDINATOR_ENV} (host:port) and "
            f"{HOST_ENV} (its number from 0); they are {coordinator!r} and {host!r}"
        )
    # By default the coordinator would listen on all interfaces, even at an IP address.
    listens = listening_address(coordinator)
    jax.distributed.initialize(coordinator, hosts, int(host), coordinator_bind_address=listens)
