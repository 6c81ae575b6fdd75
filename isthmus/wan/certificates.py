"""The private authority by which clouds know each other: keys, signing requests, certificates, identities.

The operator holds `authority.key` and signs; each cloud makes its own key, which never leaves it:

    at the operator                                   at cloud west
    make_authority → authority.key, authority.crt
                                         west.csr  ←  make_request → west.key, west.csr
    sign_request   → west.crt
                     west.crt, authority.crt       →  read_identity → Identity
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import UserError
from isthmus.job.fields import CLOUD_NAME
from isthmus.job.load import replace_file

AUTHORITY_DAYS = 3650
CLOUD_DAYS = 365
THROWAWAY_DAYS = 7

# A cloud whose clock is a little behind must accept what was signed a moment ago.
_CLOCK_SKEW = timedelta(minutes=5)
_MAX_FILE_BYTES = 65536
_Parsed = TypeVar("_Parsed")
Kind = Literal["authority", "cloud", "request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a cloud shows to its peers and believes them by, as PEM."""

    cloud: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    authority_pem: bytes

    def secret(self, purpose: str) -> bytes:
        """Return a secret that only holders of the cloud's private key can know, another for each purpose."""
        derivation = HKDF(algorithm=SHA256(), length=32, salt=None, info=f"isthmus {purpose}".encode())
        return derivation.derive(self.key_pem)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What a certificate folder holds under one name, and what is wrong with it if anything is."""

    name: str
    kind: Kind
    expires: datetime | None = None
    days_left: int | None = None
    problem: str | None = None
    cure: str | None = None


# What the operator, a cloud and the user of throw-away certificates do.


def make_authority(folder: Path, *, force: bool = False) -> Path:
    """Make the operator's key and self-signed certificate; return the path of the certificate."""
    path = folder / "authority.crt"
    for one in (folder / "authority.key", path):
        _refuse_to_replace(one, force=force, loss="what the old authority signed is then void")
    authority = Authority.create(days=AUTHORITY_DAYS)
    _write(folder / "authority.key", _key_pem(authority.key), mode=0o600)
    _write(path, authority.certificate.public_bytes(Encoding.PEM))
    return path


def make_request(folder: Path, cloud: str, *, force: bool = False) -> Path:
    """Make a cloud's key and the request to sign it; return the path of the request."""
    _check_cloud_name(cloud)
    key_path, request_path = folder / f"{cloud}.key", folder / f"{cloud}.csr"
    _refuse_to_replace(key_path, force=force, loss=f"{cloud} then needs a new certificate")
    key = new_key()
    _write(key_path, _key_pem(key), mode=0o600)
    request = x509.CertificateSigningRequestBuilder(_common_name(cloud)).sign(key, SHA256())
    _write(request_path, request.public_bytes(Encoding.PEM))
    return request_path


def sign_request(request_path: Path, *, cloud: str, folder: Path, days: int = CLOUD_DAYS) -> Path:
    """Sign a cloud's request with the authority in `folder`; return the path of the certificate.

    Only the public key is taken from the request; every name comes from `cloud`, which the operator gives.
    """
    _check_cloud_name(cloud)
    authority = _load_signer(folder, days=days)
    subject, public_key = _load_request(request_path)
    if subject != _common_name(cloud):
        raise UserError(
            f"{request_path} asks for {subject.rfc4514_string()!r}, not for cloud {cloud!r}",
            hint=f"give the cloud that made it, or ask {cloud} for a request: isthmus certs request {cloud}",
        )
    path = folder / f"{cloud}.crt"
    certificate = authority.issue(cloud, public_key, days=days)
    _write(path, certificate.public_bytes(Encoding.PEM))
    return path


def read_identity(folder: Path, cloud: str) -> Identity:
    """Read and verify a cloud's key and certificates; the identity holds exactly what was verified."""
    _check_cloud_name(cloud)
    # First, since what is missing before anything was made is the key.
    _load_key(folder, cloud)
    authority = _load_certificate(folder, "authority")
    certificate = _load_certificate(folder, cloud, authority=authority)
    return _identity(cloud, _load_key(folder, cloud, of=certificate), certificate, authority)


def throwaway(clouds: Sequence[str]) -> dict[str, Identity]:
    """Return identities for clouds that all run here, under an authority whose key nobody keeps."""
    authority = Authority.create(days=THROWAWAY_DAYS)
    identities = {}
    for cloud in clouds:
        _check_cloud_name(cloud)
        key = new_key()
        certificate = authority.issue(cloud, key.public_key(), days=THROWAWAY_DAYS)
        identities[cloud] = _identity(cloud, key, certificate, authority.certificate)
    return identities


