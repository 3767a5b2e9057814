"""Certificates: what `make` writes, and that every defect of a file is found and named before it is used."""

import dataclasses
import datetime
import logging
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_jax.transport import trust
from diloco_jax.transport.link import TransportConfig, check_name
from diloco_jax.transport.trust import certificates
from diloco_jax.transport.trust.certificates import Defect, make, settings
from diloco_jax.transport.trust.security import credentials, valid_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "certs"
    make(made, ["island-0", "island-1"], days=30)
    return made


def read(folder: Path, name: str) -> x509.Certificate:
    return certificates.parse_certificates((folder / f"{name}.pem").read_bytes())[0]


def test_files_modes_and_what_the_certificates_say(folder: Path) -> None:
    names = ["ca", "syncer", "island-0", "island-1"]
    files = {f"{name}.{kind}" for name in names for kind in ("pem", "key")} | {"token"}
    assert {path.name for path in folder.iterdir()} == files
    for name in files:
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        assert mode & 0o077 == 0 if not name.endswith(".pem") else mode & 0o022 == 0, f"{name} has mode {mode:o}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len((folder / "token").read_text().strip()) >= 32
    now = datetime.datetime.now(datetime.UTC)
    for name in names[1:]:
        certificate = read(folder, name)
        certificates.check_owner(certificate, name)
        certificates.check_issued([certificate], [read(folder, "ca")])
        assert datetime.timedelta(days=29) < certificate.not_valid_after_utc - now < datetime.timedelta(days=31)
        hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = ["syncer.diloco" if name == "syncer" else f"{name}.island.diloco"]
        assert hosts.get_values_for_type(x509.DNSName) == dns, "learners must not pose as the syncer"
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_nothing_is_overwritten_and_a_learner_can_be_added(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = make(folder, ["island-1", "late"])
    assert sorted(path.name for path in made.written) == ["late.key", "late.pem"]
    assert {path.name for path in made.kept} == set(before) - {"island-0.pem", "island-0.key"}
    assert {name: (folder / name).read_bytes() for name in before} == before
    certificates.check_issued([read(folder, "late")], [read(folder, "ca")])


def test_certificates_about_to_expire_are_signed_again_for_the_same_keys(tmp_path: Path) -> None:
    make(tmp_path, ["old"], days=10)
    make(tmp_path, ["new"], days=300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    made = make(tmp_path, ["old", "new"], renew_days=30)
    assert sorted(path.name for path in made.written) == ["old.pem", "syncer.pem"]
    changed = {name for name in before if (tmp_path / name).read_bytes() != before[name]}
    assert changed == {"old.pem", "syncer.pem"} and len(made.kept) == len(before) - 2
    certificates.check_key((tmp_path / "old.key").read_bytes(), read(tmp_path, "old"))
    certificates.check_issued([read(tmp_path, "old")], [read(tmp_path, "ca")])
    left = read(tmp_path, "old").not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=364) < left
    with pytest.raises(ValueError, match="--renew is 365: use 0 to 364"):
        make(tmp_path, [], renew_days=365)


def test_certificates_end_with_their_authority(folder: Path) -> None:
    make(folder, ["longest"], days=certificates.CA_DAYS)
    assert read(folder, "longest").not_valid_after_utc <= read(folder, "ca").not_valid_after_utc


def test_half_a_pair_or_a_foreign_authority_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, [])
    (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"ca\.pem is there but .*ca\.key is not: bring it back"):
        make(tmp_path, ["a"])
    foreign = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    pem = foreign.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (tmp_path / "ca.key").write_bytes(pem)
    with pytest.raises(ValueError, match=r"ca\.key is not the key of the certificate"):
        make(tmp_path, ["a"])
    assert not (tmp_path / "a.pem").exists()


@pytest.mark.parametrize(
    ("learners", "days", "reason"),
    [
        (["a"], 0, "--days is 0: use 1 to 3650"),
        (["../a"], 1, "is not allowed"),
        (["syncer"], 1, "none of syncer"),
        (["syncer.diloco"], 1, "is not allowed"),
        (["a"] * 4097, 1, "4097 learners were named, the limit is 4096"),
    ],
)
def test_wrong_input(tmp_path: Path, learners: list[str], days: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(tmp_path / "new", learners, days=days)
    assert not (tmp_path / "new").exists()


def test_without_the_package_an_error_names_setting_package_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["a"])
    encrypted = TransportConfig(**settings(tmp_path))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, certificates.__name__)
    monkeypatch.delattr(trust, "certificates")
    told = r"transport\.tls_ca, `diloco certs`.*the package cryptography, .* run pip install -e '\.\[tls\]'"
    with pytest.raises(ValueError, match=told):
        credentials(encrypted, "a")
    with pytest.raises(ValueError, match=told):
        valid_until(encrypted, "a")
    assert credentials(TransportConfig(), "a").token == b"", "plaintext needs no package"


def test_names_for_which_a_certificate_speaks() -> None:
    names = certificates.learner_names
    assert names("cn", [], []) == {"cn"}
    assert names("cn", ["a"], ["diloco://learner/b", "https://x"]) == {"a", "b"}, "the CN counts only without others"
    assert names("cn", [], ["spiffe://x/y"]) == {"cn"}
    assert names("cn", [], ["diloco://subscriber/r"]) == {"subscriber/r"}, "no learner has a name with a slash"


