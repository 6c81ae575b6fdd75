"""`isthmus doctor`: what is ready for a job on this machine and what is not, each with its cure."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from isthmus.cli.options import JobArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from isthmus.job import Job
    from isthmus.wan.devices import Devices
    from isthmus.wan.doctor import Finding

_RUNS: Final = Path("runs")
_TORCH_TIMEOUT_S: Final = 120.0
# In a process of its own, since importing torch takes seconds and a broken driver may end the interpreter.
_FIND_DEVICES: Final = """
import json, torch
device = torch.accelerator.current_accelerator()
num_devices = torch.accelerator.device_count()
print(json.dumps([device.type if num_devices else None, num_devices]))
"""


def doctor(
    job: JobArgument,
    cloud: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cloud that this machine belongs to.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check before a run that this machine is ready for the job."""
    from isthmus.job import load_job
    from isthmus.wan.doctor import Verdict, examine

    loaded = load_job(job, overrides=overrides or ())
    here = loaded.cloud_named(cloud) if cloud is not None else None
    findings = []
    ready = examine(loaded, here, find_devices=find_devices, runs=_RUNS, now=datetime.now(UTC))
    for finding in chain(ready, _examine_inputs(loaded, cloud)):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_sum(findings, job, cloud)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(1)


def _examine_inputs(job: "Job", cloud: str | None) -> "Iterator[Finding]":
    """Whether model and data can be had here; all clouds need the model, and the first one the data."""
    from isthmus.wan.doctor import check_by

    if job.model is None or job.data is None or find_spec("torch") is None:
        return
    from isthmus.job import stage_order
    from isthmus.train.preflight import look_at_data, look_at_model

    yield check_by("model", lambda: look_at_model(job))
    if cloud in (None, stage_order(job)[0]):
        yield check_by("data", lambda: look_at_data(job))


def find_devices() -> "Devices":
    """Return what torch finds on this machine."""
    from isthmus.wan.devices import Devices

    command = [sys.executable, "-c", _FIND_DEVICES]
    try:
        done = subprocess.run(  # noqa: S603 no part of the command comes from outside
            command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Devices(problem=f"no answer within {_TORCH_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        return Devices(problem=_last_line(done.stderr) or f"exit code {done.returncode}")
    kind, num_devices = json.loads(_last_line(done.stdout))
    return Devices(kind=kind, num_devices=num_devices)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _print(finding: "Finding") -> None:
    mark, colour = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}[finding.verdict]
    typer.echo(f"{typer.style(mark, fg=colour)} {finding.name}: {finding.what}")
    if finding.cure is not None:
        typer.echo(f"  cure: {finding.cure}")


def _print_sum(findings: "Sequence[Finding]", job: Path, cloud: str | None) -> None:
    num_failed = sum(finding.verdict == "failed" for finding in findings)
    if num_failed:
        typer.secho(f"next: mend what has a cross ({num_failed}), then run this again", dim=True)
    else:
        here = "" if cloud is None else f" --cloud {cloud}"
        typer.secho(f"next: isthmus probe {job}{here}", dim=True)
