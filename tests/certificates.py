"""Certificates for tests: a CA, and files of each role in a folder of its own."""

import datetime
import os
from pathlib import Path

from cryptography import x509

from kvrail.cli import certs
from kvrail.security.tls import Tls

NAMES = "localhost,127.0.0.1"


class Authority:
    """A CA whose certificates go into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.made = certs.make_authority(30)
        (folder / "ca.pem").write_bytes(self.made.pem)

    def write(self, role: str, into: str = "", days: float = 10, hosts: str = NAMES, lives: int = 10) -> dict[str, str]:
        """Write a certificate that lives so many days. Returns the settings that name its files.

        days: not 10: negative for one that has expired, positive for one that does not hold yet.
        """
        names = [certs.host_name(host) for host in hosts.split(",") if host]
        certificate, key = certs.issue(self.made, role, names, lives)
        if days != 10:
            certificate = self._shifted(certificate, days)
        name = into or role
        for path, content in (
            (self.folder / f"{name}.key", certs.key_pem(key)),
            (self.folder / f"{name}.pem", certs.certificate_pem(certificate)),
        ):
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)
        return self.settings(name)

    def settings(self, name: str) -> dict[str, str]:
        return {
            "tls_ca": str(self.folder / "ca.pem"),
            "tls_cert": str(self.folder / f"{name}.pem"),
            "tls_key": str(self.folder / f"{name}.key"),
        }

    def tls(self, role: str, **others: object) -> Tls:
        paths = self.write(role)
        return Tls(*paths.values(), role, "", **others)

    def _shifted(self, certificate: x509.Certificate, days: float) -> x509.Certificate:
        from cryptography.hazmat.primitives.hashes import SHA256

        now = datetime.datetime.now(datetime.UTC)
        begin, end = sorted((now + datetime.timedelta(days=days), now + datetime.timedelta(days=2 * days)))
        builder = x509.CertificateBuilder(
            certificate.issuer,
            certificate.subject,
            certificate.public_key(),
            certificate.serial_number,
            begin,
            end,
            list(certificate.extensions),
        )
        return builder.sign(self.made.key, SHA256())
