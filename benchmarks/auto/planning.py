"""The jobs of all trials and the product's plans for them, from what was probed and profiled; one file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from predicted.cases import Case
from predicted.measuring import Folder
from predicted.stages import WIDTH
from pydantic import TypeAdapter

from auto.trials import NUM_MICROBATCHES, NUM_TOKENS, Trial
from isthmus.job import Job
from isthmus.job.load import parse_job, replace_file
from isthmus.plan.plan import Decisions
from isthmus.plan.times import read_profile, write_profile
from isthmus.train.pipeline_config import decide, plan_run
from isthmus.units import format_bandwidth, format_duration

TrialsByCase = Mapping[int, Sequence[Trial]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One trial, as every cloud of a run would know it."""

    job: Job
    decisions: Decisions


def write_plans(cases: Sequence[Case], trials: TrialsByCase, folder: Folder, path: Path) -> None:
    """Plan all trials and write them down at once, for the runs begin when the file is there."""
    found = []
    for case in cases:
        profiles = {cloud: _whole_profile(case, cloud, folder) for cloud in case.wan.clouds}
        for trial in trials[case.number]:
            text = job_text(case, trial, probe=_probe(case, folder), profiles=profiles)
            plan = plan_run(parse_job(text, file=path))
            if plan is None or plan.decisions is None:
                raise ValueError(f"nothing was planned for {trial.name}")
            about = {"case": case.number, "trial": trial.name}
            found.append({**about, "job": text, "decisions": asdict(plan.decisions)})
    replace_file(path, json.dumps(found, indent=1))


def read_plan(path: Path, case: Case, trial: Trial) -> Prepared:
    """The plan of one trial, taken over as a cloud takes over that of the first."""
    found = next(
        one
        for one in json.loads(path.read_text())
        if (one["case"], one["trial"]) == (case.number, trial.name)
    )
    job = parse_job(found["job"], file=path)
    return Prepared(
        job=job, decisions=decide(job, TypeAdapter(Decisions).validate_python(found["decisions"]))
    )


def job_text(case: Case, trial: Trial, *, probe: Mapping[str, object], profiles: Mapping[str, Path]) -> str:
    """A job whose model has one layer for each stage; what such a layer takes is in the profiles."""
    first, second = case.wan.clouds
    down_bps, up_bps = (trial.mistake * float(one) for one in _pair(probe["bandwidth_bps"]))
    rtt_s = float(str(probe["rtt_s"]))
    codec = '"auto"'
    if trial.pair is not None:
        codec = f'{{ forward = "{trial.pair.forward}", backward = "{trial.pair.backward}" }}'
    return f"""
name = "codec-auto"
[model.config]
model_type = "llama"
hidden_size = {WIDTH}
intermediate_size = {2 * WIDTH}
num_hidden_layers = 2
num_attention_heads = 16
num_key_value_heads = 16
vocab_size = 256
[data]
source = "builtin:shakespeare"
sequence_length = {NUM_TOKENS}
[[cloud]]
name = "{first}"
device = "cpu"
listen = "127.0.0.1:7600"
profile = "{profiles[first]}"
[[cloud]]
name = "{second}"
device = "cpu"
profile = "{profiles[second]}"
[[link]]
between = ["{first}", "{second}"]
bandwidth = ["{format_bandwidth(down_bps, exact=True)}", "{format_bandwidth(up_bps, exact=True)}"]
rtt = "{format_duration(rtt_s, exact=True)}"
codec = {codec}
[strategy]
kind = "pipeline"
layers = [1, 1]
microbatches = {NUM_MICROBATCHES}
[train]
batch_tokens = {NUM_MICROBATCHES * NUM_TOKENS}
precision = "float32"
[limits]
codec_loss = "{trial.loss.name.lower()}"
"""


def _whole_profile(case: Case, cloud: str, folder: Folder) -> Path:
    """What was measured of one stage, as the profile of a model in which every layer is like it."""
    path = folder.profile(case, cloud)
    profile = read_profile(path)
    num_layers = case.stages.num_stages
    samples = tuple(replace(one, layers=num_layers * one.layers) for one in profile.samples)
    whole = path.with_stem(f"{path.stem}-whole")
    # The update of a model that sleeps takes no time worth counting.
    whole.write_text(write_profile(replace(profile, samples=samples, update_s_per_parameter=0.0)))
    return whole


def _probe(case: Case, folder: Folder) -> dict[str, object]:
    found: dict[str, object] = json.loads(folder.probe(case, case.wan.clouds[0]).read_text())
    return found


def _pair(values: object) -> tuple[float, float]:
    match values:
        case [float(down), float(up)]:
            return down, up
    raise ValueError(f"{values!r} are no two bandwidths")
