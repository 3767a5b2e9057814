"""Start of the processes of one island: JAX's distributed runtime, and the island's own network.

Each island has a separate coordination service, so that the end of one island does not affect the others. If one of an
island's processes fails, all of them end at once, and their supervisor starts all of them again.
"""

import logging
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco_jax.runtime.records.signals import FAILED, after_end, end_now
from diloco_jax.settings.compiler import compiler_variable
from diloco_jax.settings.fingerprint import fingerprint, own_corpus
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.commands import Command, HostMeet, HostVerdict
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.group.direct import DirectLinks
from diloco_jax.transport.group.group import LEADER, SILENCE_S, GroupItem, GroupLeader, GroupMember, group_config
from diloco_jax.transport.link import check_free, listening_address, split_address

# Timeout of the coordination service. The service aborts with a stack trace, so the island's own network must notice a
# silent host first.
HEARTBEAT_S = int(3 * SILENCE_S)
# All processes of an island must start within this time.
START_S = 300
# All processes must end within this time after the first one.
SHUTDOWN_S = 20
# Room for two addresses and two numbers of one host.
WORDS_BYTES = 600
METADATA_S = 2.0
# An address of a private network; a route to it leads to other machines.
NOWHERE = "10.255.255.255"
_Said = TypeVar("_Said", HostMeet, HostVerdict)

log = logging.getLogger(__name__)


class CommandQueue(Protocol):
    """The commands of the leader for the thread that steps, in their order."""

    def put(self, command: Command) -> object:
        """Add a command; any thread."""

    def get(self, timeout: float) -> Command:
        """Remove the next command and return it; queue.Empty if none arrived within `timeout` seconds."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The processes of this island, seen from one of them."""

    host: int  # LEADER leads
    count: int  # number of hosts
    # The connection to the leader, or the leader's connection to all.
    group: GroupLeader | GroupMember
    # The connections for blocks between hosts.
    direct: DirectLinks
    # The leader's incarnation counts for all hosts.
    incarnation: int
    # Random number of this start of the island, the same on all hosts.
    start: int = 0
    # Of a slice of several hosts: host 0 gives the reports of other hosts to `reports`, and these take and return the
    # leader's commands through `commands`, because orders of the slice are among them.
    reports: Callable[[GroupItem], object] | None = None
    commands: CommandQueue | None = None


def join(
    config: RunConfig,
    learner_id: str,
    incarnation: int,
    host: int | None,
    coordinator: str,
    corpus: Callable[[], str],
) -> Hosts | None:
    """Start as one process of an island, before anything else uses a device; None for an island of one process.

    Args:
      incarnation: Incarnation of this process; the leader's counts for all.
      host: Number of this host; None lets JAX find it on Cloud TPU.
      coordinator: host:port where host 0 can listen; "" lets JAX find it.
      corpus: Describes the data that this process reads; called on an island of several hosts.

    Raises:
      ValueError: The island has another number of processes, is a part of a multislice job, or its hosts have
        different settings.
      ConnectionError: The other processes did not start in time.
    """
    island = config.island(learner_id)
    # The platform sets these variables for a multislice job.
    for name in sorted(name for name in os.environ if name.startswith("MEGASCALE_")):
        log.info(f"{name}={os.environ.pop(name)} was set; an island is a separate job, so it is not used")
    variable, options = compiler_variable(config, island, os.environ)
    if options:
        # JAX reads it when it looks for its devices.
        os.environ[variable] = options
    if island.hosts == 1:
        if host is not None or coordinator:
            raise ValueError(f"--host and --coordinator are of an island of several hosts; {learner_id} has 1")
        return None
    if (host is None) != (not coordinator):
        raise ValueError("--host and --coordinator belong together; give both, or none on Cloud TPU")
    if host is not None and not 0 <= host < island.hosts:
        raise ValueError(f"--host is {host}, but {island.name} has hosts 0 to {island.hosts - 1}; see islands.hosts")
    # JAX's preemption service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    if host is None:
        _refuse_multislice()
    else:
        _check_coordinator(coordinator, listens=host == LEADER)
    _begin_jax(island, host, coordinator)
    if jax.process_count() != island.hosts:
        raise ValueError(
            f"{island.name} has {jax.process_count()} processes, but its islands.hosts, or its topology, says "
            f"{island.hosts}; correct one of them"
        )
    reads = corpus()
    content = own_corpus(config, reads, 0, "").content
    same = {**dict(fingerprint(config, "", reads)), "island": str(island), "content of its corpus": content}
    return meet(config, learner_id, incarnation, coordinator, same)


