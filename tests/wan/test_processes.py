"""One process per cloud: results, reports, and the error that is shown when one of them fails."""

import os
import signal

import pytest

from isthmus.errors import CloudFailed, UserError
from isthmus.job import Job
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.frames import Packet
from isthmus.wan.local import LocalWan
from isthmus.wan.processes import Report, Work, run_clouds
from tests.wan.clouds import two_clouds


def run(work: Work) -> dict[str, object]:
    job = two_clouds("heartbeat_timeout='5 s'")
    reports: list[tuple[str, str]] = []
    with LocalWan(job) as wan:
        results = run_clouds(job, work, wan, on_report=lambda *report: reports.append(report))
    return {**results, "reports": sorted(reports)}


def greet(job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> str:
    report("here")
    peer = job.link[0].peer_of(cloud)
    endpoint.link(peer).send("name", Packet({"name": cloud}))
    return str(endpoint.link(peer).receive("name").header["name"])


def fail_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        raise UserError("the corpus is empty", hint="give it text")
    endpoint.link("west").receive("never")


def crash_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        raise ZeroDivisionError("one by none")
    endpoint.link("west").receive("never")


def die_in_the_west(job: Job, endpoint: Endpoint, *, cloud: str, report: Report) -> None:
    greet(job, endpoint, cloud=cloud, report=report)
    if cloud == "west":
        os.kill(os.getpid(), signal.SIGKILL)
    endpoint.link("west").receive("never")


def test_every_cloud_gives_its_result_and_its_reports() -> None:
    assert run(greet) == {"east": "west", "west": "east", "reports": [("east", "here"), ("west", "here")]}


def test_the_error_shown_is_the_first_cause_with_its_cloud_and_cure() -> None:
    with pytest.raises(CloudFailed, match="cloud 'west' failed: the corpus is empty") as failed:
        run(fail_in_the_west)
    assert failed.value.cloud == "west"
    assert failed.value.hint == "give it text"


def test_a_crash_is_named_by_cloud_and_its_traceback_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CloudFailed, match="cloud 'west' failed: its process ended with exit code 1"):
        run(crash_in_the_west)
    assert "ZeroDivisionError: one by none" in capfd.readouterr().err


def test_a_killed_process_is_named_by_cloud() -> None:
    with pytest.raises(CloudFailed, match="cloud 'west' failed: its process ended with exit code -9"):
        run(die_in_the_west)
