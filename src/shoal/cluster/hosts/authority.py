"""Certificate authority of one job: created at launch, in the head's memory only.

Certificates name a role and its incarnation and nothing else; see `runtime/transport/tls.py`.
"""

from __future__ import annotations

import datetime
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.runtime.transport.tls import Credentials

VALID_FOR = datetime.timedelta(days=90)
"""From the launch. A longer job has to be resumed once."""

CLOCK_SKEW = datetime.timedelta(days=1)
"""Tolerated lag of a host's clock; the join compares clocks more strictly."""

_PEM = serialization.Encoding.PEM


class Authority:
    """Issues the certificates of one job."""

    def __init__(self, job: str, *, plaintext: bool = False) -> None:
        self._job = job
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._token_key = secrets.token_bytes(32) if plaintext else b""
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shoal job {job}"[:64])])
        self._certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(_PEM)

    @property
    def token_key(self) -> bytes:
        return self._token_key

    def issue(self, name: str, incarnation: int = 0) -> Credentials:
        """Key and certificate of a role."""
        if self._token_key:
            return Credentials(name=name, incarnation=incarnation, token_key=self._token_key)
        key, public = new_key()
        return Credentials(
            name=name,
            incarnation=incarnation,
            authority=self.certificate,
            certificate=self.sign(public, name, incarnation),
            key=key,
        )

    def sign(self, public_key: bytes, name: str, incarnation: int = 0) -> bytes:
        """Certificate for a key made elsewhere, which stays there. Raises ValueError for an invalid key."""
        public = serialization.load_pem_public_key(public_key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError("not a key on an elliptic curve")
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, name),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, str(incarnation)),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, self._job[:64]),
            ]
        )
        return (
            self._builder(subject, public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .sign(self._key, hashes.SHA256())
            .public_bytes(_PEM)
        )

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + VALID_FOR)
        )


def new_key() -> tuple[bytes, bytes]:
    """Private and public key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, key.public_key().public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
