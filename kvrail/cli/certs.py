"""`kvrail certs`: a CA of the cluster's own, and a certificate for each role."""

import argparse
import ipaddress
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvrail.cli.flags import Commands, add_command
from kvrail.errors import ConfigError
from kvrail.security.files import write_whole
from kvrail.security.tls import ROLES, Role, check, parts_of, role_host, role_uri

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName

SUMMARY = "make a CA and a certificate for each role, for TLS between services"
EPILOG = """OUT gets ca.pem and ca.key, and for each role ROLE.pem and ROLE.key; only their owner can read keys. With
ca.key, certificates of any role can be made: keep it where no service runs.
Files are never overwritten, except by --renew, which makes new certificates with the existing CA (running services
load them), by --keep, which makes those that are due, and by --force, which makes a new CA and all certificates.

examples:
  kvrail certs certs --hosts localhost,127.0.0.1
  kvrail certs certs --hosts prefill-1.example.org,decode-1.example.org --days 30 --renew"""
ALLOWANCE = timedelta(minutes=5)
"""Clocks differ: a certificate is valid from this long before it is made."""
DEFAULT_HOSTS = "localhost,127.0.0.1,::1"


def add_commands(commands: Commands) -> None:
    """Add `kvrail certs`."""
    with add_command(commands, "certs", SUMMARY, EPILOG, run, "OUT") as parser:
        parser.add_argument("out", type=Path, metavar="OUT", help="folder for the files; made where it is missing")
        parser.add_argument(
            "--hosts",
            default=DEFAULT_HOSTS,
            metavar="A,B,…",
            help=f"names and addresses by which services are reached (default {DEFAULT_HOSTS})",
        )
        parser.add_argument(
            "--roles",
            default=",".join(ROLES),
            metavar="A,B,…",
            help=f"certificates to make (default {','.join(ROLES)})",
        )
        parser.add_argument("--days", default="90", metavar="N", help="days for which certificates hold (default 90)")
        parser.add_argument(
            "--ca-days", default="3650", metavar="N", help="days for which a new CA holds (default 3650)"
        )
        parser.add_argument("--renew", action="store_true", help="make new certificates with the CA in OUT")
        parser.add_argument(
            "--keep",
            action="store_true",
            help="make what is missing, does not fit, or ends within a third of --days; a CA if there is none of use",
        )
        parser.add_argument("--force", action="store_true", help="overwrite all, the CA too")


@dataclass(frozen=True)
class Authority:
    """A CA."""

    certificate: "Certificate"
    key: "EllipticCurvePrivateKey"

    @cached_property
    def pem(self) -> bytes:
        """Its certificate."""
        return certificate_pem(self.certificate)


def run(arguments: argparse.Namespace) -> int:
    """Make the files and say what was made; returns 0. Raises ConfigError where something is in the way."""
    out: Path = arguments.out
    hosts = [host.strip() for host in arguments.hosts.split(",") if host.strip()]
    roles = _roles(arguments.roles)
    days, ca_days = _days("--days", arguments.days), _days("--ca-days", arguments.ca_days)
    names = [host_name(host) for host in hosts]
    if arguments.keep:
        ends = {role: _end(out, role) for role in roles}
        due = [role for role in roles if ends[role] <= datetime.now(UTC) + timedelta(days=days) / 3]
        if not due:
            sys.stdout.write(f"{out} has all of them; the first expires {min(ends.values()):%Y-%m-%d %H:%M} UTC\n")
            return 0
        arguments.renew = _can_sign(out)
        arguments.force = not arguments.renew
        roles = due if arguments.renew else roles
    files = [out / f"{role}.{end}" for role in roles for end in ("pem", "key")]
    new_ca = arguments.force or not arguments.renew
    if new_ca:
        files += [out / "ca.pem", out / "ca.key"]
    there = sorted(path.name for path in files if path.exists())
    if there and not (arguments.force or arguments.renew):
        raise ConfigError(
            f"{out} has {', '.join(there)} already; --renew makes new certificates with its CA, --force a new CA too"
        )
    try:
        out.mkdir(parents=True, exist_ok=True, mode=0o755)
        authority = make_authority(ca_days) if new_ca else read_authority(out)
        if new_ca:
            write_whole(out / "ca.key", key_pem(authority.key), 0o600)
            write_whole(out / "ca.pem", authority.pem, 0o644)
            _tell(out / "ca.pem", authority.certificate)
        for role in roles:
            certificate, key = issue(authority, role, names, days)
            write_whole(out / f"{role}.key", key_pem(key), 0o600)
            write_whole(out / f"{role}.pem", certificate_pem(certificate), 0o644)
            _tell(out / f"{role}.pem", certificate)
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror}; name a folder that can be written") from None
    return 0


