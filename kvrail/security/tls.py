"""Certificates between services: the one of a process, checked at start and read again when its files change.

A certificate says what its holder is by a URI among its alternative names, kvrail://ROLE, and where it is reached by
DNS names and addresses. A called service proves its host or role (`Verify`); a caller must have a role that
the method permits (kvrail.rpc.roles).
"""

import ipaddress
import itertools
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from kvrail.errors import ConfigError
from kvrail.runtime.watched import Watched, content_of

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, SubjectAlternativeName

log = logging.getLogger("kvrail.tls")

Role = Literal["router", "prefill", "decode", "worker", "metrics"]
"""`worker`: prefills and decodes. `metrics`: may read metrics and nothing else."""
ROLES: tuple[Role, ...] = ("router", "prefill", "decode", "worker", "metrics")
Verify = Literal["host", "role"]
"""What the certificate of a called service must name: the host that was called, or its role."""

SOON_DAYS = 7
"""A certificate that ends sooner is warned of."""
_ANYWHERE = ("", "0.0.0.0", "::")


def parts_of(role: str) -> tuple[str, ...]:
    """The roles that a certificate of this role names: a worker that prefills and decodes has two."""
    return ("prefill", "decode") if role == "worker" else (role,)


def role_uri(role: str) -> str:
    """The alternative name that makes a certificate's holder this."""
    return f"kvrail://{role}"


def role_host(role: str) -> str:
    """The DNS name that every certificate of this role has; .internal is reserved for private use."""
    return f"{role}.kvrail.internal"


class TlsSettings(Protocol):
    """The settings of a process that concern certificates."""

    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_verify: Verify
    host: str


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held when they were last good: PEM. number: grows with each change."""

    ca: bytes
    cert: bytes
    key: bytes
    expires: datetime
    number: int


class Tls:
    """The certificate, key and CA of one process. Any thread may use it."""

    def __init__(self, ca: str, cert: str, key: str, role: Role, host: str, verify: Verify = "host") -> None:
        """Read and check the files. host: where others reach this process; empty: not known.

        Raises ConfigError that names the file and the remedy.
        """
        self.role, self.verify = role, verify
        self._paths = {"--tls-ca": Path(ca), "--tls-cert": Path(cert), "--tls-key": Path(key)}
        self._host = "" if host in _ANYWHERE or verify == "role" else host
        self._numbers = itertools.count(1)
        self._files = Watched(tuple(self._paths.values()), self._read)

    @classmethod
    def of(cls, settings: TlsSettings, role: Role) -> "Tls | None":
        """A process's, or None where its settings name none. Raises ConfigError where they name some of three."""
        files = {"--tls-ca": settings.tls_ca, "--tls-cert": settings.tls_cert, "--tls-key": settings.tls_key}
        missing = [flag for flag, path in files.items() if not path]
        if len(missing) == len(files):
            return None
        if missing:
            raise ConfigError(f"{' and '.join(missing)} not given; give all of {', '.join(files)}, or none of them")
        return cls(settings.tls_ca, settings.tls_cert, settings.tls_key, role, settings.host, settings.tls_verify)

    def material(self) -> Material:
        """What the files hold; where a change is not good, what they held before it."""
        return self._files.get()[0]

    def end(self) -> datetime:
        """When the certificate ends."""
        return self.material().expires

    def listening_context(self) -> ssl.SSLContext:
        """For a listener that outlives changes of the files.

        It asks for a client's certificate, and leaves it to the server to insist on one.
        """
        context = _renewing(lambda: self._files.get()[1])
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _read(self) -> tuple[Material, ssl.SSLContext]:
        ca, cert, key = (content_of(flag, path) for flag, path in self._paths.items())
        expires = check(ca, cert, key, self._paths, self.role, self._host)
        context = serving_context("--tls-cert", self._paths["--tls-cert"], self._paths["--tls-key"], expires)
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))  # comments have other letters
        context.verify_mode = ssl.CERT_OPTIONAL
        return Material(ca, cert, key, expires, next(self._numbers)), context


