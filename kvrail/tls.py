"""Certificates between services: the one of a process, checked at start and read again when its files change.

A certificate says what its holder is by a URI among its alternative names, kvrail://ROLE, and where it is reached by
DNS names and addresses. Whoever is called proves that it is meant (`Verify`); whoever calls must have the role that
the method asks for (kvrail.rpc.roles).
"""

import ipaddress
import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol

from kvrail.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, SubjectAlternativeName

log = logging.getLogger("kvrail.tls")

Role = Literal["router", "prefill", "decode", "metrics"]
"""`metrics`: may read metrics and nothing else."""
ROLES: tuple[Role, ...] = ("router", "prefill", "decode", "metrics")
Verify = Literal["host", "role"]
"""What a certificate must name that is shown by whoever is called: the host that was called, or its role."""

LOOK_EVERY_S = 1.0
"""How often files are looked at, at most; a handshake or a call makes the process look."""
SOON_DAYS = 7
"""A certificate that has no longer to live is warned of."""
_ANYWHERE = ("", "0.0.0.0", "::")


def role_uri(role: str) -> str:
    """The alternative name that makes a certificate's holder this."""
    return f"kvrail://{role}"


def role_host(role: str) -> str:
    """The DNS name that a certificate of this role has wherever it is used; .internal is nobody's."""
    return f"{role}.kvrail.internal"


class TlsSettings(Protocol):
    """What of a process's settings concerns certificates."""

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
        self._paths = {"tls_ca": Path(ca), "tls_cert": Path(cert), "tls_key": Path(key)}
        self._host = "" if host in _ANYWHERE or verify == "role" else host
        self._looked = monotonic()
        self._seen = self._stat()
        self._material, self._contexts = self._read(1)

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
        now = monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return self._material
        self._looked = now
        seen = self._stat()
        if seen != self._seen:
            try:
                self._material, self._contexts = self._read(self._material.number + 1)
                log.info("certificate read anew; it expires %s", f"{self._material.expires:%Y-%m-%d %H:%M} UTC")
            except ConfigError as error:  # perhaps half written: the next change is looked at again
                log.error("certificate not read anew, the old one stays: %s", error)
            self._seen = seen
        return self._material

    def server_context(self) -> ssl.SSLContext:
        """For a listener that asks for a client's certificate, and leaves it to who serves to insist on one."""
        self.material()
        return self._contexts

    def listening_context(self) -> ssl.SSLContext:
        """For a listener that outlives changes of the files: each handshake takes `server_context`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.sni_callback = self._renewed
        return context

    def _renewed(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.server_context()

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        """By which a change of the files is seen: a mount of Kubernetes swaps a link, so links are followed."""
        found = []
        for path in self._paths.values():
            try:
                about = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((about.st_mtime_ns, about.st_size, about.st_ino))
        return tuple(found)

    def _read(self, number: int) -> tuple[Material, ssl.SSLContext]:
        ca, cert, key = (_content(name, path) for name, path in self._paths.items())
        expires = check(ca, cert, key, self._paths, self.role, self._host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        try:
            context.load_verify_locations(cadata=ca.decode())
            context.load_cert_chain(self._paths["tls_cert"], self._paths["tls_key"])
        except (ssl.SSLError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tls-cert {self._paths['tls_cert']} cannot be used: {error}; make it anew") from None
        left = expires - datetime.now(UTC)
        if left.days < SOON_DAYS:
            log.warning(
                "the certificate %s expires in %.1f days", self._paths["tls_cert"], left.total_seconds() / 86400
            )
        return Material(ca, cert, key, expires, number), context


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _content(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = "let this process's user read it" if isinstance(error, PermissionError) else "name the file"
        raise ConfigError(f"{_flag(name)} {path}: {error.strerror}; {remedy}, or make one with kvrail certs") from None


def check(ca: bytes, cert: bytes, key: bytes, paths: dict[str, Path], role: str, host: str) -> datetime:
    """Check that three PEM files belong together and are good for `role` at `host`; returns the certificate's end.

    host: empty where it is not known. Raises ConfigError.
    """
    from cryptography import x509  # only where certificates are used
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    named = {name: f"{_flag(name)} {path}" for name, path in paths.items()}
    try:
        chain = x509.load_pem_x509_certificates(cert)
    except ValueError:
        raise ConfigError(f"{named['tls_cert']} holds no certificate in PEM; make one with kvrail certs") from None
    try:
        authorities = x509.load_pem_x509_certificates(ca)
    except ValueError:
        raise ConfigError(f"{named['tls_ca']} holds no certificate in PEM; name the CA's") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{named['tls_key']} is no PEM key without a password ({error}); write it as one") from None
    leaf, now = chain[0], datetime.now(UTC)
    if private.public_key() != leaf.public_key():
        raise ConfigError(
            f"{named['tls_key']} does not belong to {named['tls_cert']}; name the key that it was made of"
        )
    if leaf.not_valid_after_utc <= now:
        raise ConfigError(f"{named['tls_cert']} expired {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it")
    if leaf.not_valid_before_utc > now:
        since = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M}"
        raise ConfigError(f"{named['tls_cert']} is not valid before {since} UTC; set this machine's clock, or wait")
    if not any(_issued(leaf, issuer) for issuer in (*chain[1:], *authorities)):
        raise ConfigError(f"{named['tls_cert']} is not signed by {named['tls_ca']}; name the CA that signed it")
    names = alternative_names(leaf)
    if role_uri(role) not in names.get_values_for_type(x509.UniformResourceIdentifier):
        raise ConfigError(
            f"{named['tls_cert']} is not one of a {role}: its alternative names lack URI:{role_uri(role)}; they are"
            f" {_told(names)}"
        )
    if host and not _names_host(names, host):
        raise ConfigError(
            f"{named['tls_cert']} does not name {host}, where this process is reached; its alternative names are"
            f" {_told(names)}; make one with that name, or set --tls-verify role everywhere"
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


def _told(names: "SubjectAlternativeName") -> str:
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
