"""A cluster's certificates, from three authorities: no node's certificate gives access to etcd.

Keys are EC P-256 (made in under a millisecond). Each file is checked on its own, so that a later
run completes an interrupted one.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetkeeper_local.common.files import write_file

VALID_DAYS = 365


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a directory: `NAME.crt` and `NAME.key`."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        """The PEM file with which clients verify."""
        return self.folder / f"{self.name}.crt"

    @property
    def key(self) -> Path:
        """The PEM file of the private key, mode 0600."""
        return self.folder / f"{self.name}.key"

    def _own(self) -> Identity:
        return Identity(self.certificate, self.key)

    def ensure(self) -> Authority:
        """Create the authority unless it exists and is valid for another day."""
        if self._own().usable():
            return self
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"fleetkeeper-local {self.name}", ())
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            _builder(subject, subject, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _write_key(self.key, key)
        write_file(self.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return self

    def issue(
        self,
        name: str,
        common_name: str,
        *,
        groups: Sequence[str] = (),
        hosts: Sequence[str] = (),
        server: bool = False,
    ) -> Identity:
        """Return a certificate signed by this authority, in `NAME.crt` and `NAME.key`.

        An existing one is kept if it is intact, signed by this authority and valid for another day.

        Args:
            name: base name of the two files.
            common_name: the user name that Kubernetes reads from it.
            groups: the user's groups (organizations of the subject).
            hosts: DNS names and IP addresses for which it is valid.
            server: whether a server may use it as well as a client.
        """
        identity = Identity(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if identity.usable(self._own()):
            return identity
        issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        signer = serialization.load_pem_private_key(self.key.read_bytes(), password=None)
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{self.key} does not contain an EC key")
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if server:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(_subject(common_name, groups), issuer.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        certificate = builder.sign(signer, hashes.SHA256())
        _write_key(identity.key, key)
        write_file(
            identity.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644
        )
        return identity


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path

    def usable(self, issuer: Identity | None = None) -> bool:
        """Return whether both files are intact, match, are valid for a day and have this issuer."""
        try:
            certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
            key = serialization.load_pem_private_key(self.key.read_bytes(), password=None)
            if issuer is not None:
                certificate.verify_directly_issued_by(
                    x509.load_pem_x509_certificate(issuer.certificate.read_bytes())
                )
        except (OSError, ValueError, TypeError, InvalidSignature):
            return False  # missing, truncated by a crash, or of an earlier authority
        tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        return (
            certificate.not_valid_after_utc > tomorrow
            and key.public_key() == certificate.public_key()
        )


def ensure_signing_key(folder: Path, name: str) -> Identity:
    """Return the key pair that signs ServiceAccount tokens: `NAME.key`, public part `NAME.pub`."""
    pair = Identity(folder / f"{name}.pub", folder / f"{name}.key")
    if not _is_pair(pair):
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        _write_key(pair.key, key)
        write_file(pair.certificate, public, 0o644)
    return pair


def _is_pair(pair: Identity) -> bool:
    try:
        key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
        public = serialization.load_pem_public_key(pair.certificate.read_bytes())
    except (OSError, ValueError):
        return False
    return key.public_key() == public


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # One hour back: the clocks of a container and its host may differ.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _subject(common_name: str, groups: Sequence[str]) -> x509.Name:
    return x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_file(path, pem, 0o600)
