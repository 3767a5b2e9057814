"""Protection of every connection, and permissions of its caller (docs/security.md).

Three kinds of connection
  * plaintext, on loopback or by explicit permission;
  * plaintext with a token: callers without the token are refused, but the traffic is readable;
  * mutual TLS, with or without a token: encrypted, and both sides prove their identity.
"""

import base64
import datetime
import hmac
import ipaddress
import logging
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import grpc
import grpc.experimental

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.transport.link import (
    ISLAND_HOSTS,
    SUBSCRIBER,
    SYNCER_HOST,
    TransportConfig,
    TransportError,
    bucket_scheme,
    split_address,
)
from diloco_jax.transport.trust.names import Defect, OutOfDate, learner_names

PEM_BYTES_MAX = 1 << 20
TOKEN_BYTES_MAX = 4096
TOKEN_KEY = "diloco-token-bin"
PROBE_TIMEOUT_S = 2.0
# The name of bulk connections in TLS (ALPN), so that one port serves both kinds.
BULK_PROTOCOL = "diloco-bulk"
# Offered by a caller without TLS that only finds out whether the other side speaks it.
PROBE_PROTOCOL = "diloco-probe"

Files: TypeAlias = tuple[bytes, bytes, bytes]  # authority, certificate, key

log = logging.getLogger(__name__)


class Denied(TransportError):
    """The caller's token or certificate does not allow its request; the reason names the caller's setting."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Credentials(NamedTuple):
    """Secrets and options for a channel or a port of gRPC."""

    channel: grpc.ChannelCredentials
    server: grpc.ServerCredentials
    options: tuple[tuple[str, str], ...]  # channel only
    metadata: tuple[tuple[str, bytes], ...]  # every call
    # A server requires this token; empty if it requires none.
    token: bytes


def is_loopback(address: str) -> bool:
    """Tell whether "host:port" stays on this machine; host names other than localhost count as remote."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def credentials(config: TransportConfig, name: str, *, owner: bool = True, server: str = SYNCER_HOST) -> Credentials:
    """Read the credentials for `config.address` from their files, so that renewed ones are used.

    Args:
        config: Settings with the file names; "{name}" in them is replaced by `name`.
        owner: Whether the certificate must belong to `name`; a request for the status may use any certificate.
        server: Host that the listener's certificate must name, at whatever address: SYNCER_HOST, or `island_host` among
            the hosts of an island, which use one certificate for both sides.

    Raises:
        ValueError: A file is missing, too large, damaged or expired, belongs to another name or another authority; or
            plaintext would leave this machine without permission.
    """
    token = read_token(config)
    metadata = ((TOKEN_KEY, token),) if token else ()
    if not config.encrypted:
        _check_plaintext(config)
        channel = grpc.experimental.insecure_channel_credentials()
        return Credentials(channel, grpc.insecure_server_credentials(), (), metadata, token)

    def read() -> Files:
        ca, certificate, key = (_read(setting, path) for setting, path in _files(config, name).items())
        _check_files(config, name, owner, server, ca, certificate, key)
        return ca, certificate, key

    ca, certificate, key = files = read()
    channel = grpc.ssl_channel_credentials(ca, key, certificate)
    options = (("grpc.ssl_target_name_override", server),)
    return Credentials(channel, _renewable(read, files), options, metadata, token)


