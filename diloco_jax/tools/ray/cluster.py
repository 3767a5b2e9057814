"""The islands of a run on a Ray cluster, for the supervisor of the run.

The supervisor asks Ray for the place of every island. Ray admits an island when a node has its resources, and the
cluster's autoscaler counts the islands that wait as demand. The run starts with the first island that is admitted.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco_jax.runtime.local.machine import MEMORY_SETTINGS, SHARED_MEMORY, Machine, count_of, settings_of
from diloco_jax.runtime.local.processes import Process
from diloco_jax.runtime.records.files import CONFIG_FILE, LOGS
from diloco_jax.runtime.records.liveness import tell_phase
from diloco_jax.runtime.records.status import COMPLETE, last_state
from diloco_jax.settings.islands import ACCELERATORS, IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import save
from diloco_jax.tools.ray.host import Launch
from diloco_jax.tools.ray.request import Placement, Request, bundle_text
from diloco_jax.training.data.cluster import check_reachable, import_ray, no_cluster
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

SETTING, REMEDY = "islands.ray", "leave islands.ray out to train on this machine"
# What Ray prints, in the folder of the run's logs.
RAY_LOG = "ray.log"
# Certificates that the command makes, in the folder of the run.
CERTIFICATES = "certs"
# After the end of a run, the threads of its islands have so long to give their places back.
END_S = 15.0
LEAVE_S = 10.0
# Ray ends this process when its head node has not answered for 60 s. The run ends in order before that.
HEAD_LOST_S = 15.0
HEAD_POLL_S = 2.0


@contextmanager
def on_cluster(
    config: RunConfig, run_dir: Path, say: Callable[[str], None]
) -> Iterator[tuple[RunConfig, "RayIslands"]]:
    """Connect to the cluster that `islands.ray` names, and yield the run's config there, and the place of its islands.

    The config in the run's folder gets an address that other nodes reach, and certificates if the run has none. At the
    end nothing of the run is left on the cluster. Meanwhile standard output is Ray's, so `say` must write elsewhere.

    Raises:
        ValueError: Ray is missing, or the cluster cannot be reached.
    """
    # Ray reads this variable when it is imported. If Ray ends this process, the syncer must be able to save the model.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
    ray, address, run_dir = import_ray(), config.islands.ray, run_dir.resolve()
    if address != "auto":
        check_reachable(address, SETTING, REMEDY)
    (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
    # Ray prints paragraphs about the cluster's nodes.
    with (run_dir / LOGS / RAY_LOG).open("a", encoding="utf-8") as log, redirect_stdout(log):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            # Ray's message names options that `diloco train` does not have.
            unknown = ConnectionError("Ray does not run on this machine") if address == "auto" else error
            raise no_cluster(address, unknown, SETTING, REMEDY) from error
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise no_cluster(address, error, SETTING, REMEDY) from error
        try:
            config = reachable(config, run_dir, ray.util.get_node_ip_address())
            islands = RayIslands(ray, config, run_dir, say)
            try:
                yield config, islands
            finally:
                islands.end()
        finally:
            # Without its head node the cluster does not answer.
            leaving = threading.Thread(name="ray-shutdown", target=ray.shutdown, daemon=True)
            leaving.start()
            leaving.join(LEAVE_S)


def reachable(config: RunConfig, run_dir: Path, node_ip: str) -> RunConfig:
    """Return the config with a syncer that the nodes of the cluster reach; save it in the run's folder.

    Args:
        node_ip: the address of this machine in the cluster.
    """
    transport = config.transport
    if is_loopback(transport.address):
        transport = replace(transport, address=f"{node_ip}:{split_address(transport.address)[1]}")
    if not (is_loopback(transport.address) or transport.encrypted or transport.allow_plaintext):
        # Only runs with certificates need the package behind this module.
        from diloco_jax.transport.trust.certificates import make, settings

        make(run_dir / CERTIFICATES, config.islands.names)
        files: dict[str, Any] = settings(run_dir / CERTIFICATES)
        transport = replace(transport, **files)
    if transport != config.transport:
        config = replace(config, transport=transport)
        save(config, run_dir / CONFIG_FILE)
    return config


class RayIslands:
    """The place of a run's islands: nodes of a Ray cluster.

    Args:
        ray: the module, connected to the cluster.
        run_dir: folder of the run; nodes use the same path.
        say: gets lines for people, such as the resources that an island waits for.
    """

    def __init__(self, ray: Any, config: RunConfig, run_dir: Path, say: Callable[[str], None]) -> None:
        self._ray = ray
        self._config = config
        self._run_dir = run_dir
        self._say = say
        self._requests: list[Request] = []

    def describe(self) -> str:
        """Return one line about the cluster and what the islands ask it for."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        # A cluster with an autoscaler may have no node for islands yet.
        asks: dict[str, int] = {}
        for name in self._config.islands.names:
            island = self._config.island(name)
            emulates = "" if accelerates(island) else " for emulated devices"
            text = f"{bundle_text([island.resources] * island.hosts)}{emulates}"
            asks[text] = asks.get(text, 0) + 1
        asked = "; ".join(f"{count_of(count, 'island')} with {text} each" for text, count in asks.items())
        return f"Ray cluster at {self._ray.get_runtime_context().gcs_address}, {count_of(len(nodes), 'node')}: {asked}"

    def start(self, name: str, address: str, incarnation: str) -> Sequence[Process]:
        """Ask the cluster for an island's place, where its processes start; return these processes."""
        log = self._run_dir / LOGS / f"{name}.log"
        begins = log.stat().st_size if log.exists() else 0
        island = self._config.island(name)
        launches = [launch_of(self._config, name, self._run_dir, address, incarnation, n) for n in range(island.hosts)]
        # Ray wants unique names of placement groups, and the one before may not be removed yet.
        title, bundles = f"{self._config.name} {name} {incarnation}", [island.resources] * island.hosts
        placement = Placement(name, title, address, bundles, launches, log)
        request = Request(self._ray, placement, self._say, partial(tell_phase, self._run_dir, name), self._over)
        self._requests = [request, *(each for each in self._requests if not each.ended)]
        return [Process(name, process, log, begins) for process in request.processes]

    def watch(self, stop: threading.Event) -> None:
        """Set `stop` if the head node of the cluster does not answer any more, so that the run ends in order."""
        address = self._ray.get_runtime_context().gcs_address
        threading.Thread(name="ray-head", target=self._watch, args=(address, stop), daemon=True).start()

    def _watch(self, address: str, stop: threading.Event) -> None:
        host, port = split_address(address)
        answered_s = time.monotonic()
        while not stop.wait(HEAD_POLL_S):
            with suppress(OSError):
                socket.create_connection((host, port), HEAD_POLL_S).close()
                answered_s = time.monotonic()
            if time.monotonic() > answered_s + HEAD_LOST_S:
                self._say(
                    f"the head node of the Ray cluster at {address} is lost, so the run stops; start Ray, and resume"
                )
                stop.set()

    def _over(self) -> bool:
        """Tell whether the run needs no island any more, not even to evaluate the final model."""
        return last_state(self._run_dir) == COMPLETE

    def end(self) -> None:
        """End all islands and give their places back."""
        for each in self._requests:
            each.kill()
        ends_s = time.monotonic() + END_S
        for each in self._requests:
            each.join(max(0.0, ends_s - time.monotonic()))


