"""Checks of `diloco doctor` on the link to the syncer: address, ports, credentials, clocks, versions, throughput."""

import datetime
import ipaddress
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from diloco_jax.protocol.membership import BASE_WEIGHTS, OPEN, agreement
from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.local.check_input import check_listens
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.budget.needs import LinkNeeds
from diloco_jax.tools.doctor.machine import Check, ProcessPart, Status, check_windows, mbit, of_error
from diloco_jax.tools.doctor.probing import Greeting, Rate, greet, measure
from diloco_jax.training.base import base_digest
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.transport.endpoints.probe import RUN_BYTES_MAX, versions
from diloco_jax.transport.link import TransportConfig, TransportError, split_address
from diloco_jax.transport.trust.security import credentials, diagnose, is_loopback, valid_until

REACH_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 10.0
EXPIRES_SOON = datetime.timedelta(days=14)
# The upper limit is an hour, because certificates of `diloco certs` are valid from an hour before their creation.
SKEW_WARN_S, SKEW_MAX_S = 5.0, 3600.0
MUST_AGREE = "diloco-jax"
# The most characters that are shown of a setting.
SHOWN_MAX = 100
LISTEN_HINT = "start the syncer there, or `diloco doctor CONFIG --listen` to test the link to it"


class Side(NamedTuple):
    """This machine's role and its way to reach the syncer."""

    # The island's name, or "syncer" on the syncer's machine.
    name: str
    # The settings with the address that this machine dials.
    transport: TransportConfig
    # The address that the syncer listens on, from the config.
    listens: str

    @property
    def is_syncer(self) -> bool:
        return self.name == SYNCER


def check_link(config: RunConfig, side: Side, part: ProcessPart, seconds: float) -> list[Check]:
    """Check everything between this machine and the syncer; stop when a check fails that later ones depend on."""
    own = check_credentials(side)
    checks = [own, *check_reach(side)]
    if checks[-1].name == "listen":
        # The syncer does not run yet, so its other ports must be free too.
        ports = {"syncer.metrics": config.syncer.metrics, "syncer.page": config.syncer.page} if side.is_syncer else {}
        return checks + [_check_bind(address, setting) for setting, address in ports.items() if address]
    if any(check.status == "fail" for check in checks):
        return checks
    trouble = diagnose(side.transport, side.name)
    if trouble:
        return [*checks, of_error("handshake", ValueError(trouble))]
    try:
        greeting = greet(side.transport, side.name)
    except (TransportError, ValueError) as error:
        return [*checks, _unanswered(config, error)]
    checks.append(check_run(config, side, greeting))
    if checks[-1].status == "fail":
        # Measurements would disturb another run.
        return checks
    checks += check_settings(part.settings, greeting.settings)
    checks += check_base(part.adapted, greeting.settings)
    checks += [check_clock(greeting), check_versions(versions(), greeting.versions)]
    return checks + check_throughput(config, side, greeting, part.links, seconds)


def check_credentials(side: Side, now: datetime.datetime | None = None) -> Check:
    """Check this machine's certificate, key and token."""
    transport, name = side.transport, "credentials"
    try:
        credentials(transport, side.name)
        ends = valid_until(transport, side.name) if transport.encrypted else {}
    except ValueError as error:
        return of_error(name, error, "make them with `diloco certs`, see docs/security.md")
    if not ends:
        if is_loopback(transport.address):
            return Check(name, "ok", "the link is not encrypted, and stays on this machine")
        fix = "set transport.tls_ca, tls_certificate and tls_key (`diloco certs`), if you do not trust the network"
        return Check(name, "warn", f"the link to {transport.address} is not encrypted", fix)
    setting = min(ends, key=lambda each: ends[each])
    left = ends[setting] - (now or datetime.datetime.now(datetime.UTC))
    found = f"valid for {side.name}; transport.{setting} expires first, on {ends[setting]:%Y-%m-%d}"
    if left < EXPIRES_SOON:
        return Check(name, "warn", f"{found}, in {left.days} days", "make new ones with `diloco certs` before that")
    return Check(name, "ok", found)