def _renewable(read: Callable[[], Files], shown: Files) -> grpc.ServerCredentials:
    """Return the credentials of a listener that reads authority, certificate and key again for every connection."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, certificate, key = shown
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        before = shown
        try:
            shown = read()
        except ValueError as error:
            log.warning(f"new connections still use the earlier files: {error}")
        return None if shown == before else configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=True)


def bulk_context(config: TransportConfig, name: str, *, serves: bool = False) -> ssl.SSLContext | None:
    """Return the settings of TLS for bulk connections, from the files that `credentials` has checked; None: plaintext.

    Both sides check the certificate of the other, as gRPC does.
    """
    if not config.encrypted:
        return None
    files = _files(config, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([BULK_PROTOCOL])
    context.load_verify_locations(files["tls_ca"])
    # Without a password OpenSSL would ask for one on the terminal.
    context.load_cert_chain(files["tls_certificate"], files["tls_key"], password="")
    if serves:
        # A connection that continues an earlier one would not show its certificate again.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


class BulkContexts:
    """The listener's settings of TLS for bulk connections, with renewed files from the next connection on."""

    def __init__(self, config: TransportConfig, name: str, server: str = SYNCER_HOST) -> None:
        self._config = config
        self._name = name
        self._server = server
        self._lock = threading.Lock()
        self._shown = self._read() if config.encrypted else None
        self._context = bulk_context(config, name, serves=True)

    def current(self) -> ssl.SSLContext | None:
        """Return the settings for the next connection; None: plaintext."""
        if self._shown is None:
            return None
        with self._lock:
            try:
                found = self._read()
                if found != self._shown:
                    _check_files(self._config, self._name, True, self._server, *found)
                    self._context = bulk_context(self._config, self._name, serves=True)
                    self._shown = found
            except (ValueError, OSError) as error:
                log.warning(f"new bulk connections still use the earlier files: {error}")
            return self._context

    def _read(self) -> Files:
        ca, certificate, key = (_read(setting, path) for setting, path in _files(self._config, self._name).items())
        return ca, certificate, key


def _check_plaintext(config: TransportConfig) -> None:
    # What is in a bucket is sealed, or the bucket refuses it (store/bucket.py).
    if bucket_scheme(config.address) or is_loopback(config.address):
        return
    token = bool(config.token_file)
    if not config.allow_plaintext:
        alone = " (the token alone does not change that: it would travel readably)" if token else ""
        raise ValueError(
            f"transport.address {config.address!r} is not loopback and nothing would be encrypted{alone}: set "
            "transport.tls_ca, tls_certificate and tls_key (`diloco certs` makes them), tunnel to a loopback address, "
            "or set transport.allow_plaintext if you trust the network"
        )
    if token:
        log.warning(
            f"plaintext to {config.address}: anyone who can read the traffic learns the token and all parameters, and "
            "can then pose as any learner or as the syncer; set transport.tls_ca, tls_certificate and tls_key"
        )


def island_host(learner_id: str) -> str:
    """Return the host name in an island's certificate for the island's own hosts."""
    return learner_id + ISLAND_HOSTS


def _files(config: TransportConfig, name: str) -> dict[str, str]:
    """Return the path of each setting, in the order authority, certificate, key."""
    return {
        "tls_ca": config.tls_ca,
        "tls_certificate": config.tls_certificate.replace("{name}", name),
        "tls_key": config.tls_key.replace("{name}", name),
    }


def _read(setting: str, path: str, limit: int = PEM_BYTES_MAX) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ValueError(
            f"transport.{setting} {path} cannot be read: {error.strerror}; correct the path, or copy this machine's "
            "files from where `diloco certs` made them"
        ) from None
    if len(content) > limit:
        raise ValueError(f"transport.{setting} {path} has more than {limit} bytes: is it the right file?")
    return content


def read_token(config: TransportConfig) -> bytes:
    """Return the secret that all processes of the run share; b"" if there is none. ValueError if it cannot be read."""
    path = config.token_file
    if not path:
        return b""
    token = _read("token_file", path, TOKEN_BYTES_MAX).strip()
    if not token:
        raise ValueError(f"transport.token_file {path} is empty: write a secret into it, or let `diloco certs` do so")
    return token


