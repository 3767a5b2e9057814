"""`diloco doctor`: it checks whether this machine can take part in the run, and names a remedy for each problem."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.local.machine import count_of, look
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.doctor import machine
from diloco_jax.tools.doctor.bucket import check_bucket
from diloco_jax.tools.doctor.link import Side, check_link, dialled
from diloco_jax.tools.doctor.machine import Check, Status
from diloco_jax.transport.endpoints.grpc_link import listen
from diloco_jax.transport.endpoints.probe import SECONDS_MAX
from diloco_jax.transport.link import bucket_scheme, check_name, split_address
from diloco_jax.transport.trust.security import is_loopback

WORDS: dict[Status, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
# The width of the table if the output is not a terminal.
WIDTH = 140
STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(config: RunConfig, run_dir: Path, *, island: str, address: str, seconds: float) -> list[Check]:
    """Run all checks of this machine, for an island or, if `island` is empty, for the syncer.

    If the syncer's port is chosen at start, the islands can only run on this machine. Then it is checked for them too.

    Args:
      run_dir: the run's folder on this machine.
      address: host:port of the syncer, or a bucket.
      seconds: duration of each measurement of the link's rate.

    Raises:
      ValueError: an argument is wrong, or the model cannot be loaded.
    """
    if not 0 < seconds <= SECONDS_MAX:
        raise ValueError(f"--seconds is {seconds}; use more than 0, at most {SECONDS_MAX:g}")
    name = check_name(island) if island else SYNCER
    config = config.of_island(island)
    # Nobody can dial a bucket.
    side = None if bucket_scheme(address) else dialled(config.transport, name, address)
    part = machine.part_of(config, island)
    local = side is not None and _is_local(config, side)
    role = island or ("the syncer and all islands" if local else "the syncer")
    checks = [_check_config(config, island, role, part.parameters)]
    checks.append(machine.check_accelerators(config if local else None, os.environ))
    checks += [] if side is None else check_link(config, side, part, seconds)
    checks += check_bucket(config, replace(config.transport, address=address)) if side is None else []
    checks.append(machine.check_parts(config, island))
    if not config.model.own:
        checks.append(machine.check_data(config))
    memory_bytes = part.memory_bytes
    if local and memory_bytes is not None:
        memory_bytes += machine.islands_memory(config)
    checks += [machine.check_memory(memory_bytes), machine.check_disk(part.disk_bytes, run_dir)]
    own = config.island(island)
    # This reads the machine's devices, not JAX's, because a check must not take chips from a running run.
    emulated = not own.topology and look({}).emulates
    if island and not emulated and not config.islands.pathways:
        checks.append(machine.check_chips(own.slice))
    checks.append(machine.check_environment(os.environ, emulated=emulated or not island))
    learners = 1 if island else config.islands.count
    # A control connection takes three descriptors at the syncer, because its front forwards it to gRPC.
    checks.append(machine.check_files(2 * learners * (config.transport.stripes + 3)))
    return checks


def _is_local(config: RunConfig, side: Side) -> bool:
    """Return whether `diloco train` would run the syncer and all islands of this config on this machine."""
    port = split_address(side.transport.address)[1]
    here = side.is_syncer and not port and is_loopback(side.transport.address)
    return here and config.algorithm == "decoupled" and not config.islands.pathways


def _check_config(config: RunConfig, island: str, role: str, parameters: int | None) -> Check:
    model = "a model that the islands' loops bring" if parameters is None else f"{parameters:,} parameters"
    found = f"run {config.name!r}, {config.islands.count} islands, {model}; "
    if island and island not in config.islands.names:
        names = f"{config.islands.names[0]} to {config.islands.names[-1]}"
        return Check("config", "warn", f"{found}{island} is not among {names}", "correct --island if it is one of them")
    return Check("config", "ok", f"{found}checked for {role}")


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the checks in the form that `diloco doctor --json` prints."""
    rows = [check._asdict() for check in checks]
    return {"checks": rows, "ok": not any(check.status == "fail" for check in checks), "verdict": verdict(checks)}


def verdict(checks: Sequence[Check]) -> str:
    """Return the result of all checks in one sentence."""
    failed, warned = ([check.name for check in checks if check.status == status] for status in ("fail", "warn"))
    if failed:
        return f"not ready: {count_of(len(failed), 'check')} failed ({', '.join(failed)}); the fixes are above"
    if warned:
        return f"ready, with {count_of(len(warned), 'warning')} ({', '.join(warned)})"
    return f"ready: all {len(checks)} checks passed"


def describe(checks: Sequence[Check]) -> str:
    """Format the checks as a table, with the verdict below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        word = Text(WORDS[check.status], STYLES[check.status])
        table.add_row(word, check.name, Text(check.found), Text(check.fix))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as capture:
        console.print(table)
    return f"{capture.get().rstrip()}\n\nverdict: {verdict(checks)}"


@contextmanager
def listening(config: RunConfig) -> Iterator[str]:
    """Listen on the syncer's address, and answer doctors without admitting learners.

    Yields:
      The address.

    Raises:
      ValueError: the config has no port, or the port cannot be opened.
    """
    if bucket_scheme(config.transport.address):
        raise ValueError(
            f"transport.address {config.transport.address} is a bucket, which nobody listens at; leave out --listen: "
            "`diloco doctor` on each machine tests the bucket itself"
        )
    if not split_address(config.transport.address)[1]:
        raise ValueError(
            f"transport.address is {config.transport.address}; --listen needs a port: add "
            "--transport.address 0.0.0.0:50051"
        )
    settings = machine.part_of(config).settings
    listener = listen(config.transport, run_id=config.name)
    try:
        listener.stop_admitting()
        listener.desk.settings = lambda: settings
        yield listener.address
    finally:
        listener.close(0.0)


def serve(config: RunConfig, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Answer doctors until `stop` is set; `say` gets a line when the port is open. Raises as `listening`."""
    with listening(config) as address:
        say(f"answering `diloco doctor` at {address} until Ctrl-C; no learner is admitted")
        stop.wait()
