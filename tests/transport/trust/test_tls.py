"""Certificates and tokens over real connections: who has them is served, whoever has not learns what to change."""

from __future__ import annotations

import dataclasses
import datetime
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from diloco_jax.protocol.messages import Advance, FragmentValue, Heartbeat
from diloco_jax.transport import grpc_link
from diloco_jax.transport.calls import DaemonThreads
from diloco_jax.transport.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import SYNCER_HOST, Delivery, TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.questions import ask_drain, ask_status
from diloco_jax.transport.trust import certificates, security

pytestmark = pytest.mark.net
WAIT_S = 20.0
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one run; island-9's certificate has expired, and old-syncer's too."""
    folder = tmp_path_factory.mktemp("ours")
    made = certificates.make(folder, ["island-0", "island-1"])
    authority = certificates._read_authority(folder)
    later = PAST + datetime.timedelta(days=1)
    certificates._write_pair(
        folder, "island-9", *certificates._new_certificate("island-9", authority, PAST, later), made
    )
    certificates._write_pair(
        folder, "old-syncer", *certificates._new_certificate("syncer", authority, PAST, later), made
    )
    (folder / "wrong-token").write_text("not the run's")
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of another authority, with the same names."""
    folder = tmp_path_factory.mktemp("theirs")
    certificates.make(folder, ["island-0"])
    return folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the reason soon, and take the time that a loaded machine needs."""
    monkeypatch.setattr(grpc_link, "PATIENCE_S", 0.1)
    monkeypatch.setattr(security, "PROBE_TIMEOUT_S", WAIT_S)


def config_of(folder: Path, address: str = "127.0.0.1:0", **changes: Any) -> TransportConfig:
    config = TransportConfig(address=address, connect_timeout_s=WAIT_S, **certificates.settings(folder))
    return dataclasses.replace(config, **changes)


@pytest.fixture
def listener(ours: Path) -> Iterator[GrpcListener]:
    made = grpc_link.listen(config_of(ours), run_id="run")
    yield made
    made.close(1.0)


def connect(config: TransportConfig, learner_id: str = "island-0", incarnation: int = 0) -> GrpcLink:
    return grpc_link.connect(config, run_id="run", learner_id=learner_id, incarnation=incarnation)


def hear(side: GrpcLink | GrpcListener) -> Delivery:
    delivery = side.receive(WAIT_S)
    assert delivery is not None, "nothing came"
    return delivery


def believe(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Switch off checks of our own files, as a peer with other code would: the other side must notice by itself."""
    for name in names:
        monkeypatch.setattr(certificates, name, lambda *_: None)


def test_the_right_certificates_and_token_are_served(listener: GrpcListener, ours: Path) -> None:
    links = {name: connect(config_of(ours, listener.address), name) for name in ("island-0", "island-1")}
    for name, link in links.items():
        link.send(FragmentValue(name, 0, 1, 0, 9, 9, 9, 0, 9, 100_000), b"x" * 100_000)
        delivery = hear(listener)
        assert (delivery.peer, delivery.payload) == (name, b"x" * 100_000)
        assert listener.send(name, Advance(1)) and hear(link).message == Advance(1)
    for link in links.values():
        link.close(1.0)


def test_one_address_or_another_the_syncer_is_known_by_its_certificate(ours: Path) -> None:
    listener = grpc_link.listen(config_of(ours, "0.0.0.0:0"), run_id="run")  # no allow_plaintext: it is encrypted
    port = listener.address.rpartition(":")[2]
    connect(config_of(ours, f"localhost:{port}")).close(1.0)
    connect(config_of(ours, f"127.0.0.1:{port}")).close(1.0)
    listener.close(1.0)


