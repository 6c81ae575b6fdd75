"""Steps of one job with several micro-batches and codecs, one after the other, by the run's own parts.

A run starts processes, makes tokens, saves and exports; a sweep of ten settings would spend its time on that.
Here each cloud of a job starts once and builds its stage once, as a run does (`Build`), and then trains some
steps by each setting: the same scheduler, actor, wires, TLS and emulated WAN as in `isthmus run`, on made-up
tokens.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from isthmus.errors import CloudFailed
from isthmus.job import Job, LinkSpec, parse_codec, stage_order
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.job_facts import links_along
from isthmus.plan.plan import Decisions
from isthmus.plan.types import Member
from isthmus.train.build import Build
from isthmus.train.device import Device
from isthmus.train.in_cloud import World
from isthmus.train.members import Neighbours
from isthmus.train.pipeline_config import decide, run_config
from isthmus.train.pipeline_role import PipelineRole, pipeline_stage
from isthmus.train.profiling import made_up_batch, made_up_blueprint, made_up_size, threads_here
from isthmus.train.rehearsal import SameBatches, StepRecord
from isthmus.train.role import open_loop
from isthmus.train.session import SWITCH_INTERVAL_S
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.local import LocalWan, run_ranks

NUM_WARM_UP_STEPS = 3
"""By then windows have settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Micro-batches and codecs that are tried; `codecs` are of each hop, there and back."""

    num_microbatches: int
    codecs: tuple[tuple[str, str], ...]

    @property
    def words(self) -> str:
        return f"{self.num_microbatches} micro-batches, {self.codecs[0][0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What the steps of a setting took and came to, at the first cloud."""

    setting: Setting
    steps_s: tuple[float, ...]
    """Without the first ones."""
    losses: tuple[float, ...]
    windows: tuple[int, ...]
    busy_s: tuple[float, ...]
    """How long each stage computed in the last step."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def words(self) -> str:
        shares = ", ".join(f"{one / self.step_s:.0%}" for one in self.busy_s)
        return f"{self.setting.words}: {self.step_s:.3f} s, windows {self.windows}, busy {shares}"


def _read(text: str) -> Tried:
    values = json.loads(text)
    setting = values.pop("setting")
    codecs = tuple((there, back) for there, back in setting["codecs"])
    lists = {name: tuple(one) for name, one in values.items()}
    return Tried(setting=Setting(num_microbatches=setting["num_microbatches"], codecs=codecs), **lists)


def sweep(
    job: Job,
    decisions: Decisions,
    settings: Sequence[Setting],
    *,
    num_steps: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[Tried]:
    """Train some steps by each setting, on this machine; the cut and all else is as decided.

    A setting that fails, for want of memory say, is left out, and the others follow in new processes.
    """
    work = partial(
        _train_all,
        decisions=decisions,
        num_steps=num_steps,
        num_threads=threads_here(job),
    )
    found: list[Tried] = []

    def hear(cloud: str, text: str) -> None:
        if cloud == stage_order(job)[0] and text.startswith("{"):
            found.append(_read(text))
            report(found[-1].words)
        else:
            report(f"{cloud}: {text}")

    left = list(settings)
    while left:
        num_before = len(found)
        try:
            with LocalWan(job) as wan:
                run_ranks(job, partial(work, settings=tuple(left)), wan, on_report=hear)
        except CloudFailed as failed:
            num_done = len(found) - num_before
            report(f"{left[num_done].words} failed: {failed.message}")
            left = left[num_done + 1 :]
        else:
            left = []
    return found


def _train_all(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Callable[[str], None],
    spec: RankSpec,
    decisions: Decisions,
    settings: Sequence[Setting],
    num_steps: int,
    num_threads: int,
) -> None:
    """Be one cloud, in a process of its own."""
    del spec
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(num_threads)
    neighbours = Neighbours(endpoint.link, World(), clouds=stage_order(job), cloud=cloud)
    neighbours.meet(job, note=report)
    device, blueprint = Device(job.cloud_named(cloud).device), made_up_blueprint(job)

    def config_of(setting: Setting) -> Any:
        wanted = replace(decisions, num_microbatches=setting.num_microbatches, codecs=setting.codecs)
        wanted = replace(wanted, max_in_flight=None)
        strategy: Any = job.strategy
        given = job.model_copy(
            update={
                "strategy": strategy.model_copy(update={"microbatches": setting.num_microbatches}),
                "link": tuple(_with_codecs(job, setting.codecs)),
            }
        )
        return run_config(given, decide(given, wanted), blueprint, num_validation_microbatches=0)

    first = config_of(settings[0])
    eager = job.model_copy(update={"train": job.train.model_copy(update={"compile": False})})
    build = Build(job=eager, config=first, cloud=cloud, blueprint=blueprint, device=device, world=World())
    built = build.make(pipeline_stage(build))
    if job.train.compile:
        # A run compiles for its one size; sizes after the first must not get kernels for any size.
        built.stage.compile_layers(dynamic=False)
    for setting in settings:
        config = config_of(setting)
        config = replace(config, pipeline=replace(config.pipeline, num_steps=num_steps, save_every_s=None))
        record, source = StepRecord(), None
        if neighbours.index == 0:
            number = job.train.batch_tokens // made_up_size(job, 1).num_tokens // setting.num_microbatches
            generator = torch.Generator().manual_seed(0)
            size = made_up_size(job, number)
            batch = made_up_batch(blueprint.head, blueprint.config.vocab_size, size, generator=generator)
            source = SameBatches((batch,) * setting.num_microbatches)
        member = Member(cloud)
        role = PipelineRole(config, member, built)
        loop = open_loop(
            role,
            member,
            neighbours.links(role.peers),
            observer=record,
            source=source,
        )
        with loop:
            loop.run()
        neighbours.agree_on_end()
        if neighbours.index == 0:
            report(json.dumps(asdict(_tried(setting, record.steps))))


def _with_codecs(job: Job, codecs: Sequence[tuple[str, str]]) -> Iterator[LinkSpec]:
    hops = {one.name: pair for one, pair in zip(links_along(job, stage_order(job)), codecs, strict=True)}
    for link in job.link:
        forward, backward = map(parse_codec, hops[link.name])
        update = {"forward": forward, "backward": backward}
        yield link.model_copy(update={"codec": link.codec.model_copy(update=update)})


def _tried(setting: Setting, ended: Sequence[StepEnded]) -> Tried:
    return Tried(
        setting=setting,
        steps_s=tuple(one.duration_s for one in ended[NUM_WARM_UP_STEPS:]),
        losses=tuple(one.loss for one in ended),
        windows=ended[-1].windows,
        busy_s=ended[-1].busy_s,
    )
