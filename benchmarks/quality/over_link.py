"""One row of each task repeated over a link: every loss must equal that of the cut in the graph, to the bit.

The language model trains in two processes as `isthmus run` has them, over TLS and an emulated WAN. Encoder
and decoder are no stages of the product yet, so what crosses between them goes through a `MemoryLink`, as
packets, within one process. All on the CPU in float32, where nothing but the link differs.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from isthmus.codec.base import Key
from isthmus.codec.ends import Codecs, receiving_end, sending_end
from isthmus.codec.graph import cross
from isthmus.events import Span
from isthmus.job.boundary import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.job.codec import parse_codec
from isthmus.job.load import parse_job
from isthmus.model.anatomy import split_layers
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import Blueprint, fresh_blueprint
from isthmus.model.boundary import Batch, StageInput
from isthmus.model.heads import HEADS
from isthmus.model.randomness import Moment, seed_from
from isthmus.model.stage import Stage
from isthmus.plan.ladder import Pair
from isthmus.train.course import Course, Post
from isthmus.train.crossing.bench import Measured
from isthmus.train.crossing.cut import Cut as LinkCut
from isthmus.train.crossing.words import Evaluated
from isthmus.train.device import Device
from isthmus.train.observer import StepEnded
from isthmus.train.optimize.optimizer import Optimizer, Schedule, total_norm
from isthmus.train.pipeline import pipeline_worker
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.local import LocalWan
from isthmus.wan.memory import MemoryLink
from isthmus.wan.processes import Report, run_clouds
from quality import language, translation
from quality.data import Language
from quality.fitting import Run
from quality.linked_cut import LinkedCut
from quality.rows import ROWS
from quality.translation import TranslationTask

_JOB: Final = """
name = "over-link"
[[cloud]]
name = "east"
listen = "127.0.0.1:7600"
[[cloud]]
name = "west"
[[link]]
between = ["east", "west"]
bandwidth = "1 Gbps"
rtt = "20 ms"
"""
_SEED: Final = 0
_LANGUAGE_ROWS: Final = ("raw", "int4", "30x")
_TRANSLATION_ROW: Final = "30x"
_MAX_NORM: Final = 1.0
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A short training of the language model: small micro-batches, so that several are in flight."""

    folder: Path
    row: str
    recipe: language.LanguageRecipe
    num_steps: int
    num_microbatches: int = 4
    batch: int = 2

    def blueprint(self) -> Blueprint:
        """The model."""
        return fresh_blueprint(self.recipe.config, head=HEADS["causal-lm"])

    @property
    def cut(self) -> LinkCut:
        """What crosses, and how; a bottleneck begins after a third of the steps."""
        row = ROWS[self.row]
        boundary: BoundarySpec = HiddenSpec()
        if row.shrink > 1:
            boundary = BottleneckSpec(
                rank=self.recipe.config["hidden_size"] // row.shrink, num_warmup_steps=self.num_steps // 3
            )
        codecs = Pair(forward=parse_codec(row.forward), backward=parse_codec(row.backward))
        return LinkCut(boundary=boundary, codecs=codecs)

    def stage(self, index: int) -> Stage:
        """One of the two stages."""
        blueprint = self.blueprint()
        layers = split_layers(blueprint.num_layers, 2)[index]
        if index == 0:
            return build_stage(blueprint, layers, seed=_SEED, outbound=self.cut.boundary)
        return build_stage(blueprint, layers, seed=_SEED, inbound=self.cut.boundary)

    def optimizer(self, stage: Stage) -> Optimizer:
        """The product's own."""
        schedule = Schedule(peak=1e-3, num_steps=self.num_steps, num_warmup_steps=2)
        return Optimizer(stage.parameters_by_name(), schedule=schedule, weight_decay=0.1, max_norm=_MAX_NORM)

    def steps(self) -> list[list[Batch]]:
        """The micro-batches of every step."""
        data = Language(self.folder, _CPU)
        num_batches = self.num_steps * self.num_microbatches
        ids = data.training(seed=_SEED, num_steps=num_batches, batch=self.batch, length=self.recipe.length)
        batches = [Batch(ids=one, num_targets=one[:, 1:].numel(), labels=one) for one in ids]
        return [
            batches[start : start + self.num_microbatches]
            for start in range(0, num_batches, self.num_microbatches)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Losses of the same training over a link and in the graph."""

    what: str
    row: str
    over_link: tuple[float, ...]
    in_graph: tuple[float, ...]

    @property
    def is_equal(self) -> bool:
        """To the bit."""
        return self.over_link == self.in_graph


def over_link(folder: Path, *, is_tiny: bool) -> None:
    """Repeat the rows, print a table and a JSON line, and fail where a bit differs."""
    torch.set_num_threads(1)
    recipe = language.TINY if is_tiny else language.FULL
    found = [
        compare_language(Trial(folder=folder, row=row, recipe=recipe, num_steps=3 if is_tiny else 10))
        for row in _LANGUAGE_ROWS
    ]
    found.append(compare_translation(folder, num_steps=4 if is_tiny else 30))
    table = Table("what", "codecs", "steps", "first loss", "last loss", "equal to the bit")
    for one in found:
        table.add_row(
            one.what,
            ROWS[one.row].label,
            str(len(one.in_graph)),
            f"{one.in_graph[0]:.6f}",
            f"{one.in_graph[-1]:.6f}",
            str(one.is_equal),
        )
    Console(width=140).print(table)
    results = [{"what": one.what, "row": one.row, "equal": one.is_equal} for one in found]
    print(json.dumps({"benchmark": "codec_quality over a link", "results": results}))
    if not all(one.is_equal for one in found):
        raise SystemExit(1)


def compare_language(trial: Trial) -> Comparison:
    """Two processes over the emulated WAN, and one graph."""
    job = parse_job(_JOB, file=Path("over-link.toml"))
    with LocalWan(job) as wan:
        work = functools.partial(be_cloud, trial=trial)
        linked = run_clouds(job, work, wan, on_report=lambda *_: None)["east"]
    return Comparison(
        what="language model, two processes over TLS",
        row=trial.row,
        over_link=tuple(linked),
        in_graph=tuple(train_in_graph(trial)),
    )


class Losses:
    """An observer that keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def span(self, span: Span) -> None:
        """Nothing."""

    def measured(self, found: Measured) -> None:
        """Nothing."""

    def evaluated(self, found: Evaluated) -> None:
        """Nothing."""

    def step_ended(self, ended: StepEnded) -> None:
        """Keep it."""
        self.values.append(ended.loss)


@dataclass(frozen=True)
class Given:
    """Micro-batches made beforehand."""

    steps: Sequence[Sequence[Batch]]

    def training(self, step: int) -> Sequence[Batch]:
        """Those of a step."""
        return self.steps[step]

    def validation(self) -> Sequence[Batch]:
        """None."""
        return ()


def be_cloud(_: Any, endpoint: Endpoint, *, cloud: str, report: Report, trial: Trial) -> list[float]:
    """One stage; gives the losses that it has seen."""
    del report
    torch.set_num_threads(1)
    is_first = cloud == "east"
    link = endpoint.link("west" if is_first else "east")
    link.wait_ready()
    course = Course(
        num_stages=2,
        num_steps=trial.num_steps,
        num_microbatches=trial.num_microbatches,
        seed=_SEED,
        max_in_flight=trial.num_microbatches,
        cuts=(trial.cut,),
    )
    stage = trial.stage(0 if is_first else 1)
    losses = Losses()
    worker, traffic = pipeline_worker(
        course=course,
        post=Post(
            cloud=cloud,
            index=0 if is_first else 1,
            up=None if is_first else link,
            down=link if is_first else None,
        ),
        stage=stage,
        optimizer=trial.optimizer(stage),
        device=Device("cpu"),
        source=Given(trial.steps()) if is_first else None,
        observer=losses,
    )
    with traffic:
        worker.run(course.turns())
    return losses.values


def train_in_graph(trial: Trial) -> list[float]:
    """The same training with the cut in the graph; the optimizers are the product's own, one a stage."""
    stages = [trial.stage(index) for index in range(2)]
    optimizers = [trial.optimizer(stage) for stage in stages]
    cut = trial.cut
    codecs = Codecs(
        forward=cut.codecs.forward,
        backward=cut.codecs.backward,
        width=cut.boundary.crossing_width(trial.recipe.config["hidden_size"]),
        seed=seed_from("cut", _SEED, 0),
    )
    ends = (sending_end(codecs, device=_CPU), receiving_end(codecs, device=_CPU))
    losses = []
    for step, batches in enumerate(trial.steps()):
        num_targets = sum(batch.num_targets for batch in batches)
        if step == cut.num_warmup_steps and stages[0].down is not None and stages[1].up is not None:
            stages[1].up.begin(stages[0].down.begin())
        loss_sum = 0.0
        for number, batch in enumerate(batches):
            inputs = StageInput(
                batch=batch,
                moment=Moment(seed=_SEED, step=step, microbatch=number),
                is_warming_up=step < cut.num_warmup_steps,
            )
            crossing = stages[0](inputs).crossing
            if not inputs.is_warming_up:
                key = Key(step=step, microbatch=number)
                crossing = cross(crossing, sending=ends[0], receiving=ends[1], key=key, ids=batch.ids)
            output = stages[1](replace(inputs, crossing=crossing))
            output.backward(loss_weight=1 / num_targets)
            loss_sum += float(output.loss.detach())
        losses.append(loss_sum / num_targets)
        norm = total_norm([one for optimizer in optimizers for one in optimizer.squared_norms()])
        for optimizer in optimizers:
            optimizer.update(step, norm=norm)
    return losses


def compare_translation(folder: Path, *, num_steps: int) -> Comparison:
    """The crossing as packets through a link in memory, and in the graph."""
    run = Run(task="mt", row=_TRANSLATION_ROW, seed=_SEED, num_steps=num_steps)
    recipe = translation.TINY
    with MemoryLink("east", "west") as wan:
        linked = TranslationTask(folder, _CPU, recipe, make_cut=functools.partial(LinkedCut, wan=wan)).train(
            run
        )
    plain = TranslationTask(folder, _CPU, recipe).train(run)
    return Comparison(
        what="translation, packets through a MemoryLink",
        row=run.row,
        over_link=(*linked.train_losses, linked.loss_on),
        in_graph=(*plain.train_losses, plain.loss_on),
    )
