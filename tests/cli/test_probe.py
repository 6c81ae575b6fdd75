"""`isthmus probe` as a user runs it: all clouds here, or one cloud per command with real certificates."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from isthmus.cli.main import main
from isthmus.job import load_job

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def isthmus(*arguments: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    # Whoever runs the tests in the background may have it ignored, which a new process would inherit. It is
    # set here, since a function that ran in a fork of this process could meet threads of gRPC.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def finish(process: "subprocess.Popen[str]", *, code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    return out, err


@pytest.mark.slow
def test_the_demo_measures_what_was_set_and_writes_it(tmp_path: Path) -> None:
    job = Path(shutil.copy(EXAMPLES / "two-clouds.toml", tmp_path))
    out, err = finish(isthmus("probe", str(job), "--seconds", "1", "--write", "--json"))
    (found,) = json.loads(out)
    assert found["between"] == ["east", "west"]
    # A busy machine may be slower than the line, but not faster, within the emulator's bound of 2 ms.
    assert all(60e6 < bps < 220e6 for bps in found["bandwidth_bps"])
    assert 0.038 <= found["rtt_s"] < 0.2
    assert "now holds these figures" in err
    (link,) = load_job(job).link
    assert link.bandwidth_bps is not None
    assert link.bandwidth_bps[0] == pytest.approx(found["bandwidth_bps"][0], rel=0.01)
    assert link.rtt_s == pytest.approx(found["rtt_s"], rel=0.01)
    assert link.handling_s == pytest.approx(found["handling_s"], rel=0.01)


@pytest.mark.slow
def test_faults_and_overrides_reach_the_emulated_wan(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nat = "2 s"\nkind = "cut"\nbetween = ["west", "east"]\nduration = "1 s"\n')
    arguments = [
        "--seconds",
        "1",
        "--faults",
        str(faults),
        "--set",
        "link.0.bandwidth=['20 Mbps', '50 Mbps']",
    ]
    out, _ = finish(isthmus("probe", str(EXAMPLES / "two-clouds.toml"), *arguments))
    assert "20 Mbps" in out
    assert "measured" in out


@pytest.mark.slow
def test_two_sites_probe_each_other_with_signed_certificates(tmp_path: Path) -> None:
    """The whole walk: authority, requests, signing, then one command per site, in any order."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "job.toml").write_text(
        f'name = "walk"\n[[cloud]]\nname = "east"\nlisten = "127.0.0.1:{port}"\n'
        '[[cloud]]\nname = "west"\n[[link]]\nbetween = ["east", "west"]\n'
    )
    finish(isthmus("certs", "authority", cwd=tmp_path))
    for cloud in ("east", "west"):
        finish(isthmus("certs", "request", cloud, cwd=tmp_path))
        finish(isthmus("certs", "sign", f"certs/{cloud}.csr", "--cloud", cloud, cwd=tmp_path))
    west = isthmus("probe", "job.toml", "--cloud", "west", "--seconds", "1", "--json", cwd=tmp_path)
    time.sleep(1.0)
    east = isthmus("probe", "job.toml", "--cloud", "east", "--seconds", "1", "--json", cwd=tmp_path)
    (seen_by_west,), (seen_by_east,) = (json.loads(finish(site)[0]) for site in (west, east))
    assert seen_by_west["bandwidth_bps"] == seen_by_east["bandwidth_bps"]
    assert min(seen_by_west["bandwidth_bps"]) > 100e6
    assert seen_by_west["rtt_s"] < 0.05
    assert seen_by_west["handling_s"] == seen_by_east["handling_s"] >= 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("no-such.toml",), "no-such.toml"),
        (("two-clouds.toml", "--cloud", "est"), "the job has no cloud 'est'"),
        (("two-clouds.toml", "--cloud", "east"), "certs"),
        (("two-clouds.toml", "--set", "link.0.jiter='1 ms'"), "did you mean 'jitter'"),
        (("two-clouds.toml", "--faults", "no-such-faults.toml"), "no-such-faults.toml"),
        (("two-clouds.toml", "--cloud", "west", "--faults", "f.toml"), "--faults disturbs"),
    ],
)
def test_mistakes_end_with_2_one_sentence_and_the_cure(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["isthmus", "probe", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in err
    assert "cure:" in err
    assert "Traceback" not in err


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    process = isthmus("probe", str(EXAMPLES / "two-clouds.toml"), "--seconds", "60")
    while not psutil.Process(process.pid).children():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, code=130)
    assert "Traceback" not in err