def test_the_certificate_of_a_subscriber_keeps_its_role(tmp_path: Path) -> None:
    make(tmp_path, ["a"], ["reader"], days=10)
    reader = read(tmp_path, "reader")
    certificates.check_owner(reader, "reader")
    with pytest.raises(Defect, match="belongs to 'subscriber/reader', not to 'a'"):
        certificates.check_owner(reader, "a")
    with pytest.raises(Defect, match=r"lacks the DNS name 'reader\.island\.diloco'"):
        certificates.check_serves(reader, "reader.island.diloco")
    # An earlier release reads the common name alone.
    (common,) = reader.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    with pytest.raises(ValueError, match="is not allowed"):
        check_name(str(common.value))
    before = (tmp_path / "reader.pem").read_bytes()
    for learners, subscribers, reason in (
        (["reader"], [], r"reader\.pem is the certificate of a subscriber: name it with --subscribers"),
        ([], ["a"], r"a\.pem is the certificate of a learner: name it with --learners"),
        (["b"], ["b"], "'b' is the name of a learner and of a subscriber"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(tmp_path, learners, subscribers, renew_days=30)
    assert (tmp_path / "reader.pem").read_bytes() == before
    made = make(tmp_path, [], ["reader"], renew_days=30)
    assert tmp_path / "reader.pem" in made.written and (tmp_path / "reader.pem").read_bytes() != before
    names = read(tmp_path, "reader").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["diloco://subscriber/reader"]


def config(folder: Path, **changes: str) -> TransportConfig:
    return dataclasses.replace(TransportConfig(**settings(folder)), **changes)


def test_good_files_of_learner_and_syncer(folder: Path) -> None:
    token = (folder / "token").read_bytes().strip()
    for name in ("syncer", "island-0"):
        own = credentials(config(folder), name)
        assert own.token == token and own.metadata == (("diloco-token-bin", token),)
        assert own.options == (("grpc.ssl_target_name_override", "syncer.diloco"),)
    assert credentials(config(folder, address="10.0.0.1:5"), "island-0"), "TLS needs no permission to leave the machine"


def test_every_file_that_will_not_do_is_named_with_its_setting(folder: Path, tmp_path: Path) -> None:
    bad = {"noise": b"-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n", "large": bytes((1 << 20) + 1)}
    bad |= {"empty": b" \n", "long": b"x" * 4097}
    key = serialization.load_pem_private_key((folder / "island-0.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"password")
    bad["locked"] = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for setting, name, reason in (
        (
            "tls_ca",
            "missing",
            r"cannot be read: No such file or directory; correct the path, or copy this machine",
        ),
        ("tls_ca", "noise", "holds no readable certificate"),
        ("tls_ca", "empty", "holds no readable certificate"),
        ("tls_ca", "large", "has more than 1048576 bytes: is it the right file"),
        ("tls_certificate", "missing", "cannot be read"),
        ("tls_certificate", "noise", "holds no readable certificate"),
        ("tls_key", "missing", "cannot be read"),
        ("tls_key", "noise", "holds no readable private key"),
        ("tls_key", "locked", "is protected by a password"),
        ("tls_key", "island-1.key", "is not the key of the certificate"),
        ("token_file", "missing", "cannot be read"),
        ("token_file", "empty", "is empty: write a secret into it"),
        ("token_file", "long", "has more than 4096 bytes"),
    ):
        path = folder / "island-1.key" if "island-1" in name else tmp_path / name
        with pytest.raises(ValueError, match=rf"transport\.{setting} {path} {reason}"):
            credentials(config(folder, **{setting: str(path)}), "island-0")


def test_all_or_none_of_the_files() -> None:
    with pytest.raises(ValueError, match=r"transport\.tls_key is empty: set tls_ca, tls_certificate and tls_key, or"):
        TransportConfig(tls_ca="ca", tls_certificate="x")
    with pytest.raises(ValueError, match=r"transport\.tls_ca is empty"):
        TransportConfig(tls_key="x")


def test_chain_must_be_in_order(folder: Path) -> None:
    one, ca = read(folder, "island-0"), read(folder, "ca")
    certificates.check_issued([one, ca], [ca])
    with pytest.raises(Defect, match="did not sign one another"):
        certificates.check_issued([ca, one], [ca])


def test_certificate_of_tomorrow(folder: Path) -> None:
    with pytest.raises(Defect, match=r"is valid from .* on: is this clock right"):
        certificates.check_dates(read(folder, "ca"), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))


def test_key_that_others_can_read_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "open.key"
    path.write_bytes((folder / "island-0.key").read_bytes())
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        credentials(config(folder, tls_key=str(path)), "island-0")
    assert f"tls_key {path} can be read by others" in caplog.text


def test_token_without_encryption_is_not_a_protection(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = TransportConfig(address="10.0.0.1:5", token_file=str(folder / "token"))
    with pytest.raises(ValueError, match=r"nothing would be encrypted \(the token alone does not change that"):
        credentials(plain, "a")
    with caplog.at_level(logging.WARNING):
        credentials(dataclasses.replace(plain, allow_plaintext=True), "a")
    assert "anyone who can read the traffic learns the token" in caplog.text