def inspect_folder(folder: Path) -> tuple[CertificateFacts, ...]:
    """Return the facts of every name in a certificate folder, the authority first."""
    try:
        stems = {path.stem for path in folder.iterdir() if path.suffix in {".crt", ".csr", ".key"}}
    except OSError as error:
        hint = f"name the folder of certificates, or make one: isthmus certs request CLOUD --folder {folder}"
        raise UserError(f"{folder} cannot be listed: {error.strerror}", hint=hint) from None
    names = ["authority", *sorted(stems - {"authority"})]
    return tuple(_inspect(folder, name) for name in names)


def key_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the public key in a signing request, to be compared by another channel."""
    _, public_key = _load_request(path)
    key_der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key_der).hexdigest()


def _inspect(folder: Path, name: str) -> CertificateFacts:
    path = folder / f"{name}.crt"
    kind: Kind = "authority" if name == "authority" else "cloud" if path.exists() else "request"
    facts = CertificateFacts(name=name, kind=kind)
    try:
        expires = _parse_certificate(path, cure=_missing_cure(folder, name)).not_valid_after_utc
        facts = replace(facts, expires=expires, days_left=(expires - utc_now()).days)
        _check_use(folder, name)
    except UserError as error:
        facts = replace(facts, problem=error.message, cure=error.hint)
    return facts


def _check_use(folder: Path, name: str) -> None:
    """Raise UserError if the files of this name cannot be used for what they are here for."""
    certificate = authority = _load_certificate(folder, "authority")
    if name != "authority":
        _check_cloud_name(name)
        certificate = _load_certificate(folder, name, authority=authority)
    if (folder / f"{name}.key").exists():
        _load_key(folder, name, of=certificate)


# X.509.


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The key and certificate of the one who vouches for every cloud."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, *, days: int) -> "Authority":
        """Return a new authority that may sign clouds, but no further authority."""
        key, name = new_key(), _common_name("Isthmus authority")
        builder = _builder(name, key.public_key(), is_authority=True, days=days).issuer_name(name)
        return cls(key=key, certificate=builder.sign(key, SHA256()))

    def issue(self, cloud: str, public_key: ec.EllipticCurvePublicKey, *, days: int) -> x509.Certificate:
        """Return a certificate for a cloud, by which its ranks and its gateway both serve and dial."""
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            _builder(_common_name(cloud), public_key, is_authority=False, days=days)
            .issuer_name(self.certificate.subject)
            .add_extension(purposes, critical=False)
            .add_extension(_alternative_names(cloud), critical=False)
            .add_extension(issuer_key, critical=False)
        )
        return builder.sign(self.key, SHA256())


def _builder(
    subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *, is_authority: bool, days: int
) -> x509.CertificateBuilder:
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
        **dict.fromkeys(unused, False),
    )
    constraints = x509.BasicConstraints(is_authority, 0 if is_authority else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - _CLOCK_SKEW)
        .not_valid_after(utc_now() + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative_names(cloud: str) -> x509.SubjectAlternativeName:
    """Return the server names that a cloud's certificate stands for."""
    return x509.SubjectAlternativeName([x509.DNSName(f"{cloud}.isthmus"), x509.DNSName(f"*.{cloud}.isthmus")])