def _check_files(
    config: TransportConfig, name: str, owner: bool, server: str, ca: bytes, certificate: bytes, key: bytes
) -> None:
    """Check the files, because the other side would answer a defect only with a closed connection."""
    # Plaintext does not need the package that this module needs.
    from diloco_jax.transport.trust import certificates

    files = _files(config, name)
    now = datetime.datetime.now(datetime.UTC)
    setting = "tls_ca"
    try:
        authorities = certificates.parse_certificates(ca)
        for authority in authorities:
            certificates.check_dates(authority, now)
        setting = "tls_certificate"
        chain = certificates.parse_certificates(certificate)
        certificates.check_dates(chain[0], now)
        if owner:
            certificates.check_owner(chain[0], name)
        if server != SYNCER_HOST:
            certificates.check_serves(chain[0], server)
        setting = "tls_key"
        certificates.check_key(key, chain[0])
        setting = "tls_certificate"
        certificates.check_issued(chain, authorities)
    except Defect as error:
        beside = f" (transport.tls_ca is {config.tls_ca})" if "authority" in str(error) else ""
        late = isinstance(error, OutOfDate)
        fix = "" if late else "; use the files that `diloco certs` made together for this name"
        raise (OutOfDate if late else ValueError)(
            f"transport.{setting} {files[setting]} {error}{beside}{fix}"
        ) from None
    if os.name == "posix" and os.stat(files["tls_key"]).st_mode & 0o077:
        log.warning(f"transport.tls_key {files['tls_key']} can be read by others on this machine: chmod 600 it")


def valid_until(config: TransportConfig, name: str) -> dict[str, datetime.datetime]:
    """Return when the certificates of an encrypted transport expire, by setting: the earliest in each file.

    Raises:
        ValueError: A file is missing, too large or damaged.
    """
    from diloco_jax.transport.trust.certificates import parse_certificates

    ends = {}
    for setting, path in _files(config, name).items():
        if setting != "tls_key":
            found = parse_certificates(_read(setting, path))
            ends[setting] = min(certificate.not_valid_after_utc for certificate in found)
    return ends


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The check of a caller's permissions, before anything else in its call is used."""

    # gRPC has verified the callers' certificates against the authority.
    encrypted: bool
    # Empty: callers need no token.
    token: bytes

    def check(self, metadata: Mapping[str, str | bytes]) -> None:
        """Check the run's token; Denied if it is missing or wrong."""
        if not self.token:
            return
        sent = metadata.get(TOKEN_KEY, b"")
        sent = sent.encode() if isinstance(sent, str) else sent
        if hmac.compare_digest(sent, self.token):
            return
        what = "is not the syncer's" if sent else "was not sent"
        raise Denied(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the token {what}: set transport.token_file to a copy of the file that the syncer was started with",
        )

    def check_speaks_for(
        self,
        learner_id: str,
        context: Mapping[str, list[bytes]],
        *,
        or_syncer: bool = False,
        or_subscriber: bool = False,
    ) -> None:
        """Check that the caller's certificate belongs to the learner of this name.

        Args:
            context: gRPC's properties of the caller (`ServicerContext.auth_context`).
            or_syncer: whether the syncer's certificate is enough.
            or_subscriber: whether the certificate of the subscriber of this name is enough.

        Raises:
            Denied: The certificate belongs to another name.
        """
        if not self.encrypted:
            return
        dns, uris, common = (
            [value.decode("utf-8", "replace") for value in context.get(key, ())]
            for key in ("peer_dns", "peer_uri", "x509_common_name")
        )
        if or_syncer and SYNCER_HOST in dns:
            return
        names = learner_names(common[0] if common else "", dns, uris)
        if learner_id in names or (or_subscriber and SUBSCRIBER + learner_id in names):
            return
        owners = ", ".join(sorted(names))[:200]
        allowed = f"{learner_id!r} or that of the syncer" if or_syncer and learner_id != SYNCER else repr(learner_id)
        raise Denied(
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate is that of {owners!r}: set transport.tls_certificate and tls_key to those of {allowed}",
        )


