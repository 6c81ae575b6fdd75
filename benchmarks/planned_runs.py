"""Plans and runs of whole jobs by the commands a user types: a sealed prediction first, then the run."""

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

NUM_WARM_UP_STEPS: Final = 3


class CommandFailed(Exception):
    """A command ended with an error, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan has chosen and predicted."""

    step_s: float
    num_microbatches: int
    layers: tuple[int, ...]
    codecs: tuple[tuple[str, str], ...]
    sha256: str
    """Of the file that held the prediction before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Runs the commands of the package with a cache of their own."""

    cache: Path
    limit_s: float

    def plan(self, job: Path, sealed: Path, *options: str) -> Planned:
        """Plan a job and write its prediction to a file before anything runs."""
        text = self.call("plan", str(job), "--json", *options)
        values = json.loads(text)
        record = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "plan": values}
        sealed.write_text(json.dumps(record, indent=1))
        settings = values["settings"]
        return Planned(
            step_s=values["estimate"]["step_s"],
            num_microbatches=settings["num_microbatches"],
            layers=tuple(stage["layers"][1] - stage["layers"][0] for stage in values["stages"]),
            codecs=tuple((link["forward_codec"], link["backward_codec"]) for link in values["links"]),
            sha256=hashlib.sha256(sealed.read_bytes()).hexdigest(),
        )

    def run(self, job: Path, runs: Path, *options: str) -> list[float]:
        """Run a job; gives what its steps took, without the first ones."""
        text = self.call("run", str(job), "--runs", str(runs), "--resume", "never", "--json", *options)
        return step_times(Path(json.loads(text)["run"]))[NUM_WARM_UP_STEPS:]

    def call(self, *arguments: str, folder: Path | None = None) -> str:
        """One command, started in a folder; gives its output."""
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.cache)}
        command = [sys.executable, "-m", "isthmus", *arguments]
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{' '.join(arguments[:2])} took more than {self.limit_s:g} s") from None
        if done.returncode:
            raise CommandFailed(f"{' '.join(arguments[:2])}: {done.stderr.strip()[-400:]}")
        return done.stdout


def step_times(run: Path) -> list[float]:
    """What each step of a run took, as its first cloud saw it."""
    found: dict[int, float] = {}
    for path in sorted((run / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("kind") == "step" and "loss" in event.get("values", {}):
                found[event["values"]["step"]] = event["values"]["duration_s"]
    return [found[step] for step in sorted(found)]


def middle(times_s: Sequence[float]) -> float:
    """The median of some steps."""
    return statistics.median(times_s)


def error_of(predicted_s: float, measured_s: float) -> float:
    """Of a prediction, as a share of what was measured; negative where it took longer."""
    return predicted_s / measured_s - 1


def job_text(
    name: str,
    *,
    config: Mapping[str, object],
    clouds: Sequence[str],
    links: Sequence[tuple[float, float]],
    device: str,
    data: Mapping[str, object],
    train: Mapping[str, object],
    codec: str = "raw",
    limits: Mapping[str, object] | None = None,
) -> str:
    """A job whose clouds stand in a row on this machine; links are (Mbit/s, ms)."""
    lines = [f'name = "{name}"', "seed = 7", "[model.config]", *_keys(config), "[data]", *_keys(data)]
    for number, cloud in enumerate(clouds):
        lines += ["[[cloud]]", f'name = "{cloud}"', f'device = "{device}"']
        if number < len(clouds) - 1:
            lines.append(f'listen = "127.0.0.1:{7600 + number}"')
    for (mbps, rtt_ms), first, second in zip(links, clouds, clouds[1:], strict=False):
        lines += ["[[link]]", f'between = ["{first}", "{second}"]']
        lines += [f'bandwidth = "{mbps:g} Mbps"', f'rtt = "{rtt_ms:g} ms"', f'codec = "{codec}"']
    order = ", ".join(f'"{cloud}"' for cloud in clouds)
    lines += ["[strategy]", 'kind = "pipeline"', f"clouds = [{order}]", "[train]", *_keys(train)]
    lines += ["[limits]", *_keys(limits or {})]
    return "\n".join(lines) + "\n"


def _keys(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]
