"""The machines of a rehearsal: folders for disks, addresses of loopback for hosts, relays between regions.

Like JobSets on a cluster, the supervisor of local runs restarts ended processes with the commands of `diloco launch`.
Each island dials a separate address, which has a relay for the syncer's port.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.local.processes import Child, Process, free_address
from diloco_jax.runtime.local.run import LocalRun, child_environment
from diloco_jax.runtime.records.files import CHAOS, TAPES
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.launch import common

VOLUME_BYTES = 256 << 20


class Ways:
    """All relays of an island, used as one; a call of a method calls it on each `Relay`."""

    def __init__(self, island: str, ports: range, syncer: Callable[[], str]) -> None:
        self.address = f"{island}:{ports[0]}"
        self._relays = [Relay(lambda port=port: f"{syncer()}:{port}", f"{island}:{port}") for port in ports]

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *how, **more: sum(getattr(relay, name)(*how, **more) or 0 for relay in self._relays)


class Cluster(LocalRun):
    """A run whose processes share only the network; `root/run` always leads to the syncer's volume."""

    def __init__(
        self, config: RunConfig, root: Path, say: Callable[[str], None], stop: threading.Event,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._root, self._environment, self.volumes = root, environment, root / "volumes"
        self.mounted = _mount(self.volumes)
        self._volume = self.volumes / "new"
        for folder in (self._volume, root / "logs", root / CHAOS, root / "hosts"):
            folder.mkdir(parents=True, exist_ok=True)
        (root / "config.yaml").write_text(dump(config), encoding="utf-8")
        (self._volume / CHAOS).symlink_to(root / CHAOS)
        self._mount_at(0)
        # The number of wanted moves of the syncer to another host.
        self.moves = 0
        super().__init__(config, root / "run", say, stop)
        self._port = int(free_address().rpartition(":")[2])
        names = enumerate(config.islands.names)
        self.relays = {name: Ways(f"127.0.1.{i + 1}", [self._port], lambda: self._host) for i, name in names}

    def _mount_at(self, number: int) -> None:
        """Move the volume to another host, and let root/run lead there."""
        self._volume = self._volume.rename(self.volumes / f"host-{number}")
        link = self._root / "run.new"
        link.symlink_to(self._volume)
        link.rename(self._root / "run")
        self._moved, self._host = number, f"127.0.0.{number + 2}"

    def _start_syncer(self, options: Any = ()) -> Child:
        if self.moves > self._moved:
            self._mount_at(self.moves)
        arguments = [*common.syncer_words(), "--transport.address", f"{self._host}:{self._port}", *options]
        return Child(SYNCER, [self._launch(SYNCER, arguments)])

    def _start_island(self, name: str, address: str) -> Child:
        # An island dials its relay instead.
        del address
        hosts = self._config.island(name).hosts
        words = common.learner_words(name, self.relays[name].address)
        meet = ["--coordinator", free_address(), "--host"] if hosts > 1 else []
        numbered = [[*words, *meet, str(host)][: None if meet else -1] for host in range(hosts)]
        return Child(name, [self._launch(name, each, host) for host, each in enumerate(numbered)])

    def _launch(self, name: str, arguments: list[str], host: int = 0) -> Process:
        disk = self._volume if name == SYNCER else self._root / "hosts" / f"{name}-{host}"
        disk.mkdir(exist_ok=True)
        here = {common.CONFIG_PATH: str(self._root / "config.yaml"), common.RUN_DIR: str(disk)}
        module = "diloco_jax" if name == SYNCER else "rehearsal.process"
        command = [sys.executable, "-m", module, *(here.get(word, word) for word in arguments)]
        environment = {**child_environment(self._config, name, self._machine, host), **self._environment}
        log = self._root / "logs" / f"{name}-{host}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=disk,
                start_new_session=True,
            )  # fmt: skip
        return Process(f"{name}.host-{host}" if host else name, process, log)

    def _start_compilers(self) -> None:
        """Do nothing, because all hosts share compiled programs (JAX_COMPILATION_CACHE_DIR)."""

    def pid(self, name: str) -> int | None:
        """Return the id of an island's leading process or of the syncer; None if it has no process."""
        return next(iter(self.pids(name)), None)

    def pids(self, name: str) -> list[int]:
        """Return the ids of an island's present processes; the leader is first."""
        child = self._syncer if name == SYNCER else self._islands.get(name)
        hosts = [] if child is None else child.hosts
        return [each.process.pid for each in hosts if each.process.poll() is None]

    def send(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to the leading process; False if there is none."""
        for pid in (pids := self.pids(name)[:1]):
            os.kill(pid, number)
        return bool(pids)

    def given_up(self) -> list[str]:
        """Return the descriptions of the exits of islands that are not restarted."""
        return [child.describe_exit() for child in self._islands.values() if child.failed]

    def close(self) -> None:
        """Close the relays, link all tapes into the run's folder for the audit, and copy the volume's files."""
        for relay in self.relays.values():
            relay.close()
        (self._root / "run" / TAPES).mkdir(exist_ok=True)
        for tape in sorted((self._root / "hosts").glob(f"*-0/{TAPES}/*")):
            with contextlib.suppress(FileExistsError):
                (self._root / "run" / TAPES / tape.name).symlink_to(tape)
        if self.mounted:
            kept = shutil.copytree(self.volumes, self._root / "kept", symlinks=True)
            subprocess.run(["umount", "-l", str(self.volumes)], check=True)
            self.volumes.rmdir()
            kept.rename(self.volumes)
            self.mounted = False


def _mount(folder: Path) -> bool:
    """Mount a separate file system for the volume, so that it can be full; False without the permission."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "rehearsal", str(folder)]
    return os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
