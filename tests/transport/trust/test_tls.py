"""Certificates and tokens over real connections: the syncer serves their owners, and names the remedy to others."""

import dataclasses
import datetime
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from diloco_jax.protocol.messages import Advance, FragmentValue
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import SYNCER_HOST, TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.calls import DaemonThreads, ask_operator, ask_status
from diloco_jax.transport.session.front import NO_CERTIFICATE, PLAIN, TLS
from diloco_jax.transport.session.operator_requests import ADMIT, BAN, DRAIN, OperatorRequest
from diloco_jax.transport.session.refusals import REFUSALS
from diloco_jax.transport.trust import certificates, security
from diloco_jax.transport.trust.security import credentials, diagnose, is_loopback
from tests.limits import HANGS_S
from tests.transport.ends import CONFIG, Ends, comes_true, greet, hear

pytestmark = pytest.mark.net
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the certificates of one run; two of them have expired, and one learner poses as the syncer."""
    folder = tmp_path_factory.mktemp("ours")
    made = certificates.make(folder, ["island-0", "island-1"])
    authority, day = certificates._read_pair(folder), datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    for file, name, begin in (
        ("island-9", "island-9", PAST),
        ("old-syncer", "syncer", PAST),
        ("named-like-the-syncer", SYNCER_HOST, now),
    ):
        pair = certificates._new_certificate(name, authority, begin, begin + day)
        certificates._write_pair(folder, file, pair, made)
    (folder / "wrong-token").write_text("not the run's")
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make certificates of another authority with the same names."""
    folder = tmp_path_factory.mktemp("theirs")
    certificates.make(folder, ["island-0"])
    return folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the reason early, and give the check the time that a loaded machine needs."""
    monkeypatch.setattr(grpc_link, "PATIENCE_S", 0.1)
    monkeypatch.setattr(security, "PROBE_TIMEOUT_S", HANGS_S)


class Run:
    """Ends of connections that have the files of a run."""

    def __init__(self, ends: Ends, folder: Path) -> None:
        self._ends, self._folder = ends, folder
        self.listener = self.listen()

    def listen(self, **changes: Any) -> GrpcListener:
        return self._ends.listen(**certificates.settings(self._folder) | changes)

    def as_(self, name: str = "{name}", folder: Path | None = None, **changes: Any) -> dict[str, Any]:
        """Return the settings of the owner of the certificate with this name, from this authority or another."""
        folder = folder or self._folder
        files = {"tls_certificate": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}
        return {"address": self.listener.address, **certificates.settings(folder), **files, **changes}

    def config(self, name: str = "{name}", **changes: Any) -> TransportConfig:
        return dataclasses.replace(CONFIG, **self.as_(name, **changes))

    def connect(self, learner_id: str = "island-0", name: str = "{name}", **changes: Any) -> GrpcLink:
        return self._ends.connect(learner_id, **self.as_(name, **changes))

    def meet(self, learner_id: str = "island-0") -> GrpcLink:
        link = self.connect(learner_id)
        greet(self.listener, link, learner_id)
        return link


@pytest.fixture
def run(ends: Ends, ours: Path) -> Run:
    return Run(ends, ours)


def believe(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Switch off the checks of local files: other code may lack them, and the other side must notice by itself."""
    for name in names:
        monkeypatch.setattr(certificates, name, lambda *_: None)


def test_the_right_certificates_and_token_are_served(run: Run) -> None:
    for name in ("island-0", "island-1"):
        link = run.connect(name)
        link.send(FragmentValue(name, 0, 1, 0, 9, 9, 9, 0, 9, 100_000), b"x" * 100_000)
        delivery = hear(run.listener)
        assert (delivery.peer, delivery.payload) == (name, b"x" * 100_000)
        assert run.listener.send(name, Advance(1)) and hear(link).message == Advance(1)


