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
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
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

from isthmus.errors import CertificateError

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


CLOUD_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

_MAX_FILE_BYTES = 65536
_Parsed = TypeVar("_Parsed")


def check_cloud_name(cloud: str) -> None:
    """Raise CertificateError unless a cloud of this name can have a certificate."""
    if not CLOUD_NAME.fullmatch(cloud) or cloud in {"authority", "isthmus"}:
        raise CertificateError(
            f"{cloud!r} cannot be the name of a cloud",
            hint="use lower-case letters, digits and inner hyphens, 63 at most; not 'authority' or 'isthmus'",
        )


def load_signer(folder: Path, *, days: int, now: datetime) -> Authority:
    """Return the authority of a folder, ready to sign for this many days."""
    certificate = load_authority(folder, now=now)
    key = load_key(folder / "authority.key", cure="sign where the authority was made; its key is only there")
    if key.public_key() != certificate.public_key():
        raise CertificateError(
            f"{folder / 'authority.key'} is not the key of {folder / 'authority.crt'}",
            hint="bring back both files from one backup",
        )
    days_left = (certificate.not_valid_after_utc - now).days
    if days > days_left:
        raise CertificateError(
            f"the authority itself expires before {days} days are over",
            hint=f"use --days {days_left} or fewer",
        )
    return Authority(key=key, certificate=certificate)


def load_authority(folder: Path, *, now: datetime) -> x509.Certificate:
    """Return the authority's certificate, valid at this time."""
    path = folder / "authority.crt"
    certificate = load_certificate(path, cure=missing_cure(folder, "authority"))
    if not _is_signed_by(certificate, certificate):
        raise CertificateError(
            f"{path} is not the certificate of an authority", hint=missing_cure(folder, "authority")
        )
    cure = f"make a new one, isthmus certs authority --folder {folder} --force, and sign every cloud again"
    _check_validity(certificate, path, now=now, cure=cure)
    return certificate


def load_cloud_certificate(
    folder: Path, cloud: str, *, authority: x509.Certificate, now: datetime
) -> x509.Certificate:
    """Return a cloud's certificate, signed by this authority for this cloud and valid at this time."""
    check_cloud_name(cloud)
    path = folder / f"{cloud}.crt"
    cure = missing_cure(folder, cloud)
    certificate = load_certificate(path, cure=cure)
    if not _is_signed_by(certificate, authority):
        raise CertificateError(
            f"{path} was not signed by {folder / 'authority.crt'}",
            hint="take both files from the same operator",
        )
    _check_names(certificate, path, cloud)
    _check_validity(certificate, path, now=now, cure=cure)
    return certificate


def load_certificate(path: Path, *, cure: str) -> x509.Certificate:
    """Return the first certificate of a file, not yet to be trusted."""

    def parse(pem: bytes) -> x509.Certificate:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # a key of an unknown kind shows only when it is read
        return certificate

    return _load(path, parse, form="a certificate in PEM", cure=cure)


def load_key(path: Path, *, cure: str) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a file."""

    def parse(pem: bytes) -> ec.EllipticCurvePrivateKey:
        key = load_pem_private_key(pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError
        return key

    return _load(path, parse, form="an unencrypted elliptic-curve key in PEM", cure=cure)


def load_request(path: Path) -> tuple[x509.Name, ec.EllipticCurvePublicKey]:
    """Return what a request asks for and the key it proves to hold; nothing else in it counts."""

    def parse(pem: bytes) -> tuple[x509.Name, ec.EllipticCurvePublicKey]:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP256R1.name:
            raise ValueError
        if not request.is_signature_valid:
            raise ValueError
        return request.subject, key

    cure = "ask the cloud for the .csr file that isthmus certs request made"
    return _load(path, parse, form="a sound signing request for a P-256 key in PEM", cure=cure)


def missing_cure(folder: Path, name: str) -> str:
    """Return how to come by the certificate of this name."""
    request = folder / f"{name}.csr"
    if name == "authority":
        return f"copy it from the operator, who makes it with: isthmus certs authority --folder {folder}"
    if request.exists():
        return f"send {request} to the operator, who runs: isthmus certs sign {name}.csr --cloud {name}"
    return f"make a request for the operator to sign: isthmus certs request {name} --folder {folder}"


def refuse_to_replace(path: Path, *, force: bool, loss: str) -> None:
    """Raise CertificateError if the file exists and the user did not say to replace it."""
    if os.access(path, os.F_OK) and not force:
        raise CertificateError(f"{path} exists already", hint=f"keep it, or add --force; {loss}")


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key that only this user can read."""
    write(path, key_pem(key), mode=0o600)


