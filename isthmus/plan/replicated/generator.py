"""Plans in which one cloud discriminates what the others generate: token ids and labels cross, one way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from isthmus.errors import UserError
from isthmus.job import GeneratorDiscriminatorStrategy, Job, LinkSpec
from isthmus.plan.costs import PlannedModel, Task
from isthmus.plan.job_facts import line
from isthmus.plan.models import load_config, model_config, read_model, with_task
from isthmus.plan.plan import BubbleSplit, Form, Plan, PlannedLink, estimated
from isthmus.plan.replicated.refusals import Pair, holders, linked_fit, no_room
from isthmus.plan.replicated.replicas import share_out
from isthmus.plan.replicated.whole import Whole, whole_models
from isthmus.plan.stage_tables import ModelSupply
from isthmus.plan.study import Study, make_supply

# XLM-E's generator has 4 layers to the discriminator's 12, of the same width.
_GENERATOR_SHARE: Final = 3
_NOTE: Final = "generators run ahead of the discriminator, so nobody waits for a round trip"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feed:
    """A generator, its link to the discriminator, and what it sends in a step."""

    generator: Whole
    link: LinkSpec
    num_bytes: float

    @property
    def on_line_s(self) -> float:
        """Time on the line in a step."""
        return 8 * self.num_bytes / line(self.link, self.generator.cloud.name).down_bps

    def planned(self, judge: str) -> PlannedLink:
        """Its part of a plan."""
        return PlannedLink(
            between=(self.generator.cloud.name, judge),
            down_bytes=self.num_bytes,
            up_bytes=0.0,
            usd_per_gib=self.link.usd_per_gib,
            reason="token ids and labels, one way",
        )


def generator_plans(study: Study, strategy: GeneratorDiscriminatorStrategy) -> list[Plan]:
    """One for each cloud that may be the discriminator and each number of micro-batches, or why none is."""
    if len(study.clouds) < 2:
        raise UserError("generator and discriminator need two clouds", hint="add a [[cloud]] and a [[link]]")
    small, large = _models(study, strategy)
    generators, judges = (whole_models(_supply(study, one)) for one in (small, large))
    names = _judge_names(study.job, strategy)
    plans = []
    for number, candidates in judges.items():
        for judge in (one for one in candidates if one.cloud.name in names):
            feeds = _feeds(study, generators[number], judge, small.vocabulary_size)
            if feeds:
                plans.append(_plan(study, feeds, judge))
    if not plans:
        raise _refusal(study, strategy)
    return plans


def _judge_names(job: Job, strategy: GeneratorDiscriminatorStrategy) -> list[str]:
    """The clouds that may be the discriminator."""
    given = strategy.discriminator_cloud
    return [cloud.name for cloud in job.cloud] if given is None else [job.cloud_named(given).name]


def _refusal(study: Study, strategy: GeneratorDiscriminatorStrategy) -> UserError:
    pairs_of = partial(_pairs, strategy=strategy)
    given = strategy.discriminator_cloud
    if given is None:
        return no_room(study, pairs_of, claim="discriminator and generator fit on no two linked clouds")
    free = strategy.model_copy(update={"discriminator_cloud": None})
    better = linked_fit(study, _pairs(study, strategy=free))
    ways = [f'set strategy.discriminator_cloud to "{better[0].cloud.name}"'] if better else []
    return no_room(study, pairs_of, claim=f"nothing fits with the discriminator in {given!r}", ways=ways)


def _pairs(study: Study, *, strategy: GeneratorDiscriminatorStrategy) -> list[Pair]:
    """Every cloud that may be the discriminator, with every other as a generator."""
    small, large = (_supply(study, one) for one in _models(study, strategy))
    names = _judge_names(study.job, strategy)
    return [
        (judge, generator)
        for judge, generator in product(holders(large, "the discriminator"), holders(small, "a generator"))
        if judge.cloud.name in names and generator.cloud.name != judge.cloud.name
    ]


def _models(study: Study, strategy: GeneratorDiscriminatorStrategy) -> tuple[PlannedModel, PlannedModel]:
    """A generator and the discriminator."""
    judging, filling = (with_task(study.job, one) for one in (Task.TOKEN_CLASSIFICATION, Task.MASKED_LM))
    config, given = model_config(study.job), strategy.generator
    large = read_model(judging, config, source=study.source)
    if given is not None:
        own = load_config(given.source) if given.source is not None else given.config or {}
    else:
        num_layers = max(1, large.num_layers // _GENERATOR_SHARE)
        own = {**config, "num_hidden_layers": num_layers}
    return read_model(filling, own, source=study.source), large


def _supply(study: Study, model: PlannedModel) -> ModelSupply:
    return make_supply(study.job, model, study.step, study.clouds)


def _feeds(study: Study, generators: Sequence[Whole], judge: Whole, vocabulary: int) -> list[_Feed]:
    """The generators that a link joins to the discriminator, each with its share of a step."""
    links = {frozenset(link.between): link for link in study.job.link}
    joined = [
        (one, link)
        for one in generators
        if (link := links.get(frozenset((one.cloud.name, judge.cloud.name)))) is not None
    ]
    speeds = [one.replica.num_ranks / one.replica.microbatch_s for one, _ in joined]
    step_bytes = study.step.num_sequences * _sequence_bytes(study.step.sequence_length, vocabulary)
    return [
        _Feed(generator=one, link=link, num_bytes=step_bytes * speed / sum(speeds))
        for (one, link), speed in zip(joined, speeds, strict=True)
    ]


def _plan(study: Study, feeds: Sequence[_Feed], judge: Whole) -> Plan:
    """All work at once, since nothing flows back: the slowest of clouds and links counts."""
    number = judge.setting.num_microbatches
    generators = [feed.generator for feed in feeds]
    generate_s = share_out([one.replica for one in generators], number)
    judge_s = share_out([judge.replica], number)
    compute_s = max(generate_s, judge_s)
    step_s = max(compute_s, *(feed.on_line_s for feed in feeds))
    mean_s = (len(feeds) * generate_s + judge_s) / (len(feeds) + 1)
    stages = (
        *(one.stage("generates", busy_s=generate_s) for one in generators),
        judge.stage("discriminates", busy_s=judge_s),
    )
    links = tuple(feed.planned(judge.cloud.name) for feed in feeds)
    bubble = BubbleSplit(
        fill=0.0,
        latency=0.0,
        bandwidth=(step_s - compute_s) / step_s,
        imbalance=(compute_s - mean_s) / step_s,
    )
    return Plan(
        form=Form.GENERATOR_DISCRIMINATOR,
        stages=stages,
        links=links,
        savers=max((one.savers for one in (*generators, judge)), key=len),
        sparing=max((one.sparing for one in (*generators, judge)), key=lambda one: len(one.words)),
        estimate=estimated(
            stages,
            links,
            step_s=step_s,
            num_tokens=study.step.num_tokens,
            num_steps=study.step.num_steps,
            bubble=bubble,
            limiting=_limiting(generate_s, judge_s, step_s, judge.cloud.name),
        ),
        reason="",
        notes=(_NOTE,),
    )


def _limiting(generate_s: float, judge_s: float, step_s: float, judge: str) -> str:
    if step_s > max(generate_s, judge_s):
        return f"bandwidth towards {judge}"
    return f"compute of {judge}" if judge_s >= generate_s else "compute of the generators"


def _sequence_bytes(sequence_length: int, vocabulary: int) -> int:
    """Ids in the smallest type that holds them, and one bit per label."""
    id_bytes = next(size for size in (1, 2, 4, 8) if vocabulary <= 256**size)
    return sequence_length * id_bytes + math.ceil(sequence_length / 8)