def meet(config: RunConfig, learner_id: str, incarnation: int, coordinator: str, same: Mapping[str, str]) -> Hosts:
    """Connect the processes of an island with each other, after JAX's distributed runtime has started.

    The leader listens for commands, and every host listens for blocks. JAX carries the addresses and random numbers to
    all hosts.

    Args:
      config, learner_id, incarnation, coordinator: As for `join`.
      same: This host's values of the settings that all hosts must share.

    Raises:
      ValueError: A host has another setting.
      ConnectionError: A host is lost.
    """
    host, count = jax.process_index(), jax.process_count()
    near = split_address(coordinator)[0] if coordinator else NOWHERE
    own = near if coordinator and host == LEADER else _own_address(near)
    here = group_config(config.transport, f"[{own}]:0" if ":" in own else f"{own}:0")
    direct = DirectLinks(here, config.name, learner_id, host, count)
    group: GroupLeader | GroupMember | None = None
    told = [direct.address, str(direct.number)]
    if host == LEADER:
        group = leader = GroupLeader(here, config.name, learner_id, count)
        told += [leader.address, str(leader.number)]
    heard = [words.split() for words in _exchange(" ".join(told))]
    direct.meet([(words[0], int(words[1])) for words in heard])
    _, _, address, number = heard[LEADER]
    if group is None:
        group = GroupMember(group_config(config.transport, address), config.name, learner_id, host, count, int(number))
    hosts = Hosts(host, count, group, direct, incarnation, int(number))
    return replace(hosts, incarnation=_agree(hosts, {**same, "JAX": jax.__version__}))


def _exchange(words: str) -> list[str]:
    """Return the words of every process of the island, in the order of their numbers."""
    raw = words.encode()
    if len(raw) > WORDS_BYTES:
        raise ValueError(
            f"the addresses {words!r} have {len(raw)} bytes, the limit is {WORDS_BYTES}: use shorter names of hosts"
        )
    padded = np.frombuffer(raw.ljust(WORDS_BYTES, b"\0"), np.uint8)
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(multihost_utils.process_allgather(padded))]


def _begin_jax(island: IslandConfig, host: int | None, coordinator: str) -> None:
    """Start JAX's distributed runtime with the other processes; end this process if they do not start in time."""
    words = f"the other processes of {island.name} did not come within {START_S} s: start all {island.hosts} of them"
    # JAX itself would abort with a stack trace.
    alone = threading.Timer(
        START_S, die, [f"{words}, with the same --coordinator (here {coordinator or 'JAX finds it'})"]
    )
    alone.daemon = True
    alone.start()
    try:
        jax.distributed.initialize(
            coordinator or None,
            None if host is None else island.hosts,
            host,
            initialization_timeout=2 * START_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            # By default it would listen on all interfaces, even at an IP address.
            coordinator_bind_address=listening_address(coordinator) if coordinator else None,
        )
    except RuntimeError as error:
        raise ConnectionError(f"the processes of {island.name} did not meet: {error}") from None
    except ValueError as error:
        raise ValueError(
            f"JAX does not find the other hosts of {island.name} by itself ({error}); give --host and --coordinator"
        ) from None
    finally:
        alone.cancel()


def _check_coordinator(address: str, *, listens: bool) -> None:
    """Check the coordinator's address.

    Raises:
      ValueError: This is not an address with a port.
      ConnectionError: Host 0 cannot listen there.
    """
    try:
        _, port = split_address(address)
    except ValueError:
        port = 0
    if not port:
        raise ValueError(f"--coordinator is {address!r}: write HOST:PORT, the same on all hosts; host 0 listens there")
    if listens:
        try:
            check_free(listening_address(address))
        except OSError as error:
            raise ConnectionError(
                f"host 0 cannot listen at --coordinator {address} ({error}): use an address of its machine, and a port "
                "that is free"
            ) from None


