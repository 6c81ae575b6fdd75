"""One row of each task repeated over a link: every loss must equal that of the cut in the graph, to the bit.

The language model trains in two processes as `isthmus run` has them, over TLS and an emulated WAN. Encoder
and decoder are no stages of the product yet, so what crosses between them goes through a `MemoryLink`, as
packets, within one process. All on the CPU in float32, where nothing but the link differs.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from emulated import run_on, wan_of
from member import pipeline_config, prepare_process, run_member
from rich.console import Console
from rich.table import Table

from isthmus.codec.base import Key
from isthmus.codec.chain import Codecs, cross, receiving_end, sending_end
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec, parse_codec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, split_layers
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey, seed_from
from isthmus.model.stage import Batch, Stage, StageInput
from isthmus.plan.codecs import Crossing, Pair
from isthmus.plan.end_of_step import total_norm
from isthmus.train.device import Device
from isthmus.train.optimizer import Optimizer, Schedule
from isthmus.train.run_config import RunConfig
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink
from quality import language, translation
from quality.data import Language
from quality.fitting import Run
from quality.linked_cut import LinkedCut
from quality.rows import ROWS
from quality.translation import TranslationTask

_WAN: Final = wan_of((20, 1000))
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
    def config(self) -> RunConfig:
        """What both stages agree on; a bottleneck begins after a third of the steps."""
        row, width = ROWS[self.row], self.recipe.config["hidden_size"]
        boundary: BoundarySpec = HiddenSpec()
        if row.shrink > 1:
            boundary = BottleneckSpec(rank=width // row.shrink, num_warmup_steps=self.num_steps // 3)
        return pipeline_config(
            _WAN.clouds,
            pair=Pair(forward=parse_codec(row.forward), backward=parse_codec(row.backward)),
            crossing=Crossing(num_rows=self.batch * self.recipe.length, width=boundary.crossing_width(width)),
            boundary=boundary,
            seed=_SEED,
            num_steps=self.num_steps,
            num_microbatches=self.num_microbatches,
            max_in_flight=self.num_microbatches,
        )

    def stage(self, index: int) -> Stage:
        """One of the two stages."""
        blueprint, boundary = self.blueprint(), self.config.boundary(0)
        layers = split_layers(blueprint.num_layers, 2)[index]
        if index == 0:
            return build_stage(blueprint, layers, seed=_SEED, outbound=boundary)
        return build_stage(blueprint, layers, seed=_SEED, inbound=boundary)

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
    linked: list[float] = run_on(_WAN, functools.partial(be_cloud, trial=trial))
    return Comparison(
        what="language model, two processes over TLS",
        row=trial.row,
        over_link=tuple(linked),
        in_graph=tuple(train_in_graph(trial)),
    )


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


def be_cloud(cloud: str, links: Mapping[str, Link], *, trial: Trial) -> list[float]:
    """One stage; gives the losses that it has seen."""
    prepare_process()
    index = _WAN.clouds.index(cloud)
    stage = trial.stage(index)
    record = run_member(
        trial.config,
        cloud,
        links,
        stage=stage,
        optimizer=trial.optimizer(stage),
        device=Device("cpu"),
        source=None if index else Given(trial.steps()),
    )
    return [one.loss for one in record.steps]


def train_in_graph(trial: Trial) -> list[float]:
    """The same training with the cut in the graph; the optimizers are the product's own, one a stage."""
    stages = [trial.stage(index) for index in range(2)]
    optimizers = [trial.optimizer(stage) for stage in stages]
    config = trial.config
    (cut,) = config.pipeline.cuts
    codecs = Codecs(
        forward=cut.codecs.forward,
        backward=cut.codecs.backward,
        width=cut.crossing.width,
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
                rng_key=RngKey(seed=_SEED, step=step, microbatch=number),
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