def check_reach(side: Side) -> list[Check]:
    """Check that the syncer's address resolves, and that its port answers.

    If nothing listens yet on the syncer's own machine, the last check is "listen": whether a process could listen.
    """
    address = side.transport.address
    host, port = split_address(address)
    name = "address"
    if not port and side.is_syncer and is_loopback(address):
        return [Check(name, "ok", f"{address}: syncer and islands run on this machine, the port is chosen at start"),
                Check("listen", "ok", "there is nothing to reach before the run starts")]  # fmt: skip
    if not port:
        fix = "for more than one machine, set transport.address to HOST:PORT, or give --syncer HOST:PORT"
        return [Check(name, "warn" if is_loopback(address) else "fail", f"{address}: the port is chosen at start", fix),
                Check("listen", "ok", "there is nothing to reach before the run starts")]  # fmt: skip
    if not side.is_syncer and _is_unspecified(host):
        fix = "give --syncer HOST:PORT, or set transport.address to an address that islands can dial"
        return [Check(name, "fail", f"{address} is an address to listen on; islands cannot dial it", fix)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        if side.is_syncer:
            return [_check_bind(side.listens, "transport.address")]
        fix = "correct the name or this machine's DNS, or use an IP address"
        return [Check(name, "fail", f"{host} does not resolve: {error.strerror or error}", fix)]
    targets = dict.fromkeys((family, target) for family, *_, target in found)
    outcomes = {str(target[0]): _dial(family, target) for family, target in targets}
    used = next((each for each, error in outcomes.items() if error is None), None)
    listed = ", ".join(outcomes)
    if used is not None:
        which = f"{host} is {listed}; {used} is used" if listed != host else f"{used} is used"
        return [Check(name, "ok", which), Check("reach", "ok", f"TCP port {port} of {used} answers")]
    resolved = Check(name, "ok", f"{host} is {listed}" if listed != host else host)
    first = next(error for error in outcomes.values() if error)
    if side.is_syncer and isinstance(first, ConnectionRefusedError):
        return [resolved, _check_bind(side.listens, "transport.address")]
    return [resolved, _unreachable("reach", address, first)]


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _dial(family: int, target: tuple[object, ...]) -> OSError | None:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(REACH_TIMEOUT_S)
        try:
            connection.connect(target)
        except OSError as error:
            return error
    return None


def _unreachable(name: str, address: str, error: OSError) -> Check:
    port = split_address(address)[1]
    if isinstance(error, ConnectionRefusedError):
        return Check(name, "fail", f"{address} refuses connections: nothing listens there", LISTEN_HINT)
    if isinstance(error, TimeoutError):
        fix = f"let TCP port {port} through the firewalls between here and there, or correct the address"
        return Check(name, "fail", f"{address} did not answer within {REACH_TIMEOUT_S:g} s", f"{fix}; {LISTEN_HINT}")
    words = error.strerror or str(error)
    return Check(name, "fail", f"{address} cannot be reached: {words}", "correct the address, or the routes to it")


def _check_bind(address: str, setting: str) -> Check:
    """Check that a process could listen on an address of this machine."""
    try:
        check_listens(address, setting)
    except ValueError as error:
        return of_error("listen", error)
    found = f"nothing listens on {setting} {address} yet, and the syncer can"
    return Check("listen", "ok", f"{found}; with `diloco doctor CONFIG --listen` islands can test it")


def _unanswered(config: RunConfig, error: Exception) -> Check:
    if "UNIMPLEMENTED" in str(error):
        if config.model.own:
            found = "it waits for the first island, which sends the model; the link is not measured"
            return Check("syncer", "warn", found, "run `diloco doctor` again when the first island has joined")
        return Check("syncer", "fail", "it does not know `diloco doctor`", "install the same version on both sides")
    return of_error("syncer", error)


def check_run(config: RunConfig, side: Side, greeting: Greeting) -> Check:
    """Check that the answering syncer is the one of this run."""
    where = f"the syncer at {side.transport.address}"
    if greeting.run_id != config.name:
        fix = "correct --syncer or transport.address, or use the config of that run"
        return Check("syncer", "fail", f"{where} serves run {greeting.run_id!r}, not {config.name!r}", fix)
    return Check("syncer", "ok", f"{where} accepts us; run {greeting.run_id!r}, {greeting.sessions} learners connected")


def check_settings(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Check]:
    """Compare the settings that learners and syncer must agree on; none if a side does not know its own yet."""
    known = {name: value for name, value in ours.items() if OPEN not in (value, theirs.get(name))}
    differ = [name for name, value in known.items() if theirs.get(name) != value]
    if not (ours and theirs):
        return []
    if not differ:
        return [Check("settings", "ok", f"all {len(known)} settings that both sides know agree")]
    first = differ[0]
    here, there = _short(ours[first]), _short(theirs.get(first, "none"))
    found = f"{', '.join(differ)} differ; {first} is {here} here, {there} there"
    fix = "start both sides from one config file with the same data; otherwise the syncer refuses this learner"
    return [Check("settings", "fail", found, fix)]


def check_base(adapted: Blueprint | None, theirs: Mapping[str, str]) -> list[Check]:
    """Compare the frozen weights below an island's adapters with those of the run, as the syncer will.

    Args:
        adapted: shapes of the island's model; None for a process that reads no frozen weights.
        theirs: the settings of the run.
    """
    if adapted is None or BASE_WEIGHTS not in theirs:
        return []
    there, folder = theirs[BASE_WEIGHTS], adapted.model_config.weights
    if there == OPEN:
        found = f"no island has joined with its weights yet, so those in {folder} are not compared"
        return [Check(BASE_WEIGHTS, "ok", found)]
    began_s = time.monotonic()
    try:
        here = base_digest(adapted)
    except (ValueError, OSError) as error:
        return [of_error(BASE_WEIGHTS, error)]
    found = f"read from {folder} in {_seconds(time.monotonic() - began_s)}"
    if here == there:
        return [Check(BASE_WEIGHTS, "ok", f"the same as those of the first island; {found}")]
    found = f"differ: the first learner of the run has {_short(there)}, this island has {here}, {found}"
    return [Check(BASE_WEIGHTS, "fail", found, agreement(BASE_WEIGHTS))]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]} [...]"