class DoorCertificate:
    """The certificate by which clients know the router's HTTP port."""

    def __init__(self, cert: str, key: str) -> None:
        """Read and check both files. Raises ConfigError."""
        self._cert, self._key = Path(cert), Path(key)
        self._files = Watched((self._cert, self._key), self._read)

    @classmethod
    def of(cls, cert: str, key: str) -> "DoorCertificate | None":
        """The one that settings name, if any. Raises ConfigError where they name one of both."""
        if bool(cert) != bool(key):
            raise ConfigError("--tls-http-cert and --tls-http-key belong together; give both, or none of them")
        return cls(cert, key) if cert else None

    def listening_context(self) -> ssl.SSLContext:
        """For a listener that outlives changes of the files."""
        return _renewing(lambda: self._files.get()[0])

    def end(self) -> datetime:
        """When the certificate ends."""
        return self._files.get()[1]

    def _read(self) -> tuple[ssl.SSLContext, datetime]:
        chain = check_pair(
            content_of("--tls-http-cert", self._cert),
            content_of("--tls-http-key", self._key),
            f"--tls-http-cert {self._cert}",
            f"--tls-http-key {self._key}",
        )
        end = chain[0].not_valid_after_utc
        return serving_context("--tls-http-cert", self._cert, self._key, end), end


def _renewing(current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """For a listener: each handshake takes what is current by then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current()

    context.sni_callback = renew
    return context


def serving_context(flag: str, cert: Path, key: Path, end: datetime) -> ssl.SSLContext:
    """For a server with this certificate, which ends then. Raises ConfigError where OpenSSL does not take it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{flag} {cert} cannot be used: {error}; create it again") from None
    left_days = (end - datetime.now(UTC)).total_seconds() / 86400
    if left_days < SOON_DAYS:
        log.warning("%s %s expires in %.1f days", flag, cert, left_days)
    return context


def check_pair(cert: bytes, key: bytes, cert_name: str, key_name: str) -> "list[Certificate]":
    """Check that PEM files of a certificate and a key belong together and hold now; returns the certificate's chain.

    Raises ConfigError; the names say which setting it is and which file.
    """
    from cryptography import x509  # only where certificates are used
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        chain = x509.load_pem_x509_certificates(cert)
    except ValueError:
        raise ConfigError(f"{cert_name} holds no certificate in PEM; make one with kvrail certs") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key_name} is no PEM key without a password ({error}); write it as one") from None
    leaf, now = chain[0], datetime.now(UTC)
    if private.public_key() != leaf.public_key():
        raise ConfigError(f"{key_name} does not belong to {cert_name}; name the key of that one")
    if leaf.not_valid_after_utc <= now:
        raise ConfigError(f"{cert_name} expired {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it")
    if leaf.not_valid_before_utc > now:
        since = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M}"
        raise ConfigError(f"{cert_name} is not valid before {since} UTC; set this machine's clock, or wait")
    return chain


def check(ca: bytes, cert: bytes, key: bytes, paths: dict[str, Path], role: str, host: str) -> datetime:
    """Check that three PEM files belong together and are good for `role` at `host`; returns the certificate's end.

    host: empty where it is not known. Raises ConfigError.
    """
    from cryptography import x509

    ca_name, cert_name, key_name = (f"{flag} {path}" for flag, path in paths.items())
    chain = check_pair(cert, key, cert_name, key_name)
    leaf = chain[0]
    try:
        authorities = x509.load_pem_x509_certificates(ca)
    except ValueError:
        raise ConfigError(f"{ca_name} holds no certificate in PEM; name the CA's") from None
    if not any(_issued(leaf, issuer) for issuer in (*chain[1:], *authorities)):
        raise ConfigError(f"{cert_name} is not signed by {ca_name}; name the CA that signed it")
    names = alternative_names(leaf)
    for uri in map(role_uri, parts_of(role)):
        if uri not in names.get_values_for_type(x509.UniformResourceIdentifier):
            raise ConfigError(
                f"{cert_name} is not one of a {role}: its alternative names lack URI:{uri}; they are {_listed(names)}"
            )
    if host and not _names_host(names, host):
        raise ConfigError(
            f"{cert_name} does not name {host}, where this process is reached; its alternative names are"
            f" {_listed(names)}; make one with that name, or set --tls-verify role everywhere"
        )
    return leaf.not_valid_after_utc


def _issued(leaf: "Certificate", issuer: "Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        leaf.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def alternative_names(certificate: "Certificate") -> "SubjectAlternativeName":
    """A certificate's; without any it has none."""
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _listed(names: "SubjectAlternativeName") -> str:
    return ", ".join(str(name.value) for name in names) or "none"


def _names_host(names: "SubjectAlternativeName", host: str) -> bool:
    from cryptography import x509

    try:
        return ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    except ValueError:
        pass
    named = [name.lower() for name in names.get_values_for_type(x509.DNSName)]
    return host.lower() in named or f"*.{host.lower().partition('.')[2]}" in named


def roles_of(uris: Iterable[str]) -> frozenset[str]:
    """The roles that a peer's certificate gives it, from the URIs among its alternative names."""
    return frozenset(uri.removeprefix(role_uri("")) for uri in uris if uri.startswith(role_uri("")))