def diagnose(config: TransportConfig, name: str) -> str:
    """Return why the syncer at `config.address` and this process cannot connect; "" if the cause is unknown.

    gRPC retries in silence, and a gRPC server closes the connection without an answer. So this function makes one TLS
    handshake itself, which takes at most a few seconds.
    """
    files = _files(config, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        if config.encrypted:
            context.load_verify_locations(files["tls_ca"])
            context.load_cert_chain(files["tls_certificate"], files["tls_key"])
        else:
            # The handshake only shows whether the other side speaks TLS at all.
            context.set_alpn_protocols(["h2", PROBE_PROTOCOL])
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with dial(config.address, context, PROBE_TIMEOUT_S) as stream:
            if not config.encrypted:
                return "the syncer wants TLS: set transport.tls_ca, tls_certificate and tls_key here too"
            if stream.recv(1):
                return ""
        return _DISLIKED
    except ssl.SSLCertVerificationError as error:
        return _verdict(error.verify_message)
    except ssl.SSLEOFError:
        return ""
    except ssl.SSLError as error:
        if not config.encrypted:
            return ""
        if "ALERT" in (error.reason or ""):
            return f"{_DISLIKED} ({error.reason})"
        return (
            "the syncer does not speak TLS: give it transport.tls_ca, tls_certificate and tls_key too, or correct "
            f"transport.address ({error.reason})"
        )
    except OSError:
        return ""


def dial(address: str, context: ssl.SSLContext | None, timeout_s: float, server: str = SYNCER_HOST) -> socket.socket:
    """Open a connection, over TLS with a context, to the first address of a host that answers; OSError if none does.

    The socket is wrapped before it connects, because wrapping a connection that was reset raises and leaks it.
    """
    host, port = split_address(address)
    refused: OSError = ConnectionRefusedError(f"{address} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        stream = socket.socket(family, kind, protocol)
        if context is not None:
            stream = context.wrap_socket(stream, server_hostname=server)
        stream.settimeout(timeout_s)
        try:
            stream.connect(where)
        except ssl.SSLError:
            stream.close()
            raise
        except OSError as error:
            stream.close()
            refused = error
        else:
            return stream
    raise refused


# gRPC reaches an address that is not loopback through the first of these proxies that is set.
PROXIES, NO_PROXY = ("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy")
_ANSWER_BYTES_MAX = 8 << 10


def proxy_of(address: str) -> str:
    """Return [user:password@]host:port of the HTTP proxy that gRPC uses for an address, "" if it uses none."""
    if is_loopback(address):
        return ""
    excluded = next((value for name in NO_PROXY if (value := os.environ.get(name))), "")
    host, _ = split_address(address)
    if any(host.endswith(each.strip()) for each in excluded.split(",") if each.strip()):
        return ""
    found = next((value for name in PROXIES if (value := os.environ.get(name))), "")
    return urllib.parse.urlsplit(found).netloc


def dial_listener(
    address: str, context: ssl.SSLContext | None, timeout_s: float, server: str = SYNCER_HOST
) -> socket.socket:
    """Open a bulk connection as gRPC opens its own, if needed through an HTTP proxy; OSError.

    Args:
        server: Host that the listener's certificate must name.
    """
    user, _, proxy = proxy_of(address).rpartition("@")
    if not proxy:
        return dial(address, context, timeout_s, server)
    stream = dial(proxy, None, timeout_s)
    encoded = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    permission = f"Proxy-Authorization: Basic {encoded}\r\n" if user else ""
    try:
        stream.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{permission}\r\n".encode())
        answer = b""
        # Byte by byte, because what follows the answer belongs to TLS.
        while not answer.endswith(b"\r\n\r\n"):
            byte = stream.recv(1)
            if not byte or len(answer) > _ANSWER_BYTES_MAX:
                raise ConnectionError(f"the proxy {proxy} ended the connection")
            answer += byte
        if answer.split(b" ", 2)[1:2] != [b"200"]:
            raise ConnectionError(f"the proxy {proxy} refused {address}: {answer[:80]!r}")
        return stream if context is None else context.wrap_socket(stream, server_hostname=server)
    except BaseException:
        stream.close()
        raise


_DISLIKED = (
    "the syncer did not accept our certificate: by its clock transport.tls_certificate may have expired, or its "
    "transport.tls_ca is another authority than ours"
)


def _verdict(message: str) -> str:
    """Explain OpenSSL's verdict on the syncer's certificate."""
    if "expired" in message or "not yet valid" in message:
        return f"the syncer's certificate is out of date ({message}): renew it, or correct the clock of this machine"
    if "ostname" in message or "purpose" in message:
        return (
            f"what listens there has no syncer's certificate ({message}): correct transport.address, or start the "
            f"syncer with a certificate for {SYNCER_HOST}"
        )
    return (
        f"the syncer's certificate was signed by another authority ({message}): set transport.tls_ca to the one that "
        "signed it"
    )