def check_clock(greeting: Greeting) -> Check:
    """Compare the syncer's clock with this machine's."""
    skew_s, error_s = abs(greeting.skew_s), greeting.skew_error_s
    side = "ahead of" if greeting.skew_s > 0 else "behind"
    found = f"the syncer's clock is {skew_s:.3f} s (+- {error_s:.3f}) {side} this machine's"
    fix = "let NTP (chrony, systemd-timesyncd) set both clocks"
    if skew_s - error_s > SKEW_MAX_S:
        return Check("clock", "fail", f"{found}: new certificates are not valid yet on the slower side", fix)
    if skew_s - error_s > SKEW_WARN_S:
        return Check("clock", "warn", f"{found}: logs cannot be compared", fix)
    return Check("clock", "ok", found)


def check_versions(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Check:
    """Compare the versions of packages on both machines; only this package's own version must agree."""
    names = sorted(set(ours) | set(theirs))
    differ = [name for name in names if ours.get(name) != theirs.get(name)]
    if not differ:
        return Check("versions", "ok", ", ".join(f"{name} {ours[name]}" for name in names))
    found = ", ".join(f"{name} {ours.get(name, 'none')} here, {theirs.get(name, 'none')} there" for name in differ)
    status: Status = "fail" if MUST_AGREE in differ else "warn"
    return Check("versions", status, found, "install the same versions on both sides")


def check_throughput(
    config: RunConfig, side: Side, greeting: Greeting, needs: LinkNeeds | None, seconds: float
) -> list[Check]:
    """Measure the link's rate, compare it with the bytes that a learner moves, and check what limits the rate."""
    try:
        down = measure(side.transport, side.name, "down", seconds)
        up = measure(side.transport, side.name, "up", seconds)
    except (TransportError, ValueError) as error:
        return [of_error("throughput", error)]
    if not (up.bytes_per_s and down.bytes_per_s):
        way = "up" if not up.bytes_per_s else "down"
        fix = "look for a firewall that inspects traffic, or for a path with a smaller MTU than announced"
        return [Check("throughput", "fail", f"nothing arrived {way} within {seconds:g} s", fix)]
    checks = [_throughput(config, greeting, needs, up, down)]
    fastest = max(up.bytes_per_s, down.bytes_per_s)
    return [*checks, check_windows(fastest, greeting.rtt_s, side.transport.stripes)]


def _throughput(config: RunConfig, greeting: Greeting, needs: LinkNeeds | None, up: Rate, down: Rate) -> Check:
    rates = up.bytes_per_s, down.bytes_per_s, greeting.rtt_s
    found = f"up {mbit(up.bytes_per_s)}, down {mbit(down.bytes_per_s)}, round trip {greeting.rtt_s * 1e3:.1f} ms"
    if needs is None:
        return Check("throughput", "ok", f"{found}; what a learner moves depends on the model that the loops bring")
    moved = needs.per_step
    found += f"; a learner moves {size(moved['up_bytes_per_step'])} up and {size(moved['down_bytes_per_step'])} down"
    found += " per global step"
    if greeting.sessions:
        found += f"; measured while {greeting.sessions} learners train, with at most {size(RUN_BYTES_MAX)}"
    if config.protocol.lockstep:
        return Check("throughput", "ok", f"{found}: a round takes at least {needs.round_s(*rates):.3g} s on the link")
    found += f": enough for steps of {_seconds(needs.step_s(*rates))} or longer"
    joining_s = needs.joining_bytes / down.bytes_per_s
    fix = "" if joining_s < 600 else f"joining takes {joining_s / 60:.0f} minutes: this link is slow for this model"
    return Check("throughput", "warn" if fix else "ok", found, fix)


def _seconds(value: float) -> str:
    return f"{max(1, math.ceil(value * 1e3))} ms" if value < 1 else f"{value:.1f} s"


def dialled(transport: TransportConfig, name: str, address: str) -> Side:
    """Return a side with the address that it dials; the syncer's machine dials loopback if it listens everywhere."""
    host, port = split_address(address)
    dialled = address
    if name == SYNCER and _is_unspecified(host):
        dialled = f"127.0.0.1:{port}" if ":" not in host else f"[::1]:{port}"
    patience_s = min(transport.connect_timeout_s, ANSWER_TIMEOUT_S)
    return Side(name, replace(transport, address=dialled, connect_timeout_s=patience_s), address)
