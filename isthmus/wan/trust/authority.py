"""The authority in memory: X.509 names, its own certificate, and those that it issues to clouds."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# A cloud whose clock is a little behind must accept what was signed a moment ago.
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The key and certificate of the one who vouches for every cloud."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, *, days: int, now: datetime) -> Self:
        """Return a new authority that may sign clouds, but no further authority."""
        key = new_key()
        name = common_name("Isthmus authority")
        builder = (
            _builder(name, key.public_key(), days=days, now=now)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(key=key, certificate=builder.sign(key, hashes.SHA256()))

    def issue(
        self, cloud: str, public_key: ec.EllipticCurvePublicKey, *, days: int, now: datetime
    ) -> x509.Certificate:
        """Return a certificate for a cloud, by which its ranks and its gateway both serve and dial."""
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            _builder(common_name(cloud), public_key, days=days, now=now)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(purposes, critical=False)
            .add_extension(alternative_names(cloud), critical=False)
            .add_extension(issuer_key, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def signing_request(cloud: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateSigningRequest:
    """Return a request that names the cloud and proves that its sender holds the key."""
    return x509.CertificateSigningRequestBuilder(common_name(cloud)).sign(key, hashes.SHA256())


def common_name(text: str) -> x509.Name:
    """Return the X.509 name that consists of this text alone."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def alternative_names(cloud: str) -> x509.SubjectAlternativeName:
    """Return the server names that a cloud's certificate stands for."""
    return x509.SubjectAlternativeName([x509.DNSName(f"{cloud}.isthmus"), x509.DNSName(f"*.{cloud}.isthmus")])


def _builder(
    subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *, days: int, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
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