def test_certificate_of_another_learner_is_refused(
    listener: GrpcListener, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen = config_of(
        ours, listener.address, tls_certificate=str(ours / "island-1.pem"), tls_key=str(ours / "island-1.key")
    )
    with pytest.raises(ValueError, match=r"transport\.tls_certificate .*island-1\.pem belongs to 'island-1', not to"):
        connect(stolen)
    believe(monkeypatch, "check_owner")
    with pytest.raises(TransportError, match=r"refused 'island-0': the certificate is that of 'island-1': set trans"):
        connect(stolen)
    assert listener.receive(0) is None


def test_the_syncers_certificate_is_no_learners(
    listener: GrpcListener, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch, "check_owner")
    monkeypatch.setattr(grpc_link, "check_name", lambda name: name)
    posing = config_of(
        ours, listener.address, tls_certificate=str(ours / "syncer.pem"), tls_key=str(ours / "syncer.key")
    )
    with pytest.raises(TransportError, match=r"refused 'island-0': the certificate is that of 'syncer\.diloco'"):
        connect(posing)
    with pytest.raises(TransportError, match=r"refused 'syncer.diloco': learner_id 'syncer\.diloco' is not allowed"):
        connect(posing, SYNCER_HOST)


def test_learner_of_another_authority_is_refused(
    listener: GrpcListener, ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = dataclasses.replace(config_of(theirs, listener.address), tls_ca=str(ours / "ca.pem"))
    with pytest.raises(ValueError, match=r"tls_certificate .*island-0\.pem was not signed by the authority.*tls_ca is"):
        connect(mixed)
    believe(monkeypatch, "check_issued")
    with pytest.raises(TransportError, match=r"the syncer did not accept our certificate: .*transport\.tls_ca"):
        connect(mixed)


def test_syncer_of_another_authority_is_not_believed(listener: GrpcListener, theirs: Path) -> None:
    with pytest.raises(TransportError, match=r"signed by another authority .*: set transport\.tls_ca"):
        connect(config_of(theirs, listener.address))
    assert listener.receive(0) is None


def test_expired_certificates_are_refused_by_both_sides(
    listener: GrpcListener, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = config_of(ours, listener.address)
    syncer = config_of(
        ours, tls_certificate=str(ours / "old-syncer.pem"), tls_key=str(ours / "old-syncer.key"), token_file=""
    )
    with pytest.raises(ValueError, match=r"tls_certificate .*island-9\.pem expired on 2020-01-02 .* make a new one"):
        connect(learner, "island-9")
    with pytest.raises(ValueError, match=r"tls_certificate .*old-syncer\.pem expired on 2020-01-02"):
        grpc_link.listen(syncer, run_id="run")
    believe(monkeypatch, "check_dates")
    with pytest.raises(TransportError, match=r"did not accept our certificate: by its clock .* may have expired"):
        connect(learner, "island-9")
    old = grpc_link.listen(syncer, run_id="run")
    with pytest.raises(TransportError, match=r"the syncer's certificate is out of date \(certificate has expired\)"):
        connect(config_of(ours, old.address))
    old.close(0.1)


@pytest.mark.parametrize("poser", ["island-1.pem", "named-like-the-syncer.pem"])
def test_learner_cannot_pose_as_the_syncer(ours: Path, poser: str) -> None:
    """Not with its own certificate, and not with one whose owner calls itself the syncer."""
    if poser.startswith("named") and not (ours / poser).exists():
        authority = certificates._read_authority(ours)
        now = datetime.datetime.now(datetime.UTC)
        made = certificates._new_certificate(SYNCER_HOST, authority, now, now + datetime.timedelta(days=1))
        certificates._write_pair(ours, poser.removesuffix(".pem"), *made, certificates.Made([], []))
    key, chain = (ours / poser.replace(".pem", ".key")).read_bytes(), (ours / poser).read_bytes()
    server = grpc.server(DaemonThreads())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    with pytest.raises(TransportError, match=r"has no syncer's certificate .*: correct transport\.address"):
        connect(config_of(ours, f"127.0.0.1:{port}"))
    server.stop(0)


def test_plaintext_and_tls_do_not_mix(listener: GrpcListener, ours: Path) -> None:
    plain = TransportConfig(address=listener.address, connect_timeout_s=WAIT_S)
    for ask in (lambda: connect(plain), lambda: ask_status(dataclasses.replace(plain, connect_timeout_s=0.5))):
        with pytest.raises(TransportError, match=r"the syncer wants TLS: set transport\.tls_ca"):
            ask()
    bare = grpc_link.listen(TransportConfig(), run_id="run")
    with pytest.raises(TransportError, match=r"the syncer does not speak TLS: give it transport\.tls_ca"):
        connect(config_of(ours, bare.address))
    bare.close(0.1)


def test_wrong_or_missing_token_is_refused(listener: GrpcListener, ours: Path) -> None:
    right = config_of(ours, listener.address)
    for token_file, reason in (("", "the token was not sent"), ("wrong-token", "the token is not the syncer's")):
        wrong = dataclasses.replace(right, token_file=token_file and str(ours / token_file))
        for ask in (lambda c=wrong: connect(c), lambda c=wrong: ask_status(c), lambda c=wrong: ask_drain(c, "x")):
            with pytest.raises(TransportError, match=rf"refused.*: {reason}: set transport\.token_file"):
                ask()
    connect(right).close(1.0)


def test_token_alone_on_loopback(ours: Path) -> None:
    config = TransportConfig(token_file=str(ours / "token"), connect_timeout_s=WAIT_S)
    listener = grpc_link.listen(config, run_id="run")
    here = dataclasses.replace(config, address=listener.address)
    connect(here).close(1.0)
    with pytest.raises(TransportError, match="the token was not sent"):
        connect(dataclasses.replace(here, token_file=""))
    listener.close(0.1)


def raw_calls(address: str, ours: Path, *, certificate: bool) -> Iterator[grpc.RpcError]:
    """The three calls of a client that has no token, and perhaps no certificate."""
    ca, key, chain = (ours / "ca.pem").read_bytes(), None, None
    if certificate:
        key, chain = (ours / "island-0.key").read_bytes(), (ours / "island-0.pem").read_bytes()
    own = grpc.ssl_channel_credentials(ca, key, chain)
    header = pb.Header(run_id="run", sender="island-0", incarnation=99, session=1, lane=pb.LANE_CONTROL, stripes=1)
    metadata = (("diloco-header-bin", header.SerializeToString()),)
    with grpc.secure_channel(address, own, [("grpc.ssl_target_name_override", SYNCER_HOST)]) as channel:
        calls: list[Callable[[], object]] = [
            lambda: channel.unary_unary("/diloco.v1.Syncer/Status")(b"", timeout=WAIT_S),
            lambda: channel.unary_unary("/diloco.v1.Syncer/Drain")(
                pb.DrainRequest(learner_id="island-0").SerializeToString(), timeout=WAIT_S
            ),
            lambda: next(
                channel.stream_stream("/diloco.v1.Syncer/Connect")(iter(()), metadata=metadata, timeout=WAIT_S)
            ),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as raised:
                call()
            yield raised.value


def test_nothing_without_credentials_and_nobody_is_evicted(listener: GrpcListener, ours: Path) -> None:
    listener.on_drain = lambda name: "drained"
    healthy = connect(config_of(ours, listener.address))
    healthy.send(Heartbeat("island-0", 0))
    assert hear(listener).message == Heartbeat("island-0", 0)
    assert [error.code() for error in raw_calls(listener.address, ours, certificate=False)] == [
        grpc.StatusCode.UNAVAILABLE
    ] * 3
    assert [error.code() for error in raw_calls(listener.address, ours, certificate=True)] == [
        grpc.StatusCode.UNAUTHENTICATED
    ] * 3
    healthy.send(Heartbeat("island-0", 0))
    assert hear(listener).message == Heartbeat("island-0", 0), "a call without credentials must not end a session"
    assert listener.send("island-0", Advance(1)) and hear(healthy).message == Advance(1)
    healthy.close(1.0)


@pytest.fixture
def drained(listener: GrpcListener) -> Iterator[list[str]]:
    """The names that a driver was asked to drain, in order; it runs in a thread of its own."""
    names: list[str] = []
    stop = threading.Event()

    def on_drain(name: str) -> str:
        names.append(name)
        return f"{name} leaves"

    def drive() -> None:
        while not stop.is_set():
            listener.receive(WAIT_S)

    listener.on_drain = on_drain
    driver = threading.Thread(target=drive)
    driver.start()
    yield names
    stop.set()
    listener.wake()
    driver.join(WAIT_S)


def test_who_may_drain_whom(listener: GrpcListener, ours: Path, drained: list[str]) -> None:
    """A learner itself only; the syncer's certificate, that is whoever runs the job, everybody."""

    def as_(name: str) -> TransportConfig:
        files = {"tls_certificate": str(ours / f"{name}.pem"), "tls_key": str(ours / f"{name}.key")}
        return dataclasses.replace(config_of(ours, listener.address), **files)

    assert ask_drain(as_("island-0"), "island-0") == (True, "island-0 leaves")
    assert ask_drain(config_of(ours, listener.address), "island-1") == (True, "island-1 leaves")
    with pytest.raises(TransportError, match=r"certificate is that of 'island-1': .* 'island-0' or that of the syncer"):
        ask_drain(as_("island-1"), "island-0")
    assert drained == ["island-0", "island-1"]
    assert ask_status(as_("island-1")) == "{}"