def write_public(path: Path, thing: x509.Certificate | x509.CertificateSigningRequest) -> None:
    """Write a certificate or a request, which everybody may read."""
    write(path, thing.public_bytes(Encoding.PEM), mode=0o644)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as text, unencrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write(path: Path, content: bytes, *, mode: int) -> None:
    """Put a file in place whole or not at all, at no time open to more than `mode` allows."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(beside).replace(path)
        finally:
            Path(beside).unlink(missing_ok=True)
    except OSError as error:
        hint = "choose a folder that this user may write to"
        raise CertificateError(f"{path} cannot be written: {error.strerror}", hint=hint) from None


def _load(path: Path, parse: Callable[[bytes], _Parsed], *, form: str, cure: str) -> _Parsed:
    try:
        with path.open("rb") as file:
            return parse(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        raise CertificateError(f"{path} is missing", hint=cure) from None
    except OSError as error:
        hint = "name a file, and run as a user who may read it"
        raise CertificateError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise CertificateError(f"{path} is not {form}", hint=cure) from None


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_names(certificate: x509.Certificate, path: Path, cloud: str) -> None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = None
    if certificate.subject != common_name(cloud) or names != alternative_names(cloud):
        subject = certificate.subject.rfc4514_string()
        raise CertificateError(
            f"{path} was signed for {subject!r}, not for cloud {cloud!r} and its servers",
            hint=f"put the certificate there that the operator signed for {cloud}",
        )


def _check_validity(certificate: x509.Certificate, path: Path, *, now: datetime, cure: str) -> None:
    starts, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < starts:
        raise CertificateError(
            f"{path} is valid from {starts:%Y-%m-%d %H:%M} UTC, and the clock here says {now:%Y-%m-%d %H:%M}",
            hint="set the clock of this machine",
        )
    if now > expires:
        raise CertificateError(f"{path} expired on {expires:%Y-%m-%d %H:%M} UTC", hint=cure)


AUTHORITY_DAYS = 3650
CLOUD_DAYS = 365
THROWAWAY_DAYS = 7

_SERVER_NAME = re.compile(
    rf"(rank-(?:0|[1-9][0-9]{{0,8}})|gateway)\.({CLOUD_NAME.pattern})\.isthmus", re.ASCII
)


def gateway_name(cloud: str) -> str:
    """Return the TLS server name of a cloud's gateway itself."""
    return f"gateway.{cloud}.isthmus"


def parse_server_name(text: str) -> tuple[str, str] | None:
    """Return the cloud and the part of it that is meant (`rank-3`, `gateway`), or None for any other name."""
    match = _SERVER_NAME.fullmatch(text)
    return (match[2], match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a cloud shows to its peers and believes them by, as PEM."""

    cloud: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    authority_pem: bytes

    def ssl_server_context(self) -> ssl.SSLContext:
        """Return a context that accepts only clients whose certificate our authority signed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load_into(context)

    def ssl_client_context(self) -> ssl.SSLContext:
        """Return a context that shows our certificate and checks the server's authority and name."""
        return self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def secret(self, purpose: str) -> bytes:
        """Return a secret that only holders of the cloud's private key can know, another for each purpose."""
        derivation = HKDF(algorithm=SHA256(), length=32, salt=None, info=f"isthmus {purpose}".encode())
        return derivation.derive(self.key_pem)

    def _load_into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.authority_pem.decode())
        # The ssl module reads keys from files only; this folder is ours alone and gone on return.
        with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
            chain = Path(folder, "chain.pem")
            write(chain, self.key_pem + self.certificate_pem, mode=0o600)
            context.load_cert_chain(chain)
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What a certificate folder holds under one name, and what is wrong with it if anything is."""

    name: str
    kind: Literal["authority", "cloud", "request"]
    starts: datetime | None = None
    expires: datetime | None = None
    days_left: int | None = None
    problem: str | None = None
    cure: str | None = None


def make_authority(folder: Path, *, force: bool = False, now: datetime | None = None) -> Path:
    """Make the operator's key and self-signed certificate; return the path of the certificate."""
    key_path, certificate_path = folder / "authority.key", folder / "authority.crt"
    for path in (key_path, certificate_path):
        refuse_to_replace(path, force=force, loss="what the old authority signed is then void")
    authority = Authority.create(days=AUTHORITY_DAYS, now=_time(now))
    write_key(key_path, authority.key)
    write_public(certificate_path, authority.certificate)
    return certificate_path


def make_request(folder: Path, cloud: str, *, force: bool = False) -> Path:
    """Make a cloud's key and the request to sign it; return the path of the request."""
    check_cloud_name(cloud)
    key_path, request_path = folder / f"{cloud}.key", folder / f"{cloud}.csr"
    refuse_to_replace(key_path, force=force, loss=f"{cloud} then needs a new certificate")
    key = new_key()
    write_key(key_path, key)
    write_public(request_path, signing_request(cloud, key))
    return request_path


