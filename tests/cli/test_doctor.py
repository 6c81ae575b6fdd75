import importlib.metadata
import json
import socket
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import isthmus.model  # noqa: F401 it asks for versions, which a fixture here replaces
from isthmus.cli import site as cli
from isthmus.errors import UserError
from isthmus.wan.certificates import make_authority, make_request, sign_request
from isthmus.wan.doctor import Devices

JOB = """
name = "two"
[[cloud]]
name = "east"
device = "cuda"
listen = "127.0.0.1:{port}"
[[cloud]]
name = "west"
device = "cpu"
[[link]]
between = ["east", "west"]
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.6.0")


def write_job(port: int) -> None:
    Path("job.toml").write_text(JOB.format(port=port))
    make_authority(Path("certs"))
    sign_request(make_request(Path("certs"), "west"), cloud="west", folder=Path("certs"))


def doctor(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(cli.doctor)
    result = CliRunner().invoke(app, ["job.toml", *arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result.exit_code, result.output


def test_a_ready_cloud_passes_and_learns_what_comes_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        write_job(gateway.getsockname()[1])
        exit_code, output = doctor("--cloud", "west")
    assert exit_code == 0, output
    assert "✓ reach east" in output
    assert "✗" not in output
    assert output.splitlines()[-1] == "next: isthmus probe job.toml --cloud west"


def test_a_site_is_ready_before_the_other_has_started() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        write_job(held.getsockname()[1])
        exit_code, output = doctor("--cloud", "west")
    lines = output.splitlines()
    note = next(index for index, line in enumerate(lines) if line.startswith("· reach east"))
    assert exit_code == 0, output
    assert "nothing listens there yet" in lines[note]
    assert "isthmus run JOB --cloud east" in lines[note + 1]


def test_a_cross_has_its_cure_and_fails() -> None:
    write_job(1)
    Path("certs/west.key").unlink()
    exit_code, output = doctor("--cloud", "west")
    lines = output.splitlines()
    cross = next(index for index, line in enumerate(lines) if line.startswith("✗ identity of west"))
    assert exit_code == 1
    assert lines[cross + 1].startswith("  cure: ")
    assert lines[-1] == "next: repair what is marked ✗ (1), then run isthmus doctor again"


def test_json_has_every_finding() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        write_job(gateway.getsockname()[1])
        exit_code, output = doctor("--cloud", "west", "--json")
    findings = {finding["name"]: finding for finding in json.loads(output)}
    assert exit_code == 0
    assert findings["reach east"]["verdict"] == "ok"
    assert set(findings["disk"]) == {"name", "verdict", "what", "cure"}


def test_devices_that_the_cloud_asks_for_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_devices", lambda: Devices(kind="npu", num_devices=2))
    write_job(7600)
    exit_code, output = doctor("--cloud", "east")
    assert exit_code == 1
    assert "✗ devices: cloud 'east' asks for cuda, but torch finds 2 × npu here" in output


def test_without_a_cloud_no_network_is_touched() -> None:
    write_job(1)
    exit_code, output = doctor()
    assert exit_code == 0
    assert "reach" not in output
    assert "✓ certificate of west" in output


def test_model_and_data_are_looked_for_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_devices", lambda: Devices(kind="cuda", num_devices=1))
    write_job(1)
    with Path("job.toml").open("a") as file:
        file.write('[model.config]\nmodel_type = "llama"\nnum_hidden_layers = 2\n[data]\nsource = "no.txt"\n')
    exit_code, output = doctor()
    assert exit_code == 1
    assert "✓ model: fresh: llama of 2 layers" in output
    assert "✗ data: no file is found at 'no.txt'\n  cure: " in output
    assert "data:" not in doctor("--cloud", "west")[1]


def test_an_unknown_cloud_is_the_users_mistake() -> None:
    write_job(7600)
    with pytest.raises(UserError, match="no cloud 'wets'"):
        doctor("--cloud", "wets")


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isthmus.train.runs", None)
    problem = cli.find_devices().problem
    assert problem is not None
    assert "isthmus.train.runs" in problem