def _agree(hosts: Hosts, same: Mapping[str, str]) -> int:
    """Compare the settings of all hosts, and return the leader's incarnation; ValueError if they differ.

    With different settings the hosts' programs would wait for each other forever, or train another model than intended.
    """
    group, wrong = hosts.group, ""
    if isinstance(group, GroupLeader):
        group.send(HostMeet(hosts.incarnation, tuple(same.items())))
        reasons = [_hear(group, HostVerdict).reason for _ in range(hosts.count - 1)]
        wrong = next((reason for reason in reasons if reason), "")
        group.send(HostVerdict(wrong))
        incarnation = hosts.incarnation
    else:
        meet = _hear(group, HostMeet)
        for what, theirs in meet.fingerprint:
            if theirs != same.get(what):
                wrong = f"host {hosts.host} has {what} {same.get(what)!r}, host {LEADER} has {theirs!r}"
        group.send(HostVerdict(wrong))
        wrong, incarnation = _hear(group, HostVerdict).reason, meet.island_incarnation
    if wrong:
        group.close()
        raise ValueError(f"{wrong}: start all hosts of an island from one config, with the same --island and --data")
    return incarnation


def _hear(group: GroupLeader | GroupMember, kind: type[_Said]) -> _Said:
    item = group.receive(START_S)
    if item is not None and isinstance(item.message, kind):
        return item.message
    answer = f"nothing within {START_S} s" if item is None else item.reason or f"{item.message}"
    raise ConnectionError(f"the hosts of this island did not agree on its settings: {answer}")


def _own_address(there: str) -> str:
    """Return the address of the interface to another machine; a machine's name often resolves to loopback."""
    family, kind, *_, address = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as to_there:
        # A UDP socket only chooses a route; nothing is sent.
        to_there.connect(address)
        return str(to_there.getsockname()[0])


def leave(status: int) -> NoReturn:
    """End this process of an island of several hosts, with this exit status."""
    if not after_end(status).failed:
        try:
            # This call waits for the other processes, because without their coordinator they would abort.
            jax.distributed.shutdown()
        except RuntimeError as error:
            log.info(f"the other processes of the island had ended before: {error}")
    end_now(status)


def die(reason: str) -> NoReturn:
    """End this process at once.

    Without one of its hosts an island cannot continue, and its collectives would wait forever.
    """
    log.error(f"this island ends: {reason}")
    end_now(FAILED)


def make_dialler(
    run: ResolvedRun, learner_id: str, incarnation: int, address: str, hosts: Hosts | None, statement: bytes = b""
) -> Dialler:
    """Return the connector of one process of an island to the syncer at this address.

    Args:
      statement: the blocks that this process states on every link, if it is one of several.
    """
    config = run.config
    return Dialler(
        replace(config.transport, address=address),
        run_id=config.name,
        learner_id=learner_id,
        incarnation=incarnation,
        host=LEADER if hosts is None else hosts.host,
        hosts=1 if hosts is None else hosts.count,
        statement=statement,
    )


def ask_metadata(path: str, variable: str) -> str:
    """Read a value from Google Cloud's metadata server, at GCE_METADATA_HOST or _IP; OSError without an answer."""
    host = os.environ.get(f"GCE_METADATA_{variable}", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    # A proxy does not know this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with direct.open(request, timeout=METADATA_S) as answer:
        return str(answer.read(1 << 20).decode(errors="replace"))


def _refuse_multislice() -> None:
    """Refuse a slice of a multislice job, because JAX would read its variables from the metadata server."""
    if not os.path.exists("/dev/accel0") and not os.path.exists("/dev/vfio"):
        return
    try:
        metadata = ask_metadata("attributes/tpu-env", "IP")
    except OSError as error:
        log.info(f"no metadata of this slice: {error}")
        return
    if named := [line for line in metadata.splitlines() if line.strip().startswith("MEGASCALE_")]:
        raise ValueError(
            f"this slice was created as a part of a multislice job ({named[0].strip()}); create one slice for each "
            "island, without --node-count and MEGASCALE_ settings"
        )