def test_one_address_or_another_the_syncer_is_known_by_its_certificate(run: Run) -> None:
    # The link is encrypted and needs no allow_plaintext.
    listener = run.listen(address="0.0.0.0:0")
    port = listener.address.rpartition(":")[2]
    for host in ("localhost", "127.0.0.1"):
        run.connect(address=f"{host}:{port}")


def test_certificate_of_another_learner_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"transport\.tls_certificate .*island-1\.pem belongs to 'island-1', not to"):
        run.connect(name="island-1")
    believe(monkeypatch, "check_owner")
    with pytest.raises(TransportError, match=r"refused 'island-0': the certificate is that of 'island-1': set trans"):
        run.connect(name="island-1")
    assert run.listener.receive(0) is None


def test_the_syncers_certificate_is_not_a_learners(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, "check_owner")
    monkeypatch.setattr(grpc_link, "check_name", lambda name: name)
    with pytest.raises(TransportError, match=r"refused 'island-0': the certificate is that of 'syncer\.diloco'"):
        run.connect(name="syncer")
    with pytest.raises(TransportError, match=r"refused 'syncer.diloco': learner_id 'syncer\.diloco' is not allowed"):
        run.connect(SYNCER_HOST, name="syncer")


def test_learner_of_another_authority_is_refused(
    run: Run, ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = {"folder": theirs, "tls_ca": str(ours / "ca.pem")}
    with pytest.raises(ValueError, match=r"tls_certificate .*island-0\.pem was not signed by the authority.*tls_ca is"):
        run.connect(**mixed)
    believe(monkeypatch, "check_issued")
    with pytest.raises(TransportError, match=r"the syncer did not accept our certificate: .*transport\.tls_ca"):
        run.connect(**mixed)


def test_syncer_of_another_authority_is_not_believed(run: Run, theirs: Path) -> None:
    with pytest.raises(TransportError, match=r"signed by another authority .*: set transport\.tls_ca"):
        run.connect(folder=theirs)
    assert run.listener.receive(0) is None


def test_expired_certificates_are_refused_by_both_sides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    syncer = run.as_("old-syncer", address="127.0.0.1:0", token_file="")
    # This is not wrong input, because the certificate may be renewed before the next start.
    with pytest.raises(ConnectionError, match=r"tls_certificate .*island-9\.pem expired on 2020-01-02 .* a new one"):
        run.connect("island-9")
    with pytest.raises(ValueError, match=r"tls_certificate .*old-syncer\.pem expired on 2020-01-02"):
        run.listen(**syncer)
    believe(monkeypatch, "check_dates")
    with pytest.raises(TransportError, match=r"did not accept our certificate: by its clock .* may have expired"):
        run.connect("island-9")
    with pytest.raises(TransportError, match=r"the syncer's certificate is out of date \(certificate has expired\)"):
        run.connect(address=run.listen(**syncer).address)


def test_the_syncers_renewed_certificate_counts_for_the_next_connection(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.make(tmp_path, ["island-0"])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    believe(monkeypatch, "check_dates")
    certificates.renew(tmp_path, "syncer", PAST, PAST + day)
    run = Run(ends, tmp_path)
    with pytest.raises(TransportError, match=r"the syncer's certificate is out of date"):
        run.connect()
    certificates.renew(tmp_path, "syncer", now, now + day)
    run.connect()
    (tmp_path / "syncer.pem").write_text("damaged while somebody copies it")
    run.connect()


@pytest.mark.parametrize("poser", ["island-1", "named-like-the-syncer"])
def test_learner_cannot_pose_as_the_syncer(ends: Ends, ours: Path, poser: str) -> None:
    """Check that a learner cannot pose as the syncer, with its certificate or with one that names the syncer."""
    key, chain = ((ours / f"{poser}.{kind}").read_bytes() for kind in ("key", "pem"))
    server = grpc.server(DaemonThreads())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    with pytest.raises(TransportError, match=r"has no syncer's certificate .*: correct transport\.address"):
        ends.connect("island-0", to=f"127.0.0.1:{port}", **certificates.settings(ours))
    server.stop(0)


def test_plaintext_and_tls_do_not_mix(run: Run, ends: Ends) -> None:
    address = run.listener.address
    plain = dataclasses.replace(CONFIG, address=address, connect_timeout_s=0.5)
    for ask in (lambda: ends.connect(to=address), lambda: ask_status(plain)):
        with pytest.raises(TransportError, match=r"the syncer wants TLS: set transport\.tls_ca"):
            ask()
    with pytest.raises(TransportError, match=r"the syncer does not speak TLS: give it transport\.tls_ca"):
        run.connect(address=ends.listen().address)


def test_refused_callers_are_in_the_syncers_log(
    run: Run, ends: Ends, theirs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(REFUSALS, "_pairs", {})
    monkeypatch.setattr(REFUSALS, "_others", 0)
    believe(monkeypatch, "check_owner", "check_issued")

    def refused(**wrong: Any) -> list[str]:
        caplog.clear()
        monkeypatch.setattr(REFUSALS, "_pairs", {})
        with pytest.raises(TransportError):
            run.connect(**wrong)
        comes_true(lambda: any("refused 127.0.0.1" in line for line in caplog.messages))
        return [line for line in caplog.messages if line.startswith("refused ")]

    assert refused(token_file="") == [
        "refused 127.0.0.1: the token was not sent: set transport.token_file to a copy of the file that the syncer was "
        "started with"
    ]
    (line,) = refused(name="island-1")
    assert "the certificate is that of 'island-1': set transport.tls_certificate" in line
    assert refused(folder=theirs, tls_ca=run.as_()["tls_ca"]) == [f"refused 127.0.0.1: {NO_CERTIFICATE}"]
    caplog.clear()
    monkeypatch.setattr(REFUSALS, "_pairs", {})
    monkeypatch.setattr(REFUSALS, "_others", 0)
    with pytest.raises(TransportError):
        ends.connect(to=run.listener.address)
    assert f"refused 127.0.0.1: {PLAIN}" in caplog.messages
    plain = ends.listen().address
    with pytest.raises(TransportError):
        run.connect(address=plain)
    assert f"refused 127.0.0.1: {TLS}" in caplog.messages
    caplog.clear()
    # Callers that only find out whether the port is open, or whether it speaks TLS, are not refused.
    assert diagnose(dataclasses.replace(CONFIG, address=plain), "island-0") == ""
    host, port = run.listener.address.split(":")
    socket.create_connection((host, int(port))).close()
    run.meet()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("token_file", "reason"), [("", "the token was not sent"), ("wrong-token", "the token is not the syncer's")]
)
def test_wrong_or_missing_token_is_refused(run: Run, ours: Path, token_file: str, reason: str) -> None:
    wrong = {"token_file": token_file and str(ours / token_file)}
    config = run.config("syncer", **wrong)
    for ask in (
        lambda: run.connect(**wrong),
        lambda: ask_status(config),
        lambda: ask_operator(config, OperatorRequest(DRAIN, "x")),
    ):
        with pytest.raises(TransportError, match=rf"refused.*: {reason}: set transport\.token_file"):
            ask()
    run.connect()


def test_token_alone_on_loopback(ends: Ends, ours: Path) -> None:
    listener = ends.listen(token_file=str(ours / "token"))
    ends.connect(to=listener.address, token_file=str(ours / "token"))
    with pytest.raises(TransportError, match="the token was not sent"):
        ends.connect(to=listener.address)


def raw_calls(address: str, ours: Path, *, certificate: bool) -> Iterator[grpc.StatusCode]:
    """Return the answers to three calls of a client without a token, and perhaps without a certificate."""
    ca, key, chain = (ours / "ca.pem").read_bytes(), None, None
    if certificate:
        key, chain = (ours / "island-0.key").read_bytes(), (ours / "island-0.pem").read_bytes()
    own = grpc.ssl_channel_credentials(ca, key, chain)
    header = pb.Header(run_id="run", sender="island-0", incarnation=99, session=1, lane=pb.LANE_CONTROL, stripes=1)
    opens = {"metadata": (("diloco-header-bin", header.SerializeToString()),), "timeout": HANGS_S}
    drain = pb.DrainRequest(learner_id="island-0").SerializeToString()
    with grpc.secure_channel(address, own, [("grpc.ssl_target_name_override", SYNCER_HOST)]) as channel:
        for call in (
            lambda: channel.unary_unary("/diloco.v1.Syncer/Status")(b"", timeout=HANGS_S),
            lambda: channel.unary_unary("/diloco.v1.Syncer/Drain")(drain, timeout=HANGS_S),
            lambda: next(channel.stream_stream("/diloco.v1.Syncer/Connect")(iter(()), **opens)),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                call()
            yield raised.value.code()


@pytest.mark.parametrize(
    ("certificate", "code"), [(False, grpc.StatusCode.UNAVAILABLE), (True, grpc.StatusCode.UNAUTHENTICATED)]
)
def test_nothing_without_credentials_and_nobody_is_evicted(
    run: Run, ours: Path, certificate: bool, code: grpc.StatusCode
) -> None:
    run.listener.on_operator = lambda request: "drained"
    healthy = run.meet()
    assert list(raw_calls(run.listener.address, ours, certificate=certificate)) == [code] * 3
    # A call without credentials must not end this session.
    greet(run.listener, healthy, "island-0")
    assert run.listener.send("island-0", Advance(1)) and hear(healthy).message == Advance(1)


def test_who_may_drain_and_ban_whom(run: Run) -> None:
    """A learner may drain only itself; the owner of the syncer's certificate may drain, ban and admit every island."""
    done, stop = list[OperatorRequest](), threading.Event()

    def on_operator(request: OperatorRequest) -> str:
        done.append(request)
        return f"{request.learner_id} leaves"

    def drive() -> None:
        while not stop.is_set():
            run.listener.receive(HANGS_S)

    run.listener.on_operator = on_operator
    driver = threading.Thread(target=drive)
    driver.start()
    asked = [OperatorRequest(DRAIN, "island-0"), OperatorRequest(DRAIN, "island-1"), OperatorRequest(ADMIT, "island-0")]
    assert ask_operator(run.config("island-0"), asked[0]) == (True, "island-0 leaves")
    assert ask_operator(run.config("syncer"), asked[1]) == (True, "island-1 leaves")
    with pytest.raises(TransportError, match=r"certificate is that of 'island-1': .* 'island-0' or that of the syncer"):
        ask_operator(run.config("island-1"), asked[0])
    for request in (OperatorRequest(BAN, "island-1", "x"), asked[2]):
        with pytest.raises(TransportError, match=r"certificate is that of 'island-0': .* to those of 'syncer'$"):
            ask_operator(run.config("island-0"), request)
    assert ask_operator(run.config("syncer"), asked[2]) == (True, "island-0 leaves")
    assert done == asked
    assert ask_status(run.config("island-1")) == "{}"
    stop.set()
    run.listener.wake()
    driver.join(HANGS_S)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:1", True),
        ("[::1]:50051", True),
        ("localhost:80", True),
        ("0.0.0.0:0", False),
        ("[::]:0", False),
        ("10.0.0.1:80", False),
        ("localhost.example.org:80", False),
    ],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_plaintext_needs_loopback_or_permission() -> None:
    public = TransportConfig(address="0.0.0.0:0")
    for use in (
        lambda: credentials(public, "a"),
        lambda: grpc_link.listen(public, run_id="r"),
        lambda: grpc_link.connect(public, run_id="r", learner_id="a", incarnation=0),
    ):
        with pytest.raises(ValueError, match=r"0\.0\.0\.0:0.*allow_plaintext"):
            use()
    assert credentials(TransportConfig(address="0.0.0.0:0", allow_plaintext=True), "a").server is not None
    assert credentials(TransportConfig(), "a").channel is not None
