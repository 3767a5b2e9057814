"""The way of a user's loop into a run: its options, the introduction to the syncer, and the agreement of its hosts."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import jax

from diloco_jax.runtime.island.join import meet
from diloco_jax.runtime.learner.joined import Joining, StepSize, island_pulse
from diloco_jax.runtime.learner.preemption import check_source, watch
from diloco_jax.runtime.own_loop.data_shard import find_place
from diloco_jax.runtime.own_loop.introduce import introduce
from diloco_jax.runtime.own_loop.loaders import loader_of
from diloco_jax.runtime.own_loop.stepping import RunComplete, SteppedIsland, log
from diloco_jax.runtime.own_loop.surroundings import Surroundings, look, unless_typed
from diloco_jax.runtime.own_loop.trees import LoopArrays
from diloco_jax.runtime.records.log_lines import show_lines
from diloco_jax.runtime.records.signals import die_with_parent, end_refused
from diloco_jax.runtime.records.status import is_over
from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.link import TransportConfig, TransportError


class LoopOptions(TypedDict):
    """Options of an island in a user's loop; `join` explains them."""

    name: NotRequired[str | None]
    samples_per_step: int
    tokens_per_step: int
    flops_per_step: NotRequired[float]
    data: NotRequired[Literal["leased", "own"]]
    corpus: NotRequired[str]
    evaluate: NotRequired[Callable[[Any], Any] | None]
    transport: NotRequired[TransportConfig | None]
    run_dir: NotRequired[str | Path | None]
    preemption: NotRequired[str]
    coordinator: NotRequired[str]
    loader: NotRequired[Any]


def check_options(options: LoopOptions) -> None:
    """Check the sizes of a step and the kind of data; ValueError names the wrong one."""
    for what, count in _sizes(options).items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{what} is {count!r}; give a whole number from 1")
    if (data := options.get("data", "leased")) not in ("leased", "own"):
        raise ValueError(f'data is {data!r}; use "leased" or "own"')
    if options.get("loader") is not None and data != "own":
        raise ValueError('a loader= has its own order of the data: give data="own" with it, or leave it out')


def reach(syncer: str | None, options: Mapping[str, Any]) -> tuple[Surroundings, TransportConfig]:
    """Wait until the syncer listens; return the place of this process in the run, and the transport to the syncer.

    Args:
        syncer: host:port of the syncer. If None, the environment variable DILOCO_SYNCER.
        options: Options of `join`.

    Raises:
        ValueError: The syncer or the island has no name.
        ConnectionError: The syncer cannot be reached.
        RunComplete: The run is complete.
    """
    here = look(syncer, options.get("name"), options.get("run_dir"), options.get("coordinator", ""))
    own = replace(options.get("transport") or here.transport, address=here.syncer)
    show_lines()
    log.info(f"{here.name}: connecting to the syncer at {own.address}")
    folder, more = here.run_dir, ""
    if folder is not None and is_over(folder):
        # Its syncer may start again, to train longer.
        more = f"; the run in {folder} is complete, so without a syncer this process ends after that time"
    try:
        await_listener(own, here.given_by, lambda line: log.warning(line + more))
    except TransportError:
        if folder is not None and is_over(folder):
            raise RunComplete(here.name, folder) from None
        raise
    return here, own


def enter(syncer: str | None, arrays: LoopArrays, options: LoopOptions) -> SteppedIsland:
    """Join the run at `syncer` with a loop's arrays; arguments and errors as for `join`."""
    check_options(options)
    end_refused()
    here, own = reach(syncer, options)
    config = unless_typed(introduce(own, here.name, arrays.initial, arrays.forms)).of_island(here.name)
    die_with_parent()
    incarnation, hosts, data = here.incarnation, None, options.get("data", "leased")
    if jax.process_count() > 1:
        if not arrays.devices:
            raise ValueError("an island of several JAX processes needs JAX arrays; start one process for this island")
        same = {"data": data, **{what: str(count) for what, count in _sizes(options).items()}}
        hosts = meet(config, here.name, incarnation, here.coordinator, same)
        incarnation = hosts.incarnation
    stop = threading.Event()
    if preemption := options.get("preemption", ""):
        watch(check_source(preemption), stop)
    folder = here.run_dir or Path(config.runs_dir) / config.name
    pulse = island_pulse(config, folder, here.name, 0 if hosts is None else hosts.host)
    joining = Joining(config, here.name, incarnation, own.address, folder, pulse, hosts)
    leased = options["samples_per_step"] if data == "leased" else 0
    size = StepSize(leased, options["tokens_per_step"], options.get("corpus", ""))
    flops_per_step = options.get("flops_per_step", 0.0)
    place = cache(partial(find_place, own, config, here.name))
    loader = loader_of(options.get("loader"), place, incarnation)
    return SteppedIsland(joining, arrays, stop, size, data, flops_per_step, options.get("evaluate"), place, loader)


def _sizes(options: LoopOptions) -> Mapping[str, int]:
    return {what: options[what] for what in ("samples_per_step", "tokens_per_step")}
