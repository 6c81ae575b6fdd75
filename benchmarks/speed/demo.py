"""A run of the demo with codecs: for how much of it a codec worked while its cloud had nothing to compute."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.events import COMPUTE_KINDS, EVENTS_FOLDER, Span, read_events
from isthmus.observe.timeline import shared_s, total_s, union

_CODING_KINDS: Final = frozenset({"encode", "decode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoShare:
    """One cloud of the demo: shares of the run from the end of its first step to that of its last."""

    cloud: str
    coding: float
    delaying: float
    """Of coding while nothing was computed here: it held the computation up by no more than that."""


def measure_demo(job: Path, folder: Path, *, num_steps: int, codecs: tuple[str, str]) -> list[DemoShare]:
    """Run a job with these codecs on every link, and read its events."""
    command = [sys.executable, "-m", "isthmus", "run", str(job), "--runs", str(folder), "--resume", "never"]
    command += ["--json", "--set", f"train.steps={num_steps}"]
    command += ["--set", f"link.0.codec.forward={codecs[0]}", "--set", f"link.0.codec.backward={codecs[1]}"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    run = Path(json.loads(told)["run"])
    return [_share(file) for file in sorted((run / EVENTS_FOLDER).glob("*.jsonl"))]


def _share(file: Path) -> DemoShare:
    spans = [event for event in read_events(file) if isinstance(event, Span)]
    updates = [span.end_s for span in spans if span.kind == "optimize"]
    first_s, last_s = updates[0], updates[-1]
    within = [span for span in spans if first_s <= span.start_s and span.end_s <= last_s]
    coding = union((one.start_s, one.end_s) for one in within if one.kind in _CODING_KINDS)
    computing = union((one.start_s, one.end_s) for one in within if one.kind in COMPUTE_KINDS)
    elapsed_s = last_s - first_s
    return DemoShare(
        cloud=file.stem,
        coding=total_s(coding) / elapsed_s,
        delaying=(total_s(coding) - shared_s(coding, computing)) / elapsed_s,
    )
