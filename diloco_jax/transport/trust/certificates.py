"""X.509 certificates: create them for a small run, and check given ones before they are used.

Names in a certificate
  * The syncer's certificate names the host `syncer.diloco` (SAN, DNS).
  * A learner's certificate names the learner (SAN: the URI diloco://learner/NAME, or the DNS name NAME; without either,
    the CN) and the host `NAME.island.diloco` (SAN, DNS). The leader of an island serves its other hosts by that name.
  * A subscriber's certificate names the subscriber alone (SAN: the URI diloco://subscriber/NAME). It is for clients.
Clients and servers may use the first two. A learner's certificate does not name the syncer's host, so no learner can
pose as the syncer. A subscriber's certificate represents no learner, so its owner can only follow the run's model.
"""

import datetime
import itertools
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.releases import install_hint
from diloco_jax.transport.link import ISLAND_HOSTS, SUBSCRIBER, SYNCER_HOST, check_name
from diloco_jax.transport.trust.names import LEARNER_URI, SUBSCRIBER_URI, Defect, OutOfDate, learner_names

# Only runs with certificates import this module, and only they need the package.
try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ValueError(
        "certificates (transport.tls_ca, `diloco certs`) need the package cryptography, which is not installed; "
        f"{install_hint('tls')}"
    ) from error

CA_FILE, TOKEN_FILE = "ca.pem", "token"
CA_DAYS = 3650
LEARNERS_MAX = 4096
UNUSED = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)
# A machine whose clock is late still accepts a new certificate.
CLOCK_SKEW = datetime.timedelta(hours=1)

Key: TypeAlias = ec.EllipticCurvePrivateKey
Pair: TypeAlias = tuple[Key, x509.Certificate]


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM file, each followed by its issuer; Defect if none can be read."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise Defect(f"holds no readable certificate ({_first_line(error)})") from None


def check_key(pem: bytes, certificate: x509.Certificate) -> None:
    """Check that a PEM file holds the certificate's private key without a password; Defect if it does not."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except TypeError:
        raise Defect("is protected by a password, and nobody is there to type it: store the key without one") from None
    except ValueError as error:
        raise Defect(f"holds no readable private key ({_first_line(error)})") from None
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise Defect("is not the key of the certificate")


def check_dates(certificate: x509.Certificate, now: datetime.datetime) -> None:
    """Check that the certificate is valid now; OutOfDate if it has expired, or is not valid yet."""
    if now > certificate.not_valid_after_utc:
        raise OutOfDate(f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: make a new one")
    if now < certificate.not_valid_before_utc:
        raise OutOfDate(f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: is this clock right?")


def check_issued(chain: Sequence[x509.Certificate], authorities: Iterable[x509.Certificate]) -> None:
    """Check that the next certificate signed each of the chain, and an authority the last; Defect if not."""
    for certificate, issuer in itertools.pairwise(chain):
        if not _issued(certificate, issuer):
            raise Defect("holds certificates that did not sign one another in the order of the file")
    last = chain[-1]
    if not any(_issued(last, authority) for authority in authorities):
        raise Defect(f"was not signed by the authority, but by {last.issuer.rfc4514_string()[:200]!r}")


def check_owner(certificate: x509.Certificate, name: str) -> None:
    """Check that the certificate represents the learner, subscriber or syncer of this name; Defect if not."""
    dns, uris = _alternatives(certificate)
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    known = learner_names(str(common[0].value) if common else "", dns, uris)
    wanted = SYNCER_HOST if name == SYNCER else name
    if wanted not in known and SUBSCRIBER + wanted not in known:
        raise Defect(f"belongs to {', '.join(sorted(known))[:200]!r}, not to {wanted!r}")


def _alternatives(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    """Return the DNS names and the URIs of a certificate; Defect if they cannot be read."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.DNSName), names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        return [], []
    except ValueError as error:
        raise Defect(f"has unreadable extensions ({_first_line(error)})") from None


