import os
import re
import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.plan.types import Member
from isthmus.wan import certificates
from isthmus.wan.certificates import (
    inspect_folder,
    key_fingerprint,
    make_authority,
    make_request,
    read_identity,
    sign_request,
    throwaway,
)
from isthmus.wan.handshake import GATEWAY_RANK, parse_server_name, server_name
from tests.wan.tls import client_context, server_context

NOW = datetime.now(UTC).replace(microsecond=0)
LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "certs"
    with pytest.MonkeyPatch.context() as patch:
        # This module may be imported long before its tests run.
        patch.setattr(certificates, "utc_now", lambda: NOW)
        make_authority(folder)
        for cloud in ("east", "west"):
            sign_request(make_request(folder, cloud), cloud=cloud, folder=folder)
    return folder


SetClock = Callable[[timedelta], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    return lambda later: monkeypatch.setattr(certificates, "utc_now", lambda: NOW + later)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "certs"))


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def write_request(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *names: str) -> Path:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "west")])
    builder = x509.CertificateSigningRequestBuilder(subject)
    if names:
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = builder.add_extension(alternatives, critical=True)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


def point(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> dict[str, object]:
    """Let two contexts shake hands in memory; return the client's certificate as the server sees it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=name),
    ]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not waiting
    return dict(ends[0].getpeercert() or {})


@given(cloud=LABEL, rank=st.integers(0, 10**6))
def test_server_names_parse_back(cloud: str, rank: int) -> None:
    assert parse_server_name(server_name(cloud, rank)) == Member(cloud, rank)
    assert parse_server_name(f"gateway.{cloud}.isthmus") == Member(cloud, GATEWAY_RANK)
    assert server_name(cloud, GATEWAY_RANK) == f"gateway.{cloud}.isthmus"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "east.isthmus",
        "rank-.east.isthmus",
        "rank-01.east.isthmus",
        "rank--1.east.isthmus",
        "rank-1.EAST.isthmus",
        "rank-1.-east.isthmus",
        "rank-1.east.isthmus.",
        "rank-1.east.isthmus\n",
        "rank-1.a.east.isthmus",
        "rank-٣.east.isthmus",
        "*.east.isthmus",
        "rank-1.east.example",
        f"rank-1.{'e' * 64}.isthmus",
        f"rank-{10**9}.east.isthmus",
    ],
)
def test_other_server_names_are_none(text: str) -> None:
    assert parse_server_name(text) is None


def test_authority_may_sign_clouds_but_no_further_authority(made: Path) -> None:
    authority = load(made / "authority.crt")
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert not usage.value.digital_signature
    assert timedelta(days=3649) < authority.not_valid_after_utc - NOW < timedelta(days=3651)


def test_certificate_of_a_cloud_serves_and_dials_under_its_names_only(made: Path) -> None:
    certificate = load(made / "east.crt")
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    public_key = certificate.public_key()
    assert certificate.subject.rfc4514_string() == "CN=east"
    assert names.get_values_for_type(x509.DNSName) == ["east.isthmus", "*.east.isthmus"]
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert usage.critical
    assert usage.value.digital_signature
    assert not usage.value.key_cert_sign
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    assert public_key.curve.name == "secp256r1"


def test_validity_starts_minutes_back_and_lasts_as_asked(folder: Path, set_clock: SetClock) -> None:
    set_clock(timedelta())
    path = sign_request(folder / "west.csr", cloud="west", folder=folder, days=20)
    certificate = load(path)
    assert timedelta(minutes=1) < NOW - certificate.not_valid_before_utc < timedelta(hours=1)
    assert timedelta(days=19, hours=23) < certificate.not_valid_after_utc - NOW <= timedelta(days=20)


def test_keys_are_private_and_nothing_else_is_left(made: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    keys = dict.fromkeys(("authority.key", "east.key", "west.key"), 0o600)
    others = dict.fromkeys(("authority.crt", "east.crt", "east.csr", "west.crt", "west.csr"), 0o644)
    assert modes == keys | others
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("keep", ["authority.key", "authority.crt"])
def test_authority_is_replaced_only_by_force(folder: Path, keep: str) -> None:
    before = (folder / keep).read_bytes()
    (folder / ({"authority.key", "authority.crt"} - {keep}).pop()).unlink()
    with pytest.raises(UserError, match=f"{keep} exists already"):
        make_authority(folder)
    assert (folder / keep).read_bytes() == before
    make_authority(folder, force=True)
    assert (folder / keep).read_bytes() != before


def test_key_of_a_cloud_is_replaced_only_by_force(folder: Path) -> None:
    before = (folder / "west.key").read_bytes()
    with pytest.raises(UserError, match=r"west\.key exists already") as caught:
        make_request(folder, "west")
    assert "--force" in str(caught.value.hint)
    assert (folder / "west.key").read_bytes() == before
    make_request(folder, "west", force=True)
    assert (folder / "west.key").read_bytes() != before


def test_failed_write_leaves_the_old_file_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"west\.key cannot be written: No space left on device"):
        make_request(folder, "west", force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "name", ["", "East", "a.b", "-a", "a-", "ä", "isthmus", "authority", "x" * 64, "../x", "a\n"]
)
def test_names_that_no_certificate_can_carry_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name of a cloud"):
        make_request(tmp_path, name)
    with pytest.raises(UserError, match="cannot be the name of a cloud"):
        throwaway([name])
    assert list(tmp_path.iterdir()) == []


def test_signing_takes_no_name_from_the_request(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = write_request(folder / "west.csr", key, "east.isthmus", "*.east.isthmus", "example.com")
    certificate = load(sign_request(request, cloud="west", folder=folder))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["west.isthmus", "*.west.isthmus"]
    assert certificate.public_key() == key.public_key()


def test_signing_refuses_a_request_of_another_cloud(folder: Path) -> None:
    before = (folder / "east.crt").read_bytes()
    with pytest.raises(UserError, match="asks for 'CN=west', not for cloud 'east'"):
        sign_request(folder / "west.csr", cloud="east", folder=folder)
    assert (folder / "east.crt").read_bytes() == before


@pytest.mark.parametrize("curve", [ec.SECP384R1(), None])
def test_signing_refuses_other_kinds_of_key(folder: Path, curve: ec.EllipticCurve | None) -> None:
    key = ec.generate_private_key(curve) if curve else rsa.generate_private_key(65537, 2048)
    request = write_request(folder / "west.csr", key)
    with pytest.raises(UserError, match="is not a sound signing request for a P-256 key"):
        sign_request(request, cloud="west", folder=folder)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_of_a_request_changes_what_is_signed(folder: Path, data: st.DataObject) -> None:
    request = x509.load_pem_x509_csr((folder / "west.csr").read_bytes())
    der = bytearray(request.public_bytes(Encoding.DER))
    index = data.draw(st.integers(0, len(der) - 1))
    der[index] ^= data.draw(st.integers(1, 255))
    changed = folder / "changed.csr"
    changed.write_text(ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST"))
    try:
        certificate = load(sign_request(changed, cloud="west", folder=folder))
    except UserError:
        return
    # The count of unused bits before the signature is the one byte that may change: it says nothing.
    assert certificate.public_key() == request.public_key()


def test_a_request_under_a_signature_of_another_key_is_refused(folder: Path) -> None:
    west = x509.load_pem_x509_csr((folder / "west.csr").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    forged = write_request(folder / "forged.csr", key)
    der = x509.load_pem_x509_csr(forged.read_bytes()).public_bytes(Encoding.DER)
    stolen = der.replace(point(key.public_key()), point(west.public_key()))
    forged.write_text(ssl.DER_cert_to_PEM_cert(stolen).replace("CERTIFICATE", "CERTIFICATE REQUEST"))
    assert stolen != der
    with pytest.raises(UserError, match="is not a sound signing request"):
        sign_request(forged, cloud="west", folder=folder)


def test_signing_needs_the_key_of_the_authority(folder: Path) -> None:
    (folder / "authority.key").unlink()
    with pytest.raises(UserError, match=r"authority\.key is missing") as caught:
        sign_request(folder / "west.csr", cloud="west", folder=folder)
    assert "where the authority was made" in str(caught.value.hint)


def test_signing_needs_both_files_of_one_authority(folder: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "authority.key", folder)
    with pytest.raises(UserError, match=r"authority\.key is not the key of"):
        sign_request(folder / "west.csr", cloud="west", folder=folder)


def test_no_certificate_outlives_the_authority(folder: Path) -> None:
    with pytest.raises(UserError, match="expires before 3651 days are over") as caught:
        sign_request(folder / "west.csr", cloud="west", folder=folder, days=3651)
    assert re.fullmatch(r"use --days 36\d\d or fewer", str(caught.value.hint))


def test_identity_holds_what_is_in_the_folder(made: Path) -> None:
    identity = read_identity(made, "east")
    key = load_pem_private_key(identity.key_pem, password=None)
    assert identity.cloud == "east"
    assert x509.load_pem_x509_certificate(identity.certificate_pem) == load(made / "east.crt")
    assert x509.load_pem_x509_certificate(identity.authority_pem) == load(made / "authority.crt")
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == load(made / "east.crt").public_key()


def test_identity_never_shows_its_key(made: Path) -> None:
    identity = read_identity(made, "east")
    assert "PRIVATE" not in repr(identity)
    assert "PRIVATE" in identity.key_pem.decode()


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def spoil(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("not PEM")


def swap(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / other, folder / name)


def make_folder(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


@pytest.mark.parametrize(
    ("change", "message", "cure"),
    [
        (remove("west.key"), "west.key is missing", "isthmus certs request west"),
        (remove("west.crt"), "west.crt is missing", "isthmus certs sign west.csr --cloud west"),
        (remove("authority.crt"), "authority.crt is missing", "copy it from the operator"),
        (
            spoil("west.key"),
            "west.key is not an unencrypted elliptic-curve key in PEM",
            "isthmus certs request",
        ),
        (spoil("west.crt"), "west.crt is not a certificate in PEM", "isthmus certs sign"),
        (spoil("authority.crt"), "authority.crt is not a certificate in PEM", "copy it from the operator"),
        (make_folder("west.key"), "west.key cannot be read: Is a directory", "name a file"),
        (swap("west.key", "east.key"), "west.key is not the key of", "bring back the key"),
        (swap("west.crt", "east.crt"), "was signed for 'CN=east', not for cloud 'west'", "signed for west"),
        (
            swap("authority.crt", "east.crt"),
            "is not the certificate of an authority",
            "copy it from the operator",
        ),
        (lambda folder: make_authority(folder, force=True), "was not signed by", "same operator"),
    ],
)
def test_bad_folders_are_refused_with_the_cure(
    folder: Path, change: Callable[[Path], object], message: str, cure: str
) -> None:
    change(folder)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_identity(folder, "west")
    assert cure in str(caught.value.hint)


def test_missing_certificate_without_a_request_asks_for_one(folder: Path) -> None:
    (folder / "west.crt").unlink()
    (folder / "west.csr").unlink()
    with pytest.raises(UserError) as caught:
        read_identity(folder, "west")
    assert "isthmus certs request west" in str(caught.value.hint)


def test_expired_and_future_certificates_are_refused(made: Path, set_clock: SetClock) -> None:
    set_clock(timedelta(days=366))
    with pytest.raises(UserError, match=r"west\.crt expired on"):
        read_identity(made, "west")
    set_clock(timedelta(days=3651))
    with pytest.raises(UserError, match=r"authority\.crt expired on"):
        read_identity(made, "west")
    set_clock(timedelta(days=-1))
    with pytest.raises(UserError, match=r"is valid from .*, and the clock here says") as caught:
        read_identity(made, "west")
    assert caught.value.hint == "set the clock of this machine"


def test_renewal_keeps_the_key(folder: Path, set_clock: SetClock) -> None:
    set_clock(timedelta(days=360))
    sign_request(folder / "west.csr", cloud="west", folder=folder)
    set_clock(timedelta(days=700))
    identity = read_identity(folder, "west")
    assert identity.key_pem == (folder / "west.key").read_bytes()


def test_both_ends_know_each_other(made: Path) -> None:
    east, west = read_identity(made, "east"), read_identity(made, "west")
    for name in (server_name("east", 0), server_name("east", GATEWAY_RANK), "east.isthmus"):
        seen = shake_hands(server_context(east), client_context(west), name)
        assert seen["subject"] == ((("commonName", "west"),),)


def test_throwaway_clouds_know_each_other_and_nobody_else() -> None:
    clouds = throwaway(["east", "west"])
    server = server_context(clouds["east"])
    assert list(clouds) == ["east", "west"]
    shake_hands(server, client_context(clouds["west"]), server_name("east", 1))
    stranger = throwaway(["west"])["west"]
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client_context(stranger), server_name("east", 1))


@pytest.mark.parametrize("name", ["rank-0.west.isthmus", "a.rank-0.east.isthmus", "east.example"])
def test_a_server_is_refused_under_any_name_but_its_own(name: str) -> None:
    clouds = throwaway(["east", "west"])
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server_context(clouds["east"]), client_context(clouds["west"]), name)


def test_a_client_without_certificate_is_refused() -> None:
    east = throwaway(["east"])["east"]
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=east.authority_pem.decode())
    with pytest.raises(ssl.SSLError, match=r"(?i)peer did not return a certificate"):
        shake_hands(server_context(east), bare, "east.isthmus")


def test_expired_throwaways_are_refused(set_clock: SetClock) -> None:
    set_clock(timedelta(days=-8))
    clouds = throwaway(["east", "west"])
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(server_context(clouds["east"]), client_context(clouds["west"]), "east.isthmus")


def test_facts_name_every_state(folder: Path, set_clock: SetClock) -> None:
    (folder / "east.key").unlink()
    (folder / "notes.txt").write_text("not ours")
    make_request(folder, "south")
    sign_request(make_request(folder, "north"), cloud="north", folder=folder)
    make_request(folder, "north", force=True)
    set_clock(timedelta(days=10))
    facts = {fact.name: fact for fact in inspect_folder(folder)}
    assert list(facts) == ["authority", "east", "north", "south", "west"]
    assert [facts[name].kind for name in facts] == ["authority", "cloud", "cloud", "request", "cloud"]
    assert [facts[name].days_left for name in facts] == [3640, 355, 355, None, 355]
    assert facts["east"].problem is None
    assert facts["west"].problem is None
    assert "is not the key of" in str(facts["north"].problem)
    assert "isthmus certs sign south.csr --cloud south" in str(facts["south"].cure)


def test_facts_of_an_expired_certificate_count_below_zero(made: Path, set_clock: SetClock) -> None:
    set_clock(timedelta(days=400))
    facts = {fact.name: fact for fact in inspect_folder(made)}
    assert facts["west"].days_left == -35
    assert "expired on" in str(facts["west"].problem)
    assert facts["authority"].problem is None


def test_facts_of_no_folder_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be listed: No such file or directory"):
        inspect_folder(tmp_path / "none")


def test_fingerprint_is_of_the_key_alone(folder: Path) -> None:
    key = load_pem_private_key((folder / "west.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    before = key_fingerprint(folder / "west.csr")
    other = write_request(folder / "other.csr", key, "other.name")
    assert key_fingerprint(other) == before
    make_request(folder, "west", force=True)
    assert key_fingerprint(folder / "west.csr") != before
