"""`diloco doctor` between two sides: it finds each reason why they do not connect, and prints the remedy."""

import dataclasses
import datetime
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from diloco_jax.cli import main as cli
from diloco_jax.protocol.membership import BASE_WEIGHTS, OPEN
from diloco_jax.runtime.records import signals
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump, load
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.tools.doctor import link as doctor_link
from diloco_jax.tools.doctor.examine import as_dict, describe, listening
from diloco_jax.tools.doctor.machine import Check, ProcessPart, part_of
from diloco_jax.tools.doctor.probing import Greeting, Rate, greet
from diloco_jax.training.base import base_digest
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.models.config import OWN, LoraConfig, ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.transport.endpoints import grpc_link, probe
from diloco_jax.transport.endpoints.greeting import ModelDesk
from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from diloco_jax.transport.link import TransportError
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.trust import certificates, security
from tests.limits import HANGS_S
from tests.runtime.helpers import write_config
from tests.sockets import free_port
from tests.tools.export.folders import model_of, public

pytestmark = pytest.mark.net
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the certificates of one run; that of island-9 has expired."""
    folder = tmp_path_factory.mktemp("ours")
    made = certificates.make(folder, ["island-0"])
    authority = certificates._read_pair(folder)
    pair = certificates._new_certificate("island-9", authority, PAST, PAST + datetime.timedelta(days=1))
    certificates._write_pair(folder, "island-9", pair, made)
    (folder / "wrong-token").write_text("not the run's")
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make certificates of another authority with the same names."""
    folder = tmp_path_factory.mktemp("theirs")
    certificates.make(folder, ["island-0"])
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits to what a loaded machine needs."""
    monkeypatch.setattr(security, "PROBE_TIMEOUT_S", HANGS_S)
    monkeypatch.setattr(doctor_link, "REACH_TIMEOUT_S", HANGS_S)


@pytest.fixture
def config(tmp_path: Path, ours: Path) -> RunConfig:
    base = load(write_config(tmp_path))
    changes: dict[str, Any] = {**certificates.settings(ours), "connect_timeout_s": HANGS_S}
    transport = dataclasses.replace(base.transport, **changes)
    return dataclasses.replace(base, transport=transport)


@pytest.fixture
def listener(config: RunConfig) -> Iterator[GrpcListener]:
    made = grpc_link.listen(config.transport, run_id=config.name)
    yield made
    made.close(0.0)


@pytest.fixture(scope="module")
def need(tmp_path_factory: pytest.TempPathFactory) -> ProcessPart:
    return part_of(load(write_config(tmp_path_factory.mktemp("need"))), "island-0")


Look = Callable[..., dict[str, Check]]


@pytest.fixture
def look(config: RunConfig, need: ProcessPart, listener: GrpcListener) -> Look:
    """Return a function that checks a link; its keyword arguments change the transport.

    With `measured` it also moves bytes for a while; otherwise a gigabyte per second is taken for granted.
    """

    def run(
        name: str = "island-0",
        address: str = "",
        *,
        own: RunConfig = config,
        measured: bool = False,
        **changes: Any,
    ) -> dict[str, Check]:
        transport = dataclasses.replace(own.transport, **changes)
        side = doctor_link.dialled(transport, name, address or listener.address)
        with pytest.MonkeyPatch.context() as patched:
            if not measured:
                patched.setattr(doctor_link, "measure", lambda *_: Rate(1, 1e9))
            return {check.name: check for check in doctor_link.check_link(own, side, need, 0.3)}

    return run


def test_a_good_link_is_good_in_all_points(look: Look) -> None:
    found = look(measured=True)
    expected = {"credentials", "address", "reach", "syncer", "clock", "versions", "throughput", "TCP buffers"}
    assert found.keys() == expected
    assert {check.status for check in found.values()} == {"ok"}, found
    assert "enough for steps of" in found["throughput"].found and "kB up and" in found["throughput"].found


def test_silence_is_a_firewall(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_link, "_dial", lambda *_: TimeoutError("timed out"))
    found = look(address="127.0.0.1:7000")
    assert found["reach"].status == "fail" and "did not answer" in found["reach"].found
    assert "TCP port 7000 through the firewalls" in found["reach"].fix


@pytest.mark.parametrize(
    ("name", "address", "files", "check", "words", "fix"),
    [
        ("island-0", "no-such-host.invalid:7000", "ours", "address", "does not resolve", "correct the name"),
        ("island-0", "127.0.0.1:FREE", "ours", "reach", "nothing listens there", "--listen"),
        ("island-0", "0.0.0.0:7000", "ours", "address", "islands cannot dial it", "--syncer HOST:PORT"),
        ("island-0", "10.0.0.1:0", "ours", "address", "the port is chosen at start", "--syncer HOST:PORT"),
        ("island-9", "", "ours", "credentials", "expired on 2020-01-02", "make a new one"),
        ("island-5", "", "ours", "credentials", "cannot be read", "diloco certs"),
        ("island-0", "", "token", "syncer", "the token is not the syncer's", "transport.token_file"),
        ("island-0", "", "theirs", "handshake", "another authority", "transport.tls_ca"),
    ],
)
def test_what_is_wrong_is_named(
    look: Look, ours: Path, theirs: Path, name: str, address: str, files: str, check: str, words: str, fix: str
) -> None:
    settings = {"ours": {}, "theirs": certificates.settings(theirs), "token": {"token_file": str(ours / "wrong-token")}}
    found = look(name, address.replace("FREE", str(free_port())), **settings[files])
    assert found[check].status == "fail" and words in found[check].found and fix in found[check].fix
    assert check == "syncer" or "syncer" not in found, "what depends on it is not looked at"
    assert look(address="127.0.0.1:0")["address"].status == "warn", "a run on one machine may choose its port"


def test_on_the_syncers_machine_nothing_need_listen_yet(look: Look) -> None:
    assert look("syncer", f"0.0.0.0:{free_port()}")["listen"].status == "ok"
    assert look("syncer")["syncer"].status == "ok"
    with socket.socket() as taken:
        # The port refuses connections, and another process cannot bind it.
        taken.bind(("127.0.0.1", 0))
        found = look("syncer", f"127.0.0.1:{taken.getsockname()[1]}")
    assert found["listen"].status == "fail" and "cannot listen" in found["listen"].found


def test_certificate_that_expires_soon(config: RunConfig, listener: GrpcListener) -> None:
    side = doctor_link.dialled(config.transport, "island-0", listener.address)
    now = datetime.datetime.now(datetime.UTC)
    assert doctor_link.check_credentials(side, now).status == "ok"
    late = doctor_link.check_credentials(side, now + datetime.timedelta(days=360))
    assert late.status == "warn" and "tls_certificate expires first" in late.found and "in 4 days" in late.found


def test_plaintext_away_from_this_machine(config: RunConfig) -> None:
    bare: dict[str, Any] = dict.fromkeys(("tls_ca", "tls_certificate", "tls_key", "token_file"), "")

    def check(address: str, allow: bool) -> Check:
        transport = dataclasses.replace(config.transport, **bare, allow_plaintext=allow)
        return doctor_link.check_credentials(doctor_link.dialled(transport, "island-0", address))

    refused = check("10.0.0.1:7000", False)
    assert refused.status == "fail" and "not loopback" in refused.found
    assert check("10.0.0.1:7000", True).status == "warn" and check("127.0.0.1:7000", False).status == "ok"


def test_another_run(look: Look, config: RunConfig) -> None:
    found = look(own=dataclasses.replace(config, name="other"))
    assert found["syncer"].status == "fail" and "serves run 'small', not 'other'" in found["syncer"].found
    assert "throughput" not in found, "nothing is measured beside a run that is not ours"


def test_settings_that_differ_are_named(look: Look, listener: GrpcListener, need: ProcessPart) -> None:
    listener.desk.settings = lambda: need.settings
    assert look()["settings"].status == "ok"
    listener.desk.settings = lambda: {**need.settings, "seed": "7", "wire": "float32 up, float32 down"}
    found = look()["settings"]
    assert found.status == "fail" and "seed, wire differ; seed is 0 here, 7 there" in found.found


def test_the_frozen_weights_of_an_island_are_compared_with_those_of_the_run(tmp_path: Path) -> None:
    def blueprint(folder: str, seed: int) -> Blueprint:
        model = dataclasses.replace(public(tmp_path / folder, model_of(), seed), lora=LoraConfig(rank=2))
        return Blueprint(model, OptimizerConfig(), MeshConfig(), 1, seed=0)

    right, wrong = blueprint("right", 0), blueprint("wrong", 1)
    run = {BASE_WEIGHTS: base_digest(right)}
    assert doctor_link.check_base(None, run) == []
    (unknown,) = doctor_link.check_base(right, {BASE_WEIGHTS: OPEN})
    assert unknown.status == "ok" and "no island has joined" in unknown.found
    (same,) = doctor_link.check_base(right, run)
    assert same.status == "ok" and str(tmp_path / "right") in same.found
    (other,) = doctor_link.check_base(wrong, run)
    assert other.status == "fail" and run[BASE_WEIGHTS] in other.found and "model.weights" in other.fix
    (forged,) = doctor_link.check_base(wrong, {BASE_WEIGHTS: "x" * 100_000})
    assert forged.status == "fail" and len(forged.found) < 500
    (tmp_path / "wrong" / "config.json").unlink()
    (lost,) = doctor_link.check_base(wrong, run)
    assert lost.status == "fail" and "config.json cannot be read" in lost.found


@pytest.mark.parametrize(("ahead_s", "status"), [(1.0, "ok"), (-90.0, "warn"), (7200.0, "fail")])
def test_skewed_clock(look: Look, monkeypatch: pytest.MonkeyPatch, ahead_s: float, status: str) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(probe, "time", clock)
    found = look()["clock"]
    assert found.status == status, found
    assert ("ahead of" if ahead_s > 0 else "behind") in found.found and (status == "ok" or "NTP" in found.fix)


@pytest.mark.parametrize(("name", "status"), [("numpy", "warn"), ("diloco-jax", "fail")])
def test_other_versions(look: Look, monkeypatch: pytest.MonkeyPatch, name: str, status: str) -> None:
    theirs = probe.versions() | {name: "0.0.1"}
    monkeypatch.setattr(probe, "versions", lambda: theirs)
    found = look()["versions"]
    assert found.status == status and f"{name} " in found.found and "0.0.1 there" in found.found
    # Versions that agree are not listed.
    assert "python" not in found.found


def test_a_syncer_that_knows_no_doctor(look: Look, config: RunConfig) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    credentials = security.credentials(config.transport, "syncer").server
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    found = look(address=f"127.0.0.1:{port}")["syncer"]
    server.stop(0)
    assert "does not know" in found.found and "same version" in found.fix


def test_throughput_of_a_slow_link(look: Look, listener: GrpcListener) -> None:
    """Measure a link of 4 Mbit/s up and 8 Mbit/s down."""
    with Relay(listener.address) as relay:
        # Each of the four connections has this rate.
        relay.change("up", bytes_per_s=125_000.0)
        relay.change("down", bytes_per_s=250_000.0)
        found = look(address=relay.address, measured=True)["throughput"]
    words = found.found.replace(",", "").split()
    up, down = float(words[1]), float(words[4])
    assert 1 < up < 10 and 2 < down < 20 and words[2] == words[5] == "Mbit/s", found


def test_a_run_whose_model_the_loops_bring(
    tmp_path: Path, config: RunConfig, listener: GrpcListener, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    own = RunConfig(name=config.name, model=ModelConfig(module=OWN), transport=config.transport)
    path.write_text(dump(own), encoding="utf-8")
    words = ["doctor", str(path), "--run-dir", str(tmp_path), "--island", "island-0", "--seconds", "0.2", "--json"]
    assert cli.main([*words, "--syncer", listener.address]) == 0
    checks = {check["name"]: check["found"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks.keys() >= {"config", "syncer", "throughput", "memory", "disk", "environment", "open files"}
    assert "a model that the islands' loops bring" in checks["config"] and "data" not in checks
    desk = ModelDesk(dataclasses.replace(config.transport, address="127.0.0.1:0"), Description("", ""), lambda _: 0)
    try:
        assert cli.main([*words, "--syncer", desk.address]) == 0
    finally:
        desk.close()
    assert "waits for the first island, which sends the model" in capsys.readouterr().out


def test_listen_answers_doctors_and_no_learner(config: RunConfig, look: Look) -> None:
    port = free_port()
    transport = dataclasses.replace(config.transport, address=f"127.0.0.1:{port}")
    with listening(dataclasses.replace(config, transport=transport)) as address:
        assert address == transport.address
        assert look(address=transport.address, measured=True)["throughput"].status == "ok"
        with pytest.raises(TransportError, match="refused 'island-0'"):
            grpc_link.connect(transport, run_id=config.name, learner_id="island-0", incarnation=1)
    assert look(address=transport.address)["reach"].status == "fail"
    with pytest.raises(ValueError, match="--listen needs a port"), listening(config):
        pass


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals that a command replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_listens_until_it_is_interrupted(
    tmp_path: Path,
    config: RunConfig,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transport = dataclasses.replace(config.transport, address=f"127.0.0.1:{free_port()}")
    path = tmp_path / "listen.yaml"
    path.write_text(dump(dataclasses.replace(config, transport=transport)), encoding="utf-8")
    stops, heard, stop_on_signals = list[threading.Event](), list[Greeting](), signals.stop_on_signals

    def stop_on_recorded_signals() -> threading.Event:
        stops.append(stop_on_signals())
        return stops[0]

    monkeypatch.setattr(signals, "stop_on_signals", stop_on_recorded_signals)

    def ask() -> None:
        try:
            heard.append(greet(transport, "island-0"))
            # The command answers, so it handles signals.
            os.kill(os.getpid(), signal.SIGINT)
        except Exception:
            for stop in stops:
                stop.set()
            raise

    asking = threading.Thread(target=ask)
    asking.start()
    assert cli.main(["doctor", str(path), "--listen"]) == 0
    asking.join()
    assert f"answering `diloco doctor` at {transport.address} until Ctrl-C" in capsys.readouterr().out
    assert [(each.run_id, each.settings["sequence length"]) for each in heard] == [("small", "32")]


def test_the_command_prints_every_check_and_fails_with_one(
    tmp_path: Path, config: RunConfig, listener: GrpcListener, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "doctor.yaml"
    path.write_text(dump(config), encoding="utf-8")
    words = ["doctor", str(path), "--run-dir", str(tmp_path), "--island", "island-0", "--seconds", "0.2"]
    assert cli.main([*words, "--syncer", listener.address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["ok"]
        and told["verdict"].startswith("ready")
        and told["checks"][0].keys() == {"name", "status", "found", "fix"}
    )
    names = {check["name"] for check in told["checks"]}
    assert names >= {
        "config",
        "accelerators",
        "syncer",
        "throughput",
        "data",
        "memory",
        "disk",
        "environment",
        "open files",
    }
    assert cli.main([*words, "--syncer", f"127.0.0.1:{free_port()}", "--data.path", str(tmp_path / "none")]) == 1
    table = capsys.readouterr().out
    assert table.count("FAIL") == 2 and "nothing listens there" in table and "does not exist" in table
    assert table.splitlines()[-1] == "verdict: not ready: 2 checks failed (reach, data); the fixes are above"
    assert cli.main([*words, "--seconds", "0"]) == cli.WRONG_INPUT
    assert cli.main(["doctor", str(tmp_path / "no.yaml")]) == cli.WRONG_INPUT
    assert "--seconds is 0.0" in capsys.readouterr().err


def test_without_a_config_it_checks_this_machine_for_the_quickstart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--run-dir", str(tmp_path / "run"), "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["config"]["found"].startswith("run 'quickstart', 4 islands, ")
    assert checks["config"]["found"].endswith("checked for the syncer and all islands")
    assert checks["address"]["status"] == checks["accelerators"]["status"] == "ok"
    assert told["verdict"].startswith("ready" if told["ok"] else "not ready: ") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ("ok ok", "ready: all 2 checks passed"),
        ("ok warn warn", "ready, with 2 warnings (1, 2)"),
        ("warn fail ok", "not ready: 1 check failed (1); the fixes are above"),
    ],
)
def test_the_verdict_names_what_is_wrong(statuses: str, words: str) -> None:
    checks = [Check(str(n), status, "found") for n, status in enumerate(statuses.split())]
    assert as_dict(checks)["verdict"] == words and describe(checks).splitlines()[-1] == f"verdict: {words}"
