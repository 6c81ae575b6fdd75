"""From what was measured to what a step will take: the product's simulator, and nothing of the runs."""

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from isthmus.job.load import replace_file
from isthmus.plan.scenario import HopLoad, Line, Policy, Scenario, StageLoad, scenario_to_dict
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.times import read_profile
from predicted.cases import Case
from predicted.measuring import Beside, Folder
from predicted.packets import Packets

NUM_WARM_UP_STEPS: Final = 2
NUM_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step will take, with the windows that it will have."""

    step_s: float
    windows: tuple[int, ...]
    scenario: dict[str, Any]


def predict(case: Case, folder: Folder) -> Prediction:
    """The median of the steps that will count."""
    scenario = scenario_of(case, folder)
    steps = simulate_scenario(scenario, num_steps=NUM_WARM_UP_STEPS + NUM_STEPS, seed=case.number).steps
    counted = steps[NUM_WARM_UP_STEPS:]
    return Prediction(
        step_s=statistics.median(step.duration_s for step in counted),
        windows=counted[-1].windows,
        scenario=scenario_to_dict(scenario),
    )


def scenario_of(case: Case, folder: Folder) -> Scenario:
    """A case as it was measured."""
    probes = [json.loads(folder.probe(case, cloud).read_text()) for cloud in case.wan.clouds[:-1]]
    packets = [Beside.read(folder.beside(case, cloud)).packets for cloud in case.wan.clouds]
    return Scenario(
        stages=tuple(_stage(case, folder, cloud) for cloud in case.wan.clouds),
        hops=tuple(
            _hop(one, first, second) for one, (first, second) in zip(probes, pairwise(packets), strict=True)
        ),
        num_microbatches=case.num_microbatches,
        policy=Policy(case.policy),
    )


def _stage(case: Case, folder: Folder, cloud: str) -> StageLoad:
    profile, size = read_profile(folder.profile(case, cloud)), case.stages.size
    (times,) = profile.sample(
        num_sequences=size.num_sequences, sequence_length=size.sequence_length, precision=size.precision
    ).layers
    return StageLoad(
        cloud=cloud,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        update_s=profile.update_s_per_parameter * Beside.read(folder.beside(case, cloud)).num_parameters,
    )


def _hop(probe: dict[str, Any], first: Packets, second: Packets) -> HopLoad:
    """Each end makes packets of its own and reads those of the other."""
    down_bps, up_bps = probe["bandwidth_bps"]
    return HopLoad(
        line=Line(
            down_bps=down_bps,
            up_bps=up_bps,
            latency_s=probe["rtt_s"] / 2,
            jitter_s=probe["jitter_s"] / 2,
            handling_s=probe["handling_s"],
        ),
        forward_bytes=first.forward_bytes,
        backward_bytes=second.backward_bytes,
        forward_coding_s=first.make_forward_s + second.read_forward_s,
        backward_coding_s=second.make_backward_s + first.read_backward_s,
    )


def write_predictions(cases: Sequence[Case], folder: Folder, path: Path) -> dict[int, Prediction]:
    """Predict all cases and write them down at once, for the runs begin when the file is there."""
    found = {case.number: predict(case, folder) for case in cases}
    record = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "predictions": {number: asdict(one) for number, one in found.items()},
    }
    replace_file(path, json.dumps(record, indent=1))
    return found


def seal_of(path: Path) -> dict[str, str]:
    """When predictions were written, and the SHA-256 of their file."""
    content = path.read_bytes()
    return {"written": json.loads(content)["written"], "sha256": hashlib.sha256(content).hexdigest()}
