import errno
import importlib.metadata
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from isthmus.job import Address, CloudSpec, Job
from isthmus.wan import certificates, doctor
from isthmus.wan.certificates import CertificateFacts, make_authority, make_request, sign_request
from isthmus.wan.doctor import CheckResult, Devices
from isthmus.wan.doctor import CheckVerdict as Verdict

NOW = datetime.now(UTC)
HERE = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[Address]:
    with socket.create_server((HERE, 0)) as server:
        yield Address(host=HERE, port=server.getsockname()[1])


@pytest.fixture
def closed() -> Iterator[Address]:
    """Yield a port that is ours and that nobody listens on."""
    with socket.socket() as held:
        held.bind((HERE, 0))
        yield Address(host=HERE, port=held.getsockname()[1])


@contextmanager
def proxy_answering(status: str) -> Iterator[tuple[Address, list[bytes]]]:
    """Run a proxy that gives one answer; the list holds what it was asked."""
    asked: list[bytes] = []
    with socket.create_server((HERE, 0)) as server:
        server.settimeout(30)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(f"{status}\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        yield Address(host=HERE, port=server.getsockname()[1]), asked
        thread.join(30)


def check(look: Callable[..., str], *arguments: object) -> CheckResult:
    return doctor.check_by("it", look, *arguments)


def make_cloud(folder: Path, name: str = "west", **keys: object) -> CloudSpec:
    return CloudSpec.model_validate({"name": name, "certificates": str(folder), **keys})


def make_identity(folder: Path, name: str = "west") -> None:
    make_authority(folder, force=True)
    sign_request(make_request(folder, name), cloud=name, folder=folder)


def facts(*, days_left: int, kind: str = "cloud") -> CertificateFacts:
    return CertificateFacts(
        name="authority" if kind == "authority" else "west",
        kind="authority" if kind == "authority" else "cloud",
        expires=NOW + timedelta(days=days_left),
        days_left=days_left,
    )


@pytest.mark.parametrize(
    ("device", "ranks", "found", "verdict", "what"),
    [
        ("cuda", 8, Devices(kind="cuda", num_devices=8), Verdict.OK, "8 × cuda"),
        ("auto", 2, Devices(kind="npu", num_devices=4), Verdict.OK, "4 × npu"),
        ("auto", 2, Devices(), Verdict.OK, "cpu only"),
        (
            "cuda",
            8,
            Devices(kind="cuda", num_devices=4),
            Verdict.WARNING,
            "8 ranks of cloud 'west' here need a device each, but torch finds 4 × cuda",
        ),
        (
            "npu",
            1,
            Devices(kind="cuda", num_devices=1),
            Verdict.FAILED,
            "cloud 'west' asks for npu, but torch finds 1 × cuda here",
        ),
        (
            "cuda",
            1,
            Devices(),
            Verdict.FAILED,
            "cloud 'west' asks for cuda, but torch finds cpu only here",
        ),
        (
            "xpu",
            1,
            Devices(problem="no driver"),
            Verdict.FAILED,
            "cloud 'west' cannot use torch here: no driver",
        ),
    ],
)
def test_devices(
    tmp_path: Path, device: str, ranks: int, found: Devices, verdict: Verdict, what: str
) -> None:
    cloud = make_cloud(tmp_path, device=device, ranks=ranks)
    finding = check(doctor.look_at_devices, None, cloud, lambda: found)
    assert (finding.verdict, finding.what) == (verdict, what)


def test_cpu_clouds_need_no_look_for_devices(tmp_path: Path, listening: Address) -> None:
    def unexpected() -> Devices:
        raise AssertionError

    job = make_job(tmp_path, listening)
    assert check(doctor.look_at_devices, job, job.cloud[0], unexpected).verdict is Verdict.OK
    assert check(doctor.look_at_devices, job, None, unexpected).verdict is Verdict.OK


def test_without_a_cloud_devices_that_a_local_run_lacks_are_a_warning(
    tmp_path: Path, listening: Address
) -> None:
    job = make_job(tmp_path, listening, device="cuda", ranks=2)
    lacking = check(doctor.look_at_devices, job, None, Devices)
    assert (lacking.verdict, lacking.what) == (
        Verdict.WARNING,
        "cloud 'west' asks for cuda, but torch finds cpu only here",
    )
    few = check(doctor.look_at_devices, job, None, lambda: Devices(kind="cuda", num_devices=1))
    assert few.what == "2 ranks of cloud 'west' here need a device each, but torch finds 1 × cuda"
    enough = check(doctor.look_at_devices, job, None, lambda: Devices(kind="cuda", num_devices=2))
    assert enough.verdict is Verdict.OK


def test_port_in_use_is_a_warning_since_the_gateway_may_run(listening: Address) -> None:
    finding = check(doctor.look_at_port, listening)
    assert finding.verdict is Verdict.WARNING
    assert "gateway" in str(finding.cure)


def test_port_that_is_free() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    assert check(doctor.look_at_port, Address(host=HERE, port=port)).verdict is Verdict.OK


def test_port_that_this_user_may_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    finding = check(doctor.look_at_port, Address(host=HERE, port=80))
    assert finding.verdict is Verdict.FAILED
    assert "above 1023" in str(finding.cure)


def test_peer_that_listens(tmp_path: Path, listening: Address) -> None:
    finding = check(doctor.look_at_peer, make_cloud(tmp_path), listening, None)
    assert finding == CheckResult(name="it", verdict=Verdict.OK, what=str(listening))


@pytest.mark.parametrize(("ranks", "verb"), [(1, "run"), (2, "gateway")])
def test_a_peer_that_has_not_started_is_no_fault(
    ranks: int, verb: str, tmp_path: Path, closed: Address
) -> None:
    finding = check(doctor.look_at_peer, make_cloud(tmp_path, ranks=ranks), closed, None)
    assert (finding.verdict, finding.what) == (Verdict.NOTE, f"{closed}: nothing listens there yet")
    assert f"isthmus {verb} JOB --cloud west" in str(finding.cure)


@pytest.mark.parametrize(
    ("error", "what", "cure"),
    [
        (socket.gaierror(-2, "Name or service not known"), "name or service not known", "host name"),
        (TimeoutError("timed out"), "no answer", "firewalls"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to host", "firewalls"),
    ],
)
def test_peer_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, what: str, cure: str
) -> None:
    def fail(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    address = Address(host="west.example.com", port=7600)
    finding = check(doctor.look_at_peer, make_cloud(tmp_path), address, None)
    assert (finding.verdict, finding.what) == (Verdict.FAILED, f"west.example.com:7600: {what}")
    assert cure in str(finding.cure)


def test_peer_through_a_proxy(tmp_path: Path) -> None:
    target = Address(host="2001:db8::7", port=7600)
    with proxy_answering("HTTP/1.1 200 Connection established") as (proxy, asked):
        finding = check(doctor.look_at_peer, make_cloud(tmp_path), target, proxy)
    assert finding.verdict is Verdict.OK
    assert asked == [b"CONNECT [2001:db8::7]:7600 HTTP/1.1\r\nHost: [2001:db8::7]:7600\r\n\r\n"]


@pytest.mark.parametrize("status", ["HTTP/1.1 403 Forbidden", "HTTP/1.1 2000 odd", "SSH-2.0-hello", ""])
def test_peer_that_the_proxy_refuses(tmp_path: Path, status: str) -> None:
    with proxy_answering(status) as (proxy, _):
        finding = check(
            doctor.look_at_peer, make_cloud(tmp_path), Address(host="west.example.com", port=1), proxy
        )
    assert finding.verdict is Verdict.FAILED
    assert f"answers {status!r} for west.example.com:1" in finding.what


def test_a_peer_that_a_proxy_cannot_reach_yet_is_no_fault(tmp_path: Path) -> None:
    with proxy_answering("HTTP/1.1 503 Service Unavailable") as (proxy, _):
        finding = check(
            doctor.look_at_peer, make_cloud(tmp_path), Address(host="west.example.com", port=1), proxy
        )
    assert finding.verdict is Verdict.NOTE


def test_proxy_that_is_down(tmp_path: Path, closed: Address) -> None:
    address = Address(host="west.example.com", port=1)
    finding = check(doctor.look_at_peer, make_cloud(tmp_path), address, closed)
    assert finding.what == f"{closed}: connection refused"
    assert "proxy" in str(finding.cure)


def test_identity_that_is_whole_and_private(tmp_path: Path) -> None:
    make_identity(tmp_path)
    assert check(doctor.look_at_identity, make_cloud(tmp_path)).verdict is Verdict.OK


def test_identity_with_a_key_that_all_can_read(tmp_path: Path) -> None:
    make_identity(tmp_path)
    (tmp_path / "west.key").chmod(0o644)
    finding = check(doctor.look_at_identity, make_cloud(tmp_path))
    assert (finding.verdict, finding.cure) == (Verdict.WARNING, f"chmod 600 {tmp_path / 'west.key'}")
    (tmp_path / "west.key").chmod(stat.S_IRUSR | stat.S_IRGRP)
    assert check(doctor.look_at_identity, make_cloud(tmp_path)).verdict is Verdict.OK


def test_identity_that_is_missing_starts_with_the_request(tmp_path: Path) -> None:
    finding = check(doctor.look_at_identity, make_cloud(tmp_path / "none"))
    assert finding.verdict is Verdict.FAILED
    assert "isthmus certs request west" in str(finding.cure)


@pytest.mark.parametrize("kind", ["cloud", "authority"])
def test_certificates_warn_a_month_ahead(kind: str) -> None:
    assert check(doctor.look_at_certificate, facts(days_left=30, kind=kind)).verdict is Verdict.OK
    near = check(doctor.look_at_certificate, facts(days_left=29, kind=kind))
    assert near.verdict is Verdict.WARNING
    assert "operator" in str(near.cure)


def test_certificate_with_a_problem_fails() -> None:
    fact = CertificateFacts(name="west", kind="request", problem="west.crt is missing", cure="sign it")
    finding = check(doctor.look_at_certificate, fact)
    assert (finding.verdict, finding.what, finding.cure) == (
        Verdict.FAILED,
        "west.crt is missing",
        "sign it",
    )


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free_gib", "verdict"), [(20, Verdict.OK), (19, Verdict.WARNING)])
def test_disk_is_looked_at_where_the_runs_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, verdict: Verdict
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Usage:
        asked.append(folder)
        return Usage(100 * 2**30, 0, free_gib * 2**30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert check(doctor.look_at_disk, tmp_path / "runs" / "deep").verdict is verdict
    assert asked == [tmp_path]


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.6.0")


def make_job(folder: Path, listen: Address, **west: object) -> Job:
    clouds = [
        {"name": "east", "device": "cpu", "listen": str(listen), "certificates": str(folder)},
        {"name": "west", "device": "cpu", "certificates": str(folder), **west},
    ]
    links = [{"between": ["east", "west"], "stripes": 4}]
    return Job.model_validate({"name": "two", "cloud": clouds, "link": links})


def examine(job: Job, cloud: str | None, runs: Path) -> dict[str, CheckResult]:
    here = job.cloud_named(cloud) if cloud else None
    found = doctor.examine(job, here, find_devices=Devices, runs=runs)
    return {finding.name: finding for finding in found}


@pytest.mark.usefixtures("_torch")
def test_a_cloud_that_dials_is_examined_whole(tmp_path: Path, listening: Address) -> None:
    make_identity(tmp_path)
    findings = examine(make_job(tmp_path, listening), "west", tmp_path)
    shared = ["torch", "devices", "port", "reach east", "identity of west"]
    assert list(findings) == [*shared, "authority", "certificate of west", "disk"]
    assert [name for name, finding in findings.items() if finding.verdict is Verdict.FAILED] == []
    assert findings["port"].what == "none needed, west only dials out"


def test_a_cloud_that_listens_dials_nobody(tmp_path: Path, listening: Address) -> None:
    make_identity(tmp_path, "east")
    findings = examine(make_job(tmp_path, listening), "east", tmp_path)
    assert findings["port"].verdict is Verdict.WARNING
    assert not [name for name in findings if name.startswith("reach")]


@pytest.mark.usefixtures("_torch")
def test_an_identity_that_fails_is_one_cross(
    tmp_path: Path, listening: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "utc_now", lambda: NOW - timedelta(days=400))
        make_identity(tmp_path)
    findings = examine(make_job(tmp_path, listening), "west", tmp_path)
    failed = [finding.name for finding in findings.values() if finding.verdict is Verdict.FAILED]
    assert failed == ["identity of west"]
    assert "expired on" in findings["identity of west"].what


def test_without_torch_no_device_is_looked_for(
    tmp_path: Path, listening: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    findings = examine(make_job(tmp_path, listening), "west", tmp_path)
    assert findings["torch"].what == "not installed"
    assert "devices" not in findings


@pytest.mark.usefixtures("_torch")
def test_without_a_cloud_only_what_is_here_is_examined(tmp_path: Path, listening: Address) -> None:
    make_identity(tmp_path)
    findings = examine(make_job(tmp_path, listening), None, tmp_path)
    certificates = ["authority", "certificate of west"]
    assert list(findings) == ["torch", "devices", *certificates, "disk"]


@pytest.mark.usefixtures("_torch")
def test_without_a_cloud_missing_folders_are_no_fault(tmp_path: Path, listening: Address) -> None:
    findings = examine(make_job(tmp_path / "none", listening), None, tmp_path)
    assert list(findings) == ["torch", "devices", "disk"]