def accelerates(island: IslandConfig) -> bool:
    """Tell whether Ray gives accelerators to the processes of an island."""
    return any(name in island.resources for name in ACCELERATORS)


def launch_of(config: RunConfig, name: str, run_dir: Path, address: str, incarnation: str, host: int) -> Launch:
    """Return the process of an island's host on a node.

    Args:
        run_dir: folder of the run, by its absolute path.
        address: host:port of the syncer.
        incarnation: number of this start of the island.
    """
    island = config.island(name)
    arguments = ["learner", str(run_dir / CONFIG_FILE), "--run-dir", str(run_dir), "--island", name]
    arguments += ["--syncer", address, "--incarnation", incarnation]
    if island.hosts > 1:
        arguments += ["--host", str(host)]
    environment = dict(config.cloud.env)
    if not accelerates(island):
        environment |= settings_of(config, name, Machine(), host)
    elif (share := island.resources.get("GPU", 1)) < 1:
        # Ray gives the rest of the GPU to others, and does not limit memory.
        environment[MEMORY_SETTINGS[0]] = f"{SHARED_MEMORY * share:.2f}"
    files = [CONFIG_FILE]
    if config.transport.tls_ca.startswith(str(run_dir / CERTIFICATES)):
        files += [f"{CERTIFICATES}/{each}" for each in ("ca.pem", "token", f"{name}.pem", f"{name}.key")]
    return Launch(
        arguments=tuple(arguments),
        environment=environment,
        run_dir=str(run_dir),
        files={each: (run_dir / each).read_bytes() for each in files},
        folder=os.getcwd(),
    )
