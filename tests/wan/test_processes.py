"""One process per cloud: results, reports, and the error that is shown when one of them fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.errors import CloudFailed, LinkError, UserError
from isthmus.job import Job
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.local import LocalWan, RankWork, Report, run_ranks
from isthmus.wan.packet import Packet
from tests.wan.clouds import two_clouds


def run(work: RankWork) -> dict[str, object]:
    job = two_clouds("heartbeat_timeout='5 s'")
    reports: list[tuple[str, str]] = []
    with LocalWan(job) as wan:
        results = run_ranks(job, work, wan, on_report=lambda *report: reports.append(report))
    return {**{member.cloud: result for member, result in results.items()}, "reports": sorted(reports)}


def greet(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, **_: object) -> str:
    report("here")
    peer = job.link[0].peer_of(cloud)
    endpoint.link(peer).send("name", Packet({"name": cloud}))
    return str(endpoint.link(peer).receive("name").header["name"])


def fail_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, **_: object) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        raise UserError("the corpus is empty", hint="give it text")
    endpoint.link("west").receive("never")


def crash_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, **_: object) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        raise ZeroDivisionError("one by none")
    endpoint.link("west").receive("never")


def die_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, **_: object) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        os.kill(os.getpid(), signal.SIGKILL)
    endpoint.link("west").receive("never")


def die_once_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, **_: object) -> int:
    """The west dies in its first life; the east goes on in its own process, over a link of a new epoch."""
    lives, peer = Path(os.environ["A_MARK"]), job.link[0].peer_of(cloud)
    if cloud == "west" and not lives.exists():
        lives.touch()
        endpoint.link(peer).receive("life", timeout_s=60)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            endpoint.link(peer).send("life", Packet({}))
            endpoint.link(peer).receive("life", timeout_s=60)
        except LinkError as error:
            endpoint.renew(error.message)
        else:
            return os.getpid()


def read_mark(*_: object, **__: object) -> str | None:
    return os.environ.get("A_MARK")


def signal_the_server(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, **_: object) -> str:
    """Signals to a process group also reach the server that ranks are forked from."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getppid(), number)
    return greet(job, endpoint, cloud=cloud, report=report)


def test_ranks_have_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for mark in ("one", "two"):
        monkeypatch.setenv("A_MARK", mark)
        assert run(read_mark) == {"east": mark, "west": mark, "reports": []}


def test_signals_to_the_process_group_end_no_rank() -> None:
    for _ in range(2):
        assert run(signal_the_server)["east"] == "west"


def test_every_cloud_gives_its_result_and_its_reports() -> None:
    assert run(greet) == {"east": "west", "west": "east", "reports": [("east", "here"), ("west", "here")]}


def test_the_error_shown_is_the_first_cause_with_its_cloud_and_cure() -> None:
    with pytest.raises(CloudFailed, match="cloud 'west' failed: the corpus is empty") as failed:
        run(fail_in_the_west)
    assert failed.value.cloud == "west"
    assert failed.value.hint == "give it text"


def test_a_crash_is_named_by_cloud_and_its_traceback_is_shown() -> None:
    script = f"from {__name__} import *; run(crash_in_the_west)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "CloudFailed: cloud 'west' failed: its process ended with exit code 1" in ended.stderr
    assert "ZeroDivisionError: one by none" in ended.stderr


def test_a_killed_process_is_named_by_cloud() -> None:
    with pytest.raises(CloudFailed, match="cloud 'west' failed: its process ended with exit code -9"):
        run(die_in_the_west)


def test_a_rank_that_dies_is_started_again_and_meets_those_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_MARK", str(tmp_path / "mark"))
    job, told = two_clouds("heartbeat_timeout='5 s'"), list[tuple[str, int]]()
    with LocalWan(job) as wan:
        found = run_ranks(
            job,
            die_once_in_the_west,
            wan,
            on_report=lambda *_: None,
            restarts=1,
            on_restart=lambda failed, number: told.append((failed.cloud, number)),
        )
    assert {member.cloud for member in found} == {"east", "west"}
    assert told == [("west", 1)]