def _identity(
    cloud: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authority: x509.Certificate
) -> Identity:
    return Identity(
        cloud=cloud,
        key_pem=_key_pem(key),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        authority_pem=authority.public_bytes(Encoding.PEM),
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


# Files and their checks.


def _load_signer(folder: Path, *, days: int) -> Authority:
    """Return the authority of a folder, ready to sign for this many days."""
    certificate = _load_certificate(folder, "authority")
    key = _load_key(folder, "authority", of=certificate)
    days_left = (certificate.not_valid_after_utc - utc_now()).days
    if days > days_left:
        raise UserError(
            f"the authority itself expires before {days} days are over",
            hint=f"use --days {days_left} or fewer",
        )
    return Authority(key=key, certificate=certificate)


def _load_certificate(
    folder: Path, name: str, *, authority: x509.Certificate | None = None
) -> x509.Certificate:
    """Return the certificate of this name, signed by the authority for it or its own, and valid now."""
    path, cure = folder / f"{name}.crt", _missing_cure(folder, name)
    certificate = _parse_certificate(path, cure=cure)
    if authority is None:
        if not _is_signed_by(certificate, certificate):
            raise UserError(f"{path} is not the certificate of an authority", hint=cure)
        cure = (
            f"make a new one, isthmus certs authority --folder {folder} --force, and sign every cloud again"
        )
    elif not _is_signed_by(certificate, authority):
        hint = "take both files from the same operator"
        raise UserError(f"{path} was not signed by {folder / 'authority.crt'}", hint=hint)
    else:
        _check_names(certificate, path, name)
    now, starts, expires = utc_now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < starts:
        raise UserError(
            f"{path} is valid from {starts:%Y-%m-%d %H:%M} UTC, and the clock here says {now:%Y-%m-%d %H:%M}",
            hint="set the clock of this machine",
        )
    if now > expires:
        raise UserError(f"{path} expired on {expires:%Y-%m-%d %H:%M} UTC", hint=cure)
    return certificate


def _check_names(certificate: x509.Certificate, path: Path, cloud: str) -> None:
    names = [one.value for one in certificate.extensions if one.oid == x509.SubjectAlternativeName.oid]
    if certificate.subject != _common_name(cloud) or names != [_alternative_names(cloud)]:
        raise UserError(
            f"{path} was signed for {certificate.subject.rfc4514_string()!r}, not for cloud {cloud!r}",
            hint=f"put the certificate there that the operator signed for {cloud}",
        )


def _parse_certificate(path: Path, *, cure: str) -> x509.Certificate:
    """Return the first certificate of a file, not yet to be trusted."""

    def parse(pem: bytes) -> x509.Certificate:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # a key of an unknown kind shows only when it is read
        return certificate

    return _load(path, parse, form="a certificate in PEM", cure=cure)


def _load_key(folder: Path, name: str, *, of: x509.Certificate | None = None) -> ec.EllipticCurvePrivateKey:
    """Return the key of this name; it must be that of the certificate, if one is given."""

    def parse(pem: bytes) -> ec.EllipticCurvePrivateKey:
        key = load_pem_private_key(pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError
        return key

    path = folder / f"{name}.key"
    cure = f"make one: isthmus certs request {name} --folder {folder}"
    if name == "authority":
        cure = "sign where the authority was made; its key is only there"
    key = _load(path, parse, form="an unencrypted elliptic-curve key in PEM", cure=cure)
    if of is not None and key.public_key() != of.public_key():
        hint = f"bring back the key that was there before, or {_missing_cure(folder, name)}"
        raise UserError(f"{path} is not the key of {path.with_suffix('.crt')}", hint=hint)
    return key


def _load_request(path: Path) -> tuple[x509.Name, ec.EllipticCurvePublicKey]:
    """Return what a request asks for and the key it proves to hold; nothing else in it counts."""

    def parse(pem: bytes) -> tuple[x509.Name, ec.EllipticCurvePublicKey]:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_p256 = isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == ec.SECP256R1.name
        if not is_p256 or not request.is_signature_valid:
            raise ValueError
        return request.subject, cast("ec.EllipticCurvePublicKey", key)

    cure = "ask the cloud for the .csr file that isthmus certs request made"
    return _load(path, parse, form="a sound signing request for a P-256 key in PEM", cure=cure)


def _load(path: Path, parse: Callable[[bytes], _Parsed], *, form: str, cure: str) -> _Parsed:
    try:
        with path.open("rb") as file:
            return parse(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", hint=cure) from None
    except OSError as error:
        hint = "name a file, and run as a user who may read it"
        raise UserError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise UserError(f"{path} is not {form}", hint=cure) from None


def _missing_cure(folder: Path, name: str) -> str:
    """Return how to come by the certificate of this name."""
    request = folder / f"{name}.csr"
    if name == "authority":
        return f"copy it from the operator, who makes it with: isthmus certs authority --folder {folder}"
    if request.exists():
        return f"send {request} to the operator, who runs: isthmus certs sign {name}.csr --cloud {name}"
    return f"make a request for the operator to sign: isthmus certs request {name} --folder {folder}"


def _check_cloud_name(cloud: str) -> None:
    if not re.fullmatch(CLOUD_NAME, cloud):
        raise UserError(
            f"{cloud!r} cannot be the name of a cloud",
            hint="use lower-case letters, digits and inner hyphens, 63 at most; not 'authority' or 'isthmus'",
        )


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _refuse_to_replace(path: Path, *, force: bool, loss: str) -> None:
    if os.access(path, os.F_OK) and not force:
        raise UserError(f"{path} exists already", hint=f"keep it, or add --force; {loss}")


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    replace_file(path, content.decode(), mode=mode)


def utc_now() -> datetime:
    return datetime.now(UTC)
