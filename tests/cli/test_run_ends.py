"""`isthmus run` at SIGTERM, at Ctrl-C and killed: it ends, its ranks end, and its peers are told."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from isthmus.errors import Aborted
from isthmus.job import load_job
from isthmus.wan.certificates import make_authority, make_request, read_identity, sign_request
from isthmus.wan.endpoint import Endpoint
from tests.train.test_setup import TINY

# Trees of processes.
pytestmark = pytest.mark.slow

PATIENCE_S = 240.0
HEARTBEAT_TIMEOUT_S = 30.0
LONG = ["train.steps=100000", "train.evaluate_every=0", "checkpoint.every=1 s"]
ONE_RANK = '[[cloud]]\nname = "east"\ndevice = "cpu"\n'
TWO_RANKS = '[[cloud]]\nname = "east"\ndevice = "cpu"\nranks = 2\n'
WEST = """
[[cloud]]
name = "west"
device = "cpu"
listen = "127.0.0.1:{port}"
[[link]]
between = ["east", "west"]
"""
# A shell has what it starts in the background ignore Ctrl-C.
HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@contextmanager
def running(
    source: str, *arguments: str, log: Path, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", HEED_CTRL_C + source, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
    try:
        yield process
    finally:
        ranks = descendants(process)
        process.kill()
        process.wait(PATIENCE_S)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def command(
    job: Path, *options: str, log: Path, **env: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    sets = [text for change in LONG for text in ("--set", change)]
    arguments = ("run", str(job), "--no-profile", *sets, *options)
    return running("from isthmus.cli.main import main; main()", *arguments, log=log, env=env)


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)], ids=["term", "kill"]
)
def test_no_rank_outlives_the_command_that_started_it(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    job, log, runs = tmp_path / "job.toml", tmp_path / "log", tmp_path / "runs"
    job.write_text(TINY + TWO_RANKS)
    with command(job, "--runs", str(runs), log=log) as process:
        wait_until(lambda: list(runs.glob("tiny/*/checkpoints/*/*/manifest.json")), process, log)
        ranks = descendants(process)
        assert len(ranks) >= 2
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == exit_code
        _, left = psutil.wait_procs(ranks, timeout=PATIENCE_S)
        for one in left:
            one.kill()
        assert not left
    if number == signal.SIGTERM:
        assert "which every cloud has saved; the same command continues from there" in log.read_text()
        assert "leaked" not in log.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificates(folder: Path) -> None:
    make_authority(folder)
    for cloud in ("east", "west"):
        sign_request(make_request(folder, cloud), cloud=cloud, folder=folder)


@pytest.mark.parametrize("cloud", ["east", "west"])
def test_a_cloud_that_never_met_its_peer_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    monkeypatch.chdir(tmp_path)
    job, log = tmp_path / "job.toml", tmp_path / "log"
    job.write_text(TINY + ONE_RANK + WEST.format(port=free_port()))
    make_certificates(Path("certs"))
    with command(job, "--cloud", cloud, log=log) as process:
        wait_until(lambda: "waiting for cloud" in log.read_text(), process, log)
        asked_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
        assert time.monotonic() - asked_s < HEARTBEAT_TIMEOUT_S / 2
    assert "stopped by SIGTERM; the same command continues" in log.read_text()


def test_a_rank_whose_sibling_never_comes_ends_and_tells_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job, log, certs = tmp_path / "job.toml", tmp_path / "log", Path("certs")
    job.write_text(TINY + TWO_RANKS + WEST.format(port=free_port()))
    make_certificates(certs)
    # As torchrun does, so that what the rank leaves there can be seen.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
    spec = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    num_keys = store.num_keys()
    west = Endpoint(load_job(job, overrides=LONG).used(), cloud="west", identity=read_identity(certs, "west"))
    with command(job, "--cloud", "east", log=log, **spec) as process:
        wait_until(lambda: store.num_keys() > num_keys, process, log)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(Aborted, match="cloud 'east' aborted the run: its launcher has ended its ranks"):
            west.link("east").receive("word", timeout_s=PATIENCE_S)
        west.close()
        assert process.wait(PATIENCE_S) == 143
    assert "stopped by SIGTERM; the same command continues" in log.read_text()


IN_FOREIGN_CODE = """
import hashlib
from rich.console import Console
from isthmus.cli.run import Ending

def abort(reason):
    print("peers read:", reason, flush=True)

with Ending(Console()) as ending:
    ending.stop.abort = abort
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize(
    ("number", "exit_code", "stopped", "told"),
    [
        (signal.SIGINT, 130, "stopped by Ctrl-C", "it was stopped by its user"),
        (signal.SIGTERM, 143, "stopped by SIGTERM", "its launcher has ended its ranks"),
    ],
    ids=["ctrl-c", "term"],
)
def test_a_command_ends_though_its_main_thread_does_not_come_back(
    tmp_path: Path, number: signal.Signals, exit_code: int, stopped: str, told: str
) -> None:
    log = tmp_path / "log"
    with running(IN_FOREIGN_CODE, log=log, env={}) as process:
        wait_until(lambda: "here" in log.read_text(), process, log)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == exit_code
    assert f"{stopped}; the same command continues" in log.read_text()
    assert f"peers read: {told}" in log.read_text()
