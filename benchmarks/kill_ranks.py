"""Kills ranks: four of them, two clouds of two, any one at a random moment, ten times.

Every other process must end within 15 s, the run must go on by itself, and reach the very weights of a run
that nobody disturbed. Ranks are started by `isthmus run`, or as on real clusters: one torchrun per cloud, and
a gateway.

    python benchmarks/kill_ranks.py [--kills 10] [--launcher here|torchrun] [--sharding none|optimizer]
"""

import argparse
import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from bench import Choice, finish, options

LIMIT_S = 15.0
# After a start, over the time that Python takes to import torch and the first steps.
_SPREAD_S = 40.0
# A process that neither ended nor went on would keep a run from its end.
_PATIENCE_S = 600.0
SEED = 7
JOB = """
name = "kill"
seed = 7
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
attention_dropout = 0.1
[data]
source = "builtin:tales"
sequence_length = 64
[strategy]
kind = "pipeline"
microbatches = 6
layers = [2, 2]
[train]
steps = {steps}
batch_tokens = 768
evaluate_every = 100
[checkpoint]
every = "1 s"
[[cloud]]
name = "east"
device = "cpu"
ranks = 2
sharding = "{sharding}"
listen = "127.0.0.1:{port}"
[[cloud]]
name = "west"
device = "cpu"
ranks = 2
sharding = "{sharding}"
[[link]]
between = ["east", "west"]
bandwidth = "200 Mbps"
rtt = "10 ms"
codec = "rotate | int4(stochastic)"
"""


@dataclass(frozen=True)
class Kill:
    """One rank killed: when, how long those of the others lasted that ended, and how many went on.

    A rank that has not met the lost one yet has no reason to end: it meets the next that is started.
    """

    after_s: float
    others_s: float
    num_resumed: int