def check_serves(certificate: x509.Certificate, host: str) -> None:
    """Check that an island's leader can serve its other hosts with this certificate; Defect if not."""
    remedy = "the hosts of an island need that of theirs: make a new one with `diloco certs`"
    lacking = "subjectAltName"
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        lacking = "extendedKeyUsage"
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        raise Defect(f"has no {lacking}; {remedy}") from None
    if host not in names.get_values_for_type(x509.DNSName):
        raise Defect(f"lacks the DNS name {host!r}; {remedy}")
    if ExtendedKeyUsageOID.SERVER_AUTH not in uses:
        raise Defect(f"is for clients only; {remedy}")


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _public_bytes(key: object) -> bytes:
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(*form))  # type: ignore[attr-defined]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Made(NamedTuple):
    """Files that `make` wrote or renewed, and existing files that it kept."""

    written: list[Path]
    kept: list[Path]


def make(
    folder: Path, learners: Sequence[str], subscribers: Sequence[str] = (), *, days: int = 365, renew_days: int = 0
) -> Made:
    """Create an authority, a token and certificates, except for those that exist.

    Args:
        learners: Names of learners, which train.
        subscribers: Names of subscribers, which may only follow the model.
        days: Validity of the certificates in days; the authority is valid for ten years.
        renew_days: A certificate with less remaining days is signed again for its key; 0 renews none.

    Raises:
        ValueError: A name or `days` is not allowed, half of a certificate's two files is missing, or a certificate
            of that name is for the other role.
        OSError: A file cannot be read or written.
    """
    if not 1 <= days <= CA_DAYS:
        raise ValueError(f"--days is {days}: use 1 to {CA_DAYS}")
    if not 0 <= renew_days < days:
        raise ValueError(f"--renew is {renew_days}: use 0 to {days - 1}, less than --days")
    if len(learners) > LEARNERS_MAX:
        raise ValueError(f"{len(learners)} learners were named, the limit is {LEARNERS_MAX}: call it several times")
    for name in (*learners, *subscribers):
        check_name(name)
    if both := sorted({*learners} & {*subscribers}):
        raise ValueError(f"{both[0]!r} is the name of a learner and of a subscriber: give each its own")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Made([], [])
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    if not _kept(folder, "ca", made):
        # The random part tells two authorities apart.
        name = f"diloco test authority {secrets.token_hex(4)}"
        _write_pair(folder, "ca", _new_pair(name, None, now, now + datetime.timedelta(days=CA_DAYS)), made)
    authority = _read_pair(folder)
    until = min(now + datetime.timedelta(days=days), authority[1].not_valid_after_utc)
    for name in dict.fromkeys((SYNCER, *learners, *subscribers)):
        owner = SUBSCRIBER + name if name in subscribers else name
        if not _kept(folder, name, made):
            _write_pair(folder, name, _new_certificate(owner, authority, now, until), made)
            continue
        _check_role(folder / f"{name}.pem", owner)
        if renew_days and _read_pair(folder, name)[1].not_valid_after_utc < now + datetime.timedelta(days=renew_days):
            made.written.append(renew(folder, owner, now, until))
            made.kept.remove(made.written[-1])
    token = folder / TOKEN_FILE
    if token.exists():
        made.kept.append(token)
    else:
        _write(token, secrets.token_urlsafe(32).encode() + b"\n", 0o600, made)
    return made


def _check_role(path: Path, owner: str) -> None:
    """Check that an existing certificate is not for the other role; ValueError if it is."""
    try:
        _, uris = _alternatives(parse_certificates(path.read_bytes())[0])
    except Defect as error:
        raise ValueError(f"{path} {error}") from None
    ours, theirs = owner.startswith(SUBSCRIBER), any(uri.startswith(SUBSCRIBER_URI) for uri in uris)
    if ours != theirs:
        is_of, option = ("a subscriber", "--subscribers") if theirs else ("a learner", "--learners")
        raise ValueError(f"{path} is the certificate of {is_of}: name it with {option}, or choose another name")


