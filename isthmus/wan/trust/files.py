"""Keys, requests and certificates as files: written whole and private, trusted only after every check."""

import os
import re
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from isthmus.errors import CertificateError
from isthmus.wan.trust.authority import Authority, alternative_names, common_name

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
