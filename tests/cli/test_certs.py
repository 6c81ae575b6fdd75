import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus.cli.site import certs_app
from isthmus.errors import UserError
from isthmus.wan.certificates import make_authority, make_request, read_identity, sign_request

DOCS = Path(__file__).parents[2] / "docs" / "certificates.md"


def certs(*arguments: str) -> str:
    result = CliRunner().invoke(certs_app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_authority_says_what_stays_and_what_comes_next() -> None:
    output = certs("authority")
    assert "certs/authority.key, keep it here" in output
    assert "next: in each cloud, isthmus certs request CLOUD" in output
    assert Path("certs/authority.crt").exists()


def test_request_and_sign_show_the_same_key() -> None:
    certs("authority", "--folder", "operator")
    asked = certs("request", "west")
    signed = certs("sign", "certs/west.csr", "--cloud", "west", "--folder", "operator", "--days", "20")
    assert (
        "next: send certs/west.csr to the operator, who runs: isthmus certs sign west.csr --cloud west"
        in asked
    )
    assert "next: send operator/west.crt and operator/authority.crt to west" in signed
    assert re.findall(r"[0-9a-f]{64}", asked) == re.findall(r"[0-9a-f]{64}", signed) != []
    assert "valid 20 days" in signed
    assert sorted(path.name for path in Path("operator").iterdir()) == [
        "authority.crt",
        "authority.key",
        "west.crt",
    ]


def test_sign_beside_the_key_needs_no_sending() -> None:
    certs("authority")
    certs("request", "west")
    assert "next: isthmus certs show certs" in certs("sign", "certs/west.csr", "--cloud", "west")


@pytest.mark.parametrize("days", ["0", "3651", "x"])
def test_days_out_of_bounds_are_a_usage_error(days: str) -> None:
    result = CliRunner().invoke(certs_app, ["sign", "west.csr", "--cloud", "west", "--days", days])
    assert result.exit_code == 2


def test_mistakes_reach_the_command_line_as_one_sentence() -> None:
    with pytest.raises(UserError, match=r"certs/authority\.crt is missing"):
        certs("sign", "west.csr", "--cloud", "west")


def test_force_replaces_a_key() -> None:
    certs("request", "west")
    before = Path("certs/west.key").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        certs("request", "west")
    certs("request", "west", "--force")
    assert Path("certs/west.key").read_bytes() != before


def test_show_ticks_what_is_sound() -> None:
    folder = Path("certs")
    make_authority(folder)
    sign_request(make_request(folder, "west"), cloud="west", folder=folder)
    output = certs("show")
    lines = [line.split() for line in output.splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines[1:]] == [
        ("authority", "authority", "✓"),
        ("west", "cloud", "✓"),
    ]
    assert "364" in output


def test_show_crosses_what_is_not_and_fails() -> None:
    make_authority(Path("certs"))
    make_request(Path("certs"), "west")
    result = CliRunner().invoke(certs_app, ["show", "certs"])
    assert result.exit_code == 1
    assert "✗ west: certs/west.crt is missing" in result.output
    assert "cure: send certs/west.csr to the operator" in result.output


def test_show_json_has_the_facts() -> None:
    make_authority(Path("certs"))
    make_request(Path("certs"), "west")
    result = CliRunner().invoke(certs_app, ["show", "--json"])
    authority, west = json.loads(result.output)
    assert result.exit_code == 1
    assert (authority["name"], authority["problem"]) == ("authority", None)
    assert authority["days_left"] in (3649, 3650)
    assert re.match(r"\d{4}-\d\d-\d\dT.*\+00:00", authority["expires"])
    assert (west["kind"], west["expires"]) == ("request", None)


def documented_walk() -> list[tuple[str, list[str]]]:
    """Return the documented walk, as the place and the words of each command."""
    block = re.search(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    lines = [line.partition("$") for line in block[1].splitlines()]
    return [(place, shlex.split(command)) for place, _, command in lines]


def follow(place: str, words: list[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / place)
    match words:
        case ["isthmus", "certs", *arguments]:
            certs(*arguments)
        case ["scp", *paths]:
            *sources, target = [
                root / path.replace(":", "/") if ":" in path else Path(path) for path in paths
            ]
            for source in sources:
                shutil.copy(source, target)
        case _:
            pytest.fail(f"unknown command {words}")


def test_the_documented_walk_gives_each_cloud_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("operator", "east", "west"):
        (tmp_path / place).mkdir()
    for place, words in documented_walk():
        follow(place, words, tmp_path, monkeypatch)
    for cloud in ("east", "west"):
        assert read_identity(tmp_path / cloud / "certs", cloud).cloud == cloud
        assert not (tmp_path / cloud / "certs" / "authority.key").exists()
        assert not list((tmp_path / "operator").rglob(f"{cloud}.key"))


def test_verbs_import_nothing_heavy_until_they_run() -> None:
    code = (
        "import sys, isthmus.cli.main\n"
        "heavy = {'torch', 'grpc', 'cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parents[1], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