class Launch:
    """The processes of one run, from whatever starts them."""

    def __init__(self, folder: Path, job: Path, runs: Path, launcher: str, kills: int) -> None:
        self._folder = folder
        isthmus = [sys.executable, "-m", "isthmus"]
        run = ["run", str(job), "--runs", str(runs)]
        if launcher == "here":
            commands = [[*isthmus, *run, "--restarts", str(kills)]]
        else:
            gateway = [*isthmus, "gateway", str(job), "--cloud", "east"]
            commands = [gateway, *(self._torchrun(name, run, kills) for name in ("east", "west"))]
        self._log = (folder / "log.txt").open("a")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(one, cwd=folder, env=environment, stdout=self._log, stderr=self._log)
            for one in commands
        ]

    def _torchrun(self, cloud: str, run: Sequence[str], kills: int) -> list[str]:
        options = [
            "--nproc-per-node",
            "2",
            "--master-port",
            str(_free_port()),
            "--max-restarts",
            str(3 * kills),
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", *options]
        return [*torchrun, "-m", "isthmus", *run, "--cloud", cloud]

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, of those that live."""
        found = []
        for one in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [
                    child for child in psutil.Process(one.pid).children(recursive=True) if _trains(child)
                ]
        return found

    @property
    def is_over(self) -> bool:
        """Whether all that trains has ended; a gateway runs on."""
        return all(one.poll() is not None for one in self.processes[-2:])

    def close(self) -> None:
        """End everything."""
        for one in self.processes:
            if one.poll() is None:
                one.send_signal(signal.SIGINT)
        for one in self.processes:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
        self._log.close()


def main() -> None:
    """Run undisturbed, then disturbed, and compare."""
    given = options(
        __doc__,
        kills=10,
        steps=400,
        launcher=Choice("here", ["here", "torchrun"]),
        sharding=Choice("none", ["none", "optimizer"]),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job = folder / "job.toml"
        job.write_text(JOB.format(steps=given.steps, sharding=given.sharding, port=_free_port()))
        if given.launcher == "torchrun":
            _make_certificates(folder)
        expected = _digest(_undisturbed(folder, job, given.launcher))
        kills, found = _disturbed(folder, job, given)
    _show(kills, expected, found, given)


def _undisturbed(folder: Path, job: Path, launcher: str) -> Path:
    runs = folder / "undisturbed"
    launch = Launch(folder, job, runs, launcher, kills=0)
    try:
        _await_end(launch, folder)
    finally:
        launch.close()
    return runs


def _disturbed(folder: Path, job: Path, options: argparse.Namespace) -> tuple[list[Kill], list[str]]:
    """Kill until it was often enough; a run that ends before that is followed by another."""
    chance = random.Random(SEED)
    kills: list[Kill] = []
    digests: list[str] = []
    while len(kills) < options.kills:
        runs = folder / f"disturbed-{len(digests)}"
        launch = Launch(folder, job, runs, options.launcher, kills=options.kills)
        try:
            while not launch.is_over and len(kills) < options.kills:
                kill = _kill_one(launch, chance)
                if kill is not None:
                    kills.append(kill)
                    ended = f"{3 - kill.num_resumed} others ended within {kill.others_s:.1f} s"
                    print(f"kill {len(kills)} after {kill.after_s:.1f} s: {ended}", flush=True)
            _await_end(launch, folder)
        finally:
            launch.close()
        digests.append(_digest(runs))
    return kills, digests


def _kill_one(launch: Launch, chance: random.Random) -> Kill | None:
    """Kill any of the four at any moment from its birth on; None if the run ended before."""
    started_s = time.monotonic()
    after_s = chance.uniform(0.0, _SPREAD_S)
    while time.monotonic() - started_s < after_s or len(launch.ranks()) < 4:
        if launch.is_over:
            return None
        time.sleep(0.05)
    ranks = launch.ranks()
    victim = chance.choice(ranks)
    others = [one for one in ranks if one.pid != victim.pid]
    victim.kill()
    killed_s = time.monotonic()
    ended_s: list[float] = [0.0]
    _, alive = psutil.wait_procs(
        others, timeout=LIMIT_S, callback=lambda _: ended_s.append(time.monotonic() - killed_s)
    )
    return Kill(after_s=killed_s - started_s, others_s=max(ended_s), num_resumed=len(alive))


def _await_end(launch: Launch, folder: Path) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not launch.is_over:
        if time.monotonic() > until_s:
            raise SystemExit(f"the run hangs\n{(folder / 'log.txt').read_text()[-4000:]}")
        time.sleep(0.2)
    if any(one.returncode for one in launch.processes[-2:] if one.poll() is not None):
        raise SystemExit((folder / "log.txt").read_text()[-4000:])


def _trains(process: psutil.Process) -> bool:
    """Ranks of `isthmus run` are forked from a server; those of torchrun are the command itself."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        command, parent = process.cmdline(), process.parent()
        is_forked = parent is not None and "forkserver" in " ".join(parent.cmdline())
        is_started = "isthmus" in command and "--cloud" in command and "torch.distributed.run" not in command
        return is_forked or is_started
    return False


def _digest(runs: Path) -> str:
    """SHA-256 over all weights of the one finished run."""
    (model,) = runs.glob("kill/*/model")
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _make_certificates(folder: Path) -> None:
    def certs(*words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "isthmus", "certs", *words], cwd=folder, check=True, capture_output=True
        )

    certs("authority")
    for cloud in ("east", "west"):
        certs("request", cloud)
        certs("sign", f"certs/{cloud}.csr", "--cloud", cloud)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show(kills: Sequence[Kill], expected: str, found: Sequence[str], given: argparse.Namespace) -> None:
    longest_s = max(one.others_s for one in kills)
    same = all(one == expected for one in found)
    resumed = sum(one.num_resumed for one in kills)
    print(f"\n{len(kills)} kills: {3 * len(kills) - resumed} other processes ended within {longest_s:.1f} s")
    print(f"(limit {LIMIT_S:g} s); {resumed} had not met the lost rank yet, and went on")
    print(f"weights as undisturbed: {'yes' if same else 'NO'} ({expected[:16]}…, {len(found)} runs)")
    finish(
        "kill_ranks",
        "torch",
        launcher=given.launcher,
        sharding=given.sharding,
        num_kills=len(kills),
        after_s=[round(one.after_s, 1) for one in kills],
        others_s=[round(one.others_s, 2) for one in kills],
        num_resumed=[one.num_resumed for one in kills],
        same_weights=same,
        seed=SEED,
    )
    if not same or longest_s > LIMIT_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
