"""A laboratory for wide-area networks on one machine, with namespaces for islands and a syncer around a router.

    island-0 [wan] ======= [island-0]
    island-1 [wan] ======= [island-1]  router  [syncer] ------- [wan] syncer
    ...          shaped both ways                      as fast as it goes

Every island's link has its own rate, which is equal in both directions (`tc tbf`, tail drop), and optionally a delay
(delay.py). The lab counts the bytes that pass the shaper, with the headers of every packet. It needs Linux and root.

Children get SIGTERM when this process ends, and the next lab removes namespaces without an owner. The names of
namespaces have the owner's process id and start time, so labs of several processes are separate.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

PREFIX = "dlwan"
SYNCER, ROUTER = "syncer", "router"
ROOT = Path(__file__).parents[3]
NAMESPACES, NAMESPACE_FILES = Path("/run/netns"), Path("/etc/netns")
# The longest queue of a shaper, at its rate.
QUEUE_S = 0.05
QUEUE_BYTES_MIN = 256 << 10
BURST_S = 0.004
BURST_BYTES_MIN = 16 << 10
TUN_QUEUE_PACKETS = 10_000
STOP_S = 10.0
POLL_S = 0.05
# A child with this prefix gets SIGTERM when this process ends. preexec_fn would fork, and JAX warns about forks.
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
_serial = itertools.count()


class LabError(RuntimeError):
    """The laboratory cannot be built; the message says what to do."""


class RunFailed(RuntimeError):
    """Error of a run that did not reach the measurement; the message names the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """Settings that all island links of a lab have in common."""

    # Bits per second in each direction; 0: unlimited.
    rate_bit_s: float = 0.0
    # The delay in each direction.
    one_way_s: float = 0.0
    # The largest packet in bytes.
    mtu: int = 1500
    # The largest send buffer and receive buffer of a TCP connection; 0: the system's limit.
    window_bytes: int = 0
    # TCP's congestion control, one of net.ipv4.tcp_allowed_congestion_control; empty: the system's choice.
    congestion: str = ""


class Traffic(NamedTuple):
    """Bytes of one island's link so far, with IP headers, and with Ethernet headers if the link has no delay."""

    up: int
    down: int
    drops: int


