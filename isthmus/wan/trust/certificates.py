"""The private authority by which clouds know each other: keys, signing requests, certificates, identities.

The operator holds `authority.key` and signs; each cloud makes its own key, which never leaves it:

    at the operator                                   at cloud west
    make_authority → authority.key, authority.crt
                                         west.csr  ←  make_request → west.key, west.csr
    sign_request   → west.crt
                     west.crt, authority.crt       →  read_identity → Identity
"""

import hashlib
import re
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from isthmus.errors import CertificateError
from isthmus.wan.trust import files
from isthmus.wan.trust.authority import Authority, common_name, new_key, signing_request

AUTHORITY_DAYS = 3650
CLOUD_DAYS = 365
THROWAWAY_DAYS = 7

_SERVER_NAME = re.compile(
    rf"(rank-(?:0|[1-9][0-9]{{0,8}})|gateway)\.({files.CLOUD_NAME.pattern})\.isthmus", re.ASCII
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
            files.write(chain, self.key_pem + self.certificate_pem, mode=0o600)
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
        files.refuse_to_replace(path, force=force, loss="what the old authority signed is then void")
    authority = Authority.create(days=AUTHORITY_DAYS, now=_time(now))
    files.write_key(key_path, authority.key)
    files.write_public(certificate_path, authority.certificate)
    return certificate_path


def make_request(folder: Path, cloud: str, *, force: bool = False) -> Path:
    """Make a cloud's key and the request to sign it; return the path of the request."""
    files.check_cloud_name(cloud)
    key_path, request_path = folder / f"{cloud}.key", folder / f"{cloud}.csr"
    files.refuse_to_replace(key_path, force=force, loss=f"{cloud} then needs a new certificate")
    key = new_key()
    files.write_key(key_path, key)
    files.write_public(request_path, signing_request(cloud, key))
    return request_path


def sign_request(
    request_path: Path, *, cloud: str, folder: Path, days: int = CLOUD_DAYS, now: datetime | None = None
) -> Path:
    """Sign a cloud's request with the authority in `folder`; return the path of the certificate.

    Only the public key is taken from the request; every name comes from `cloud`, which the operator gives.
    """
    files.check_cloud_name(cloud)
    authority = files.load_signer(folder, days=days, now=_time(now))
    subject, public_key = files.load_request(request_path)
    if subject != common_name(cloud):
        raise CertificateError(
            f"{request_path} asks for {subject.rfc4514_string()!r}, not for cloud {cloud!r}",
            hint=f"give the cloud that made it, or ask {cloud} for a request: isthmus certs request {cloud}",
        )
    path = folder / f"{cloud}.crt"
    files.write_public(path, authority.issue(cloud, public_key, days=days, now=_time(now)))
    return path


def read_identity(folder: Path, cloud: str, *, now: datetime | None = None) -> Identity:
    """Read and verify a cloud's key and certificates; the identity holds exactly what was verified."""
    files.check_cloud_name(cloud)
    key_path = folder / f"{cloud}.key"
    key = files.load_key(key_path, cure=f"make one: isthmus certs request {cloud} --folder {folder}")
    authority = files.load_authority(folder, now=_time(now))
    certificate = files.load_cloud_certificate(folder, cloud, authority=authority, now=_time(now))
    if key.public_key() != certificate.public_key():
        raise CertificateError(
            f"{key_path} is not the key of {folder / f'{cloud}.crt'}",
            hint=f"bring back the key that was there before, or {files.missing_cure(folder, cloud)}",
        )
    return _identity(cloud, key, certificate, authority)


def throwaway(clouds: Sequence[str], *, now: datetime | None = None) -> dict[str, Identity]:
    """Return identities for clouds that all run here, under an authority whose key nobody keeps."""
    authority = Authority.create(days=THROWAWAY_DAYS, now=_time(now))
    identities = {}
    for cloud in clouds:
        files.check_cloud_name(cloud)
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
    _, public_key = files.load_request(path)
    key_der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key_der).hexdigest()


def _identity(
    cloud: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authority: x509.Certificate
) -> Identity:
    return Identity(
        cloud=cloud,
        key_pem=files.key_pem(key),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        authority_pem=authority.public_bytes(Encoding.PEM),
    )


def _inspect(folder: Path, name: str, *, now: datetime) -> CertificateFacts:
    path = folder / f"{name}.crt"
    kind: Literal["authority", "cloud", "request"] = "authority" if name == "authority" else "cloud"
    if kind == "cloud" and not path.exists():
        kind = "request"
    try:
        certificate = files.load_certificate(path, cure=files.missing_cure(folder, name))
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
            files.load_signer(folder, days=0, now=now)
        elif has_key:
            read_identity(folder, name, now=now)
        else:
            authority = files.load_authority(folder, now=now)
            if name != "authority":
                files.load_cloud_certificate(folder, name, authority=authority, now=now)
    except CertificateError as error:
        return error
    return None


def _time(now: datetime | None) -> datetime:
    return now or datetime.now(UTC)