def sign_request(
    request_path: Path, *, cloud: str, folder: Path, days: int = CLOUD_DAYS, now: datetime | None = None
) -> Path:
    """Sign a cloud's request with the authority in `folder`; return the path of the certificate.

    Only the public key is taken from the request; every name comes from `cloud`, which the operator gives.
    """
    check_cloud_name(cloud)
    authority = load_signer(folder, days=days, now=_time(now))
    subject, public_key = load_request(request_path)
    if subject != common_name(cloud):
        raise CertificateError(
            f"{request_path} asks for {subject.rfc4514_string()!r}, not for cloud {cloud!r}",
            hint=f"give the cloud that made it, or ask {cloud} for a request: isthmus certs request {cloud}",
        )
    path = folder / f"{cloud}.crt"
    write_public(path, authority.issue(cloud, public_key, days=days, now=_time(now)))
    return path


def read_identity(folder: Path, cloud: str, *, now: datetime | None = None) -> Identity:
    """Read and verify a cloud's key and certificates; the identity holds exactly what was verified."""
    check_cloud_name(cloud)
    key_path = folder / f"{cloud}.key"
    key = load_key(key_path, cure=f"make one: isthmus certs request {cloud} --folder {folder}")
    authority = load_authority(folder, now=_time(now))
    certificate = load_cloud_certificate(folder, cloud, authority=authority, now=_time(now))
    if key.public_key() != certificate.public_key():
        raise CertificateError(
            f"{key_path} is not the key of {folder / f'{cloud}.crt'}",
            hint=f"bring back the key that was there before, or {missing_cure(folder, cloud)}",
        )
    return _identity(cloud, key, certificate, authority)


def throwaway(clouds: Sequence[str], *, now: datetime | None = None) -> dict[str, Identity]:
    """Return identities for clouds that all run here, under an authority whose key nobody keeps."""
    authority = Authority.create(days=THROWAWAY_DAYS, now=_time(now))
    identities = {}
    for cloud in clouds:
        check_cloud_name(cloud)
        key = new_key()
        certificate = authority.issue(cloud, key.public_key(), days=THROWAWAY_DAYS, now=_time(now))
        identities[cloud] = _identity(cloud, key, certificate, authority.certificate)
    return identities


def inspect_folder(folder: Path, *, now: datetime | None = None) -> tuple[CertificateFacts, ...]:
    """Return the facts of every name in a certificate folder, the authority first."""
    try:
        stems = {path.stem for path in folder.iterdir() if path.suffix in {".crt", ".csr", ".key"}}
    except OSError as error:
        hint = f"name the folder of certificates, or make one: isthmus certs request CLOUD --folder {folder}"
        raise CertificateError(f"{folder} cannot be listed: {error.strerror}", hint=hint) from None
    names = ["authority", *sorted(stems - {"authority"})]
    return tuple(_inspect(folder, name, now=_time(now)) for name in names)


def key_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the public key in a signing request, to be compared by another channel."""
    _, public_key = load_request(path)
    key_der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key_der).hexdigest()


def _identity(
    cloud: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authority: x509.Certificate
) -> Identity:
    return Identity(
        cloud=cloud,
        key_pem=key_pem(key),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        authority_pem=authority.public_bytes(Encoding.PEM),
    )


def _inspect(folder: Path, name: str, *, now: datetime) -> CertificateFacts:
    path = folder / f"{name}.crt"
    kind: Literal["authority", "cloud", "request"] = "authority" if name == "authority" else "cloud"
    if kind == "cloud" and not path.exists():
        kind = "request"
    try:
        certificate = load_certificate(path, cure=missing_cure(folder, name))
    except CertificateError as error:
        return CertificateFacts(name=name, kind=kind, problem=error.message, cure=error.hint)
    flaw = _flaw(folder, name, now=now)
    return CertificateFacts(
        name=name,
        kind=kind,
        starts=certificate.not_valid_before_utc,
        expires=certificate.not_valid_after_utc,
        days_left=(certificate.not_valid_after_utc - now).days,
        problem=flaw.message if flaw else None,
        cure=flaw.hint if flaw else None,
    )


def _flaw(folder: Path, name: str, *, now: datetime) -> CertificateError | None:
    """Return what keeps the files of this name from being used for what they are here for."""
    has_key = (folder / f"{name}.key").exists()
    try:
        if has_key and name == "authority":
            load_signer(folder, days=0, now=now)
        elif has_key:
            read_identity(folder, name, now=now)
        else:
            authority = load_authority(folder, now=now)
            if name != "authority":
                load_cloud_certificate(folder, name, authority=authority, now=now)
    except CertificateError as error:
        return error
    return None


def _time(now: datetime | None) -> datetime:
    return now or datetime.now(UTC)