def check_root() -> None:
    """Check that a lab can be built here; LabError otherwise."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"network namespaces need Linux, this is {sys.platform}; run it on a Linux machine")
    if os.geteuid() != 0:
        raise LabError(f"network namespaces need root, this is user {os.geteuid()}; start it with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"the command {tool!r} is missing; install the package iproute2")


def _run(*words: object) -> str:
    """Run a command, and return its output; LabError with its message if it fails."""
    command = [str(word) for word in words]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise LabError(f"{' '.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def _counters(namespace: str, device: str) -> dict[str, int]:
    """Read what a device has sent, and what its present shaper has dropped."""
    (queue,) = json.loads(_run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
    # A shaper counts bytes, too, but only its own, and packets pass between a reading and its replacement.
    (link,) = json.loads(_run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device))
    return {"bytes": link["stats64"]["tx"]["bytes"], "drops": queue["drops"]}


def _start_ticks(pid: int) -> str:
    """Return the start of a process in clock ticks since the system's start; empty if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _remove_namespace(name: str) -> None:
    """End the processes of a namespace, and remove it; missing parts are ignored."""
    with contextlib.suppress(LabError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(LabError):
        _run("ip", "netns", "delete", name)
    shutil.rmtree(NAMESPACE_FILES / name, ignore_errors=True)


def sweep() -> list[str]:
    """Remove the namespaces of labs without a process, and return their names."""
    folders = (folder for folder in (NAMESPACES, NAMESPACE_FILES) if folder.is_dir())
    found = sorted({path.name for folder in folders for path in folder.glob(f"{PREFIX}-*")})
    swept = []
    for name in found:
        _, pid, ticks, *_ = name.split("-")
        if _start_ticks(int(pid)) != ticks:
            _remove_namespace(name)
            swept.append(name)
    return swept


class Lab:
    """A laboratory; use it as a context manager.

    Args:
        islands: names of the islands.
        wan: settings of their links.

    Raises:
        LabError: a lab cannot be built here.
    """

    def __init__(self, islands: Sequence[str], wan: Wan) -> None:
        check_root()
        self.islands = tuple(islands)
        self.wan = wan
        self._id = f"{PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_serial)}"
        self._sites = (SYNCER, *self.islands)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._delays: list[subprocess.Popen[bytes]] = []
        # The traffic of each link before its newest change of rate.
        # What earlier shapers of an island's link have dropped.
        self._dropped: dict[str, int] = {}
        self._shapes = 0

    def __enter__(self) -> Lab:
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, site: str) -> str:
        """Return the name of the namespace of a site: an island, "syncer" or "router"."""
        return f"{self._id}-{site}"

    def address(self, site: str) -> str:
        """Return the IPv4 address of a site."""
        return f"10.77.{self._sites.index(site) + 1}.2"

    def _build(self) -> None:
        for site in (ROUTER, *self._sites):
            _run("ip", "netns", "add", self.namespace(site))
            _run("ip", "-n", self.namespace(site), "link", "set", "lo", "up")
        self.sysctl(ROUTER, "net.ipv4.ip_forward", 1)
        for site in self._sites:
            self._join(site)
            self._tune(site)
            self._write_hosts(site)
        self.shape(self.wan.rate_bit_s)

    def _join(self, site: str) -> None:
        """Connect a site with the router."""
        here, router, gateway = self.namespace(site), self.namespace(ROUTER), self.address(site)[:-1] + "1"
        delayed = bool(self.wan.one_way_s) and site != SYNCER
        if delayed:
            self._delay(here, router, site)
        else:
            _run("ip", "link", "add", "wan", "netns", here, "type", "veth", "peer", "name", site, "netns", router)
        for namespace, device, address in ((here, "wan", self.address(site)), (router, site, gateway)):
            _run("ip", "-n", namespace, "link", "set", device, "mtu", self.wan.mtu)
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            if delayed:
                _run("ip", "-n", namespace, "link", "set", device, "txqueuelen", TUN_QUEUE_PACKETS)
            _run("ip", "-n", namespace, "link", "set", device, "up")
        _run("ip", "-n", here, "route", "add", "default", "via", gateway)

    def _delay(self, here: str, router: str, site: str) -> None:
        """Start a process that makes two devices, and carries packets between them with a delay."""
        program = Path(__file__).with_name("delay.py")
        words = [
            *ENDS_WITH_US,
            sys.executable,
            str(program),
            f"{here}:wan",
            f"{router}:{site}",
            str(self.wan.one_way_s),
        ]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        self._delays.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise LabError("the link with a delay did not start; check that /dev/net/tun exists")

    def _tune(self, site: str) -> None:
        if self.wan.congestion:
            self.sysctl(site, "net.ipv4.tcp_congestion_control", self.wan.congestion)
        if self.wan.window_bytes:
            for name in ("tcp_wmem", "tcp_rmem"):
                self.sysctl(site, f"net.ipv4.{name}", f"4096 131072 {self.wan.window_bytes}")

    def _write_hosts(self, site: str) -> None:
        """Write the hosts file of a site, because gloo listens at the address of the machine's name."""
        folder = NAMESPACE_FILES / self.namespace(site)
        folder.mkdir(parents=True)
        names = f"127.0.0.1 localhost\n{self.address(site)} {socket.gethostname()}\n"
        (folder / "hosts").write_text(names, encoding="utf-8")

    def sysctl(self, site: str, name: str, value: object) -> None:
        """Set a kernel setting of a site."""
        _run("ip", "netns", "exec", self.namespace(site), "sysctl", "-qw", f"{name}={value}")

    def _ends(self, island: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return namespace and device of the sending ends of an island's link: up, down."""
        return (self.namespace(island), "wan"), (self.namespace(ROUTER), island)

    def shape(self, rate_bit_s: float) -> None:
        """Set the rate of all island links in bits per second, also while they are used; 0: unlimited.

        Packets in their queues are lost, because a packet larger than a new, smaller burst would block its queue
        forever. Losses in the milliseconds of the change are not counted.
        """
        rate = rate_bit_s or 100e9
        burst = int(max(BURST_BYTES_MIN, 2 * self.wan.mtu, BURST_S * rate / 8))
        limit = int(max(QUEUE_BYTES_MIN, QUEUE_S * rate / 8)) + burst
        words = ("tbf", "rate", f"{int(rate)}bit", "burst", burst, "limit", min(limit, 1 << 30))
        self._shapes += 1
        for island in self.islands:
            self._dropped[island] = self.traffic(island).drops if self._shapes > 1 else 0
            # A new handle makes a new queue at once.
            for namespace, device in self._ends(island):
                place = ("dev", device, "root", "handle", f"{self._shapes}:")
                _run("tc", "-n", namespace, "qdisc", "replace", *place, *words)

    def traffic(self, island: str) -> Traffic:
        """Return the traffic of an island's link so far."""
        up, down = (_counters(namespace, device) for namespace, device in self._ends(island))
        return Traffic(up["bytes"], down["bytes"], self._dropped[island] + up["drops"] + down["drops"])

    def delay_cpu_s(self) -> float:
        """Return the processor time of the processes that delay packets."""
        ticks = 0
        for process in self._delays:
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def spawn(
        self,
        name: str,
        site: str,
        command: Sequence[object],
        *,
        stdout: IO[bytes] | int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program at a site; standard error goes where standard output goes if that is a file.

        Args:
            name: of the child, unique in this lab.
            site: where it runs.
            command: its words.
            stdout: a file, or subprocess.PIPE.
            environment: of the child; this process's own if not given.
        """
        assert name not in self.children, f"there is a child {name} already"
        process = subprocess.Popen(
            [*ENDS_WITH_US, "ip", "netns", "exec", self.namespace(site), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=None if stdout in (None, subprocess.PIPE) else subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=ROOT,
            # A terminal's Ctrl-C must reach only the lab.
            start_new_session=True,
        )
        self.children[name] = process
        return process

    def wait_for(
        self, condition: Callable[[], bool], limit_s: float, what: str, look: Callable[[], object] | None = None
    ) -> None:
        """Wait until a condition is true; check it twenty times a second.

        Args:
            condition: the condition.
            limit_s: most seconds to wait.
            what: name of the event, for the message.
            look: called at every check.

        Raises:
            RunFailed: the condition did not become true in time, or a child has failed.
        """
        ends_s = time.monotonic() + limit_s
        while not condition():
            for name, child in self.children.items():
                if child.poll() not in (None, 0):
                    raise RunFailed(f"{name} ended with status {child.returncode} before {what}; read its log")
            if time.monotonic() > ends_s:
                raise RunFailed(f"{what} did not happen within {limit_s:.0f} s; read the logs")
            if look is not None:
                look()
            time.sleep(POLL_S)

    def output(self, name: str, limit_s: float) -> str:
        """Wait for the end of a child with a pipe, and return its standard output.

        Raises:
            RunFailed: the child failed, or did not end in time.
        """
        child = self.children.pop(name)
        try:
            text, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise RunFailed(f"{name} did not end within {limit_s:.0f} s") from None
        if child.returncode:
            raise RunFailed(f"{name} ended with status {child.returncode}; its output names the cause")
        return text.decode()

    def stop(self, *names: str) -> None:
        """End children (default: all), first with SIGTERM, then with SIGKILL."""
        chosen = [self.children.pop(name) for name in names or tuple(self.children)]
        for child in chosen:
            if child.poll() is None:
                child.terminate()
        ends_s = time.monotonic() + STOP_S
        for child in chosen:
            try:
                child.wait(timeout=max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def close(self) -> None:
        """Remove everything; safe to call again."""
        try:
            self.stop()
        finally:
            for process in self._delays:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            self._delays.clear()
            for site in (ROUTER, *self._sites):
                _remove_namespace(self.namespace(site))
            # The folder may have files of other labs.
            with contextlib.suppress(OSError):
                NAMESPACE_FILES.rmdir()