def _end(out: Path, role: Role) -> datetime:
    """When the role's certificate in a folder ends; long ago where it is missing or does not fit its key and the CA."""
    paths = {"--tls-ca": out / "ca.pem", "--tls-cert": out / f"{role}.pem", "--tls-key": out / f"{role}.key"}
    try:
        ca, cert, key = (path.read_bytes() for path in paths.values())
        return check(ca, cert, key, paths, role, "")
    except (OSError, ConfigError):
        return datetime.min.replace(tzinfo=UTC)


def _can_sign(out: Path) -> bool:
    """Whether a folder has a CA of use. Raises ConfigError where only its key was taken away: others may trust it."""
    try:
        read_authority(out)
    except ConfigError:
        if (out / "ca.pem").exists() and not (out / "ca.key").exists():
            raise
        return False
    return True


def make_authority(days: int) -> Authority:
    """A new CA, which signs certificates and nothing else."""
    from cryptography import x509  # takes a while: not for other commands
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "kvrail CA")])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - ALLOWANCE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Authority(builder.sign(key, SHA256()), key)


def read_authority(out: Path) -> Authority:
    """The CA in a folder. Raises ConfigError where there is none that can sign."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
        key = load_pem_private_key((out / "ca.key").read_bytes(), None)
    except FileNotFoundError as error:
        raise ConfigError(f"--renew: there is no {error.filename}; make a CA without --renew") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--renew: the CA in {out} cannot be read: {error}; make a new one with --force") from None
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"--renew: ca.key in {out} does not belong to ca.pem; make a new CA with --force")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(f"--renew: the CA in {out} has expired; make a new one with --force")
    return Authority(certificate, key)


def issue(
    authority: Authority, role: Role, names: "list[GeneralName]", days: int
) -> "tuple[Certificate, EllipticCurvePrivateKey]":
    """A certificate for `role`, reached by `names`; it serves and calls. It ends with its CA at the latest."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    end = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    parts = parts_of(role)
    uris = [x509.UniformResourceIdentifier(role_uri(part)) for part in parts]
    own = [*uris, *(x509.DNSName(role_host(part)) for part in parts)]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, f"kvrail {role}")]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - ALLOWANCE)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([*own, *names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
    )
    return builder.sign(authority.key, SHA256()), key


def key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    """A key as PEM (PKCS#8), without a password."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: "Certificate") -> bytes:
    """A certificate as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _roles(given: str) -> list[Role]:
    wanted = [part.strip() for part in given.split(",") if part.strip()]
    unknown = [role for role in wanted if role not in ROLES]
    if unknown or not wanted:
        wrong = f"{unknown[0]!r} is no role" if unknown else "none is named"
        raise ConfigError(f"--roles: {wrong}; roles are {', '.join(ROLES)}")
    return [role for role in ROLES if role in wanted]


def _days(flag: str, given: str) -> int:
    if not given.isascii() or not given.isdecimal() or not 0 < int(given) <= 36500:
        raise ConfigError(f"{flag}: {given!r} is no number of days; write one from 1 to 36500")
    return int(given)


def host_name(host: str) -> "GeneralName":
    """A host as a certificate names it. Raises ConfigError where it is none."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise ConfigError(f"--hosts: {host!r} is no host; write names and addresses without a port")
    return x509.DNSName(host)


def _tell(path: Path, certificate: "Certificate") -> None:
    sys.stdout.write(f"{path}  expires {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC\n")