def renew(folder: Path, owner: str, now: datetime.datetime, until: datetime.datetime) -> Path:
    """Sign a certificate again for its key, and replace the file at once: readers find the old or the new one."""
    name = owner.removeprefix(SUBSCRIBER)
    key, _ = _read_pair(folder, name)
    _, certificate = _new_certificate(owner, _read_pair(folder), now, until, key)
    beside = folder / f"{name}.new"
    beside.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return beside.replace(folder / f"{name}.pem")


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of section `transport` for the folder's files; each process replaces "{name}".

    The paths start like `folder`. So a relative folder gives settings for every machine that has a copy of it.
    """
    return {
        "tls_ca": str(folder / CA_FILE),
        "tls_certificate": str(folder / "{name}.pem"),
        "tls_key": str(folder / "{name}.key"),
        "token_file": str(folder / TOKEN_FILE),
    }


def describe(folder: Path, made: Made) -> str:
    """Describe in words what `make` did and how to use it."""
    lines = [f"wrote {path}" for path in made.written] + [f"kept  {path}" for path in made.kept]
    lines += ["", "in the config of every process ({name} stands for the name of the process):", "", "transport:"]
    lines += [f"  {key}: {json.dumps(value)}" for key, value in settings(folder).items()]
    lines += ["", "other machines need ca.pem, token, NAME.pem and NAME.key; ca.key stays here"]
    below = "" if folder.is_absolute() else ", below the folder where the process starts"
    return "\n".join([*lines, f"copy them into {folder} there{below}"])


def _kept(folder: Path, name: str, made: Made) -> bool:
    """Tell whether the certificate and its key exist; ValueError if only one of them does."""
    pair = [folder / f"{name}.key", folder / f"{name}.pem"]
    there = [path for path in pair if path.exists()]
    if len(there) == 1:
        (missing,) = set(pair) - set(there)
        raise ValueError(f"{there[0]} is there but {missing} is not: bring it back, or remove the other one too")
    made.kept.extend(there)
    return bool(there)


def _new_certificate(
    owner: str, authority: Pair, now: datetime.datetime, until: datetime.datetime, key: Key | None = None
) -> Pair:
    """Create the certificate of the syncer, of a learner, or of a subscriber (`subscriber/NAME`)."""
    uses, names = [ExtendedKeyUsageOID.CLIENT_AUTH], list[x509.GeneralName]()
    if owner.startswith(SUBSCRIBER):
        names.append(x509.UniformResourceIdentifier(SUBSCRIBER_URI + owner.removeprefix(SUBSCRIBER)))
        # A release that does not know this URI reads the common name, and no learner can have this one.
        common_name = SUBSCRIBER
    else:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names.append(x509.DNSName(SYNCER_HOST if owner == SYNCER else owner + ISLAND_HOSTS))
        common_name = owner
        if owner != SYNCER:
            names.append(x509.UniformResourceIdentifier(LEARNER_URI + owner))
    extensions = (
        x509.ExtendedKeyUsage(uses),
        x509.SubjectAlternativeName(names),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[0].public_key()),
    )
    return _new_pair(common_name, authority, now, until, extensions, key)


def _new_pair(
    common_name: str,
    authority: Pair | None,
    now: datetime.datetime,
    until: datetime.datetime,
    extensions: Sequence[x509.ExtensionType] = (),
    key: Key | None = None,
) -> Pair:
    """Create a certificate that the authority signs, and a key if none is given; without an authority, create one."""
    key, is_authority = key or ec.generate_private_key(ec.SECP256R1()), authority is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    ca_key, issuer = (key, subject) if authority is None else (authority[0], authority[1].subject)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(UNUSED, False),
    )
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(until)
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    builder = builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)
    for each in (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), *extensions):
        builder = builder.add_extension(each, critical=False)
    return key, builder.sign(ca_key, hashes.SHA256())


def _read_pair(folder: Path, name: str = "ca") -> Pair:
    path = folder / f"{name}.pem"
    try:
        certificate = parse_certificates(path.read_bytes())[0]
        if name == "ca":
            check_dates(certificate, datetime.datetime.now(datetime.UTC))
        path = folder / f"{name}.key"
        check_key(path.read_bytes(), certificate)
    except Defect as error:
        raise ValueError(f"{path} {error}") from None
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, Key):
        raise ValueError(f"{path} was not made by `diloco certs`: use another folder, or your own tools")
    return key, certificate


def _write_pair(folder: Path, name: str, pair: Pair, made: Made) -> None:
    key, certificate = pair
    plain = serialization.NoEncryption()
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    _write(folder / f"{name}.key", key_pem, 0o600, made)
    _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644, made)


def _write(path: Path, content: bytes, mode: int, made: Made) -> None:
    """Write a new file; FileExistsError if another process created it at the same time."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    made.written.append(path)
