"""A job made ready for the search: clouds in their order, links with their codecs, the model's costs."""

from dataclasses import dataclass
from typing import Final

from isthmus.errors import UserError
from isthmus.job import (
    CodecSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    PipelineStrategy,
)
from isthmus.job.codec import BottleneckSpec
from isthmus.plan.candidates import LinkTerms, Terms
from isthmus.plan.codecs import Bounds, Loss, codec_levels
from isthmus.plan.costs import CostSource, PlannedModel, check_length, nothing_measured
from isthmus.plan.job_facts import (
    OPEN,
    CloudFacts,
    StepFacts,
    check_even,
    check_lock_step,
    cloud_facts,
    levels,
    line,
    policy_of,
    step_facts,
)
from isthmus.plan.memory import Bottleneck, bottleneck_costs
from isthmus.plan.models import read_model
from isthmus.plan.scenario import Policy
from isthmus.plan.stage_tables import LinkFacts, ModelSupply
from isthmus.plan.walks import Constraints

LOSSES: Final = {"none": Loss.NONE, "slight": Loss.SLIGHT, "some": Loss.SOME}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All that the search needs to know of a job."""

    job: Job
    model: PlannedModel
    step: StepFacts
    clouds: tuple[CloudFacts, ...]
    supply: ModelSupply
    terms: Terms
    source: CostSource = nothing_measured

    @property
    def strategy(self) -> PipelineStrategy:
        """What the job says of a pipeline, if anything."""
        return _pipeline(self.job) or PipelineStrategy(kind="pipeline")

    @property
    def in_lock_step(self) -> "Study | None":
        """The same with ranks that can share out all of a stage; None where the job has its own policy."""
        if self.strategy.policy != OPEN or self.terms.policy.keeps_order:
            return None
        return self.of(self.job, policy=Policy.LOCK_STEP)

    def of(self, job: Job, *, policy: Policy | None = None) -> "Study":
        """A study of another job, with costs from the same source."""
        return study(job, policy=policy, source=self.source)


def study(job: Job, *, policy: Policy | None = None, source: CostSource = nothing_measured) -> Study:
    """Read a job, or say in one sentence what is missing or wrong; by this policy if it leaves that open."""
    model, step = read_model(job, source=source), step_facts(job)
    strategy = _pipeline(job)
    clouds = _ordered(cloud_facts(job), strategy)
    _check_given(strategy, model, step, clouds)
    check_length(step.sequence_length, model.max_length)
    for link in job.link:
        link.boundary.check_width(model.width)
    own = strategy or PipelineStrategy(kind="pipeline")
    if not isinstance(job.strategy, DataStrategy | GeneratorDiscriminatorStrategy):
        check_lock_step(job.used(), own)
        check_even(job.used(), num_sequences=step.num_sequences, sequence_length=step.sequence_length)
    policy = policy or policy_of(job.used(), own)
    return Study(
        job=job,
        model=model,
        step=step,
        clouds=clouds,
        supply=make_supply(job, model, step, clouds, policy=policy),
        terms=Terms(
            links={frozenset(link.between): _link_terms(job, link, model.width) for link in job.link},
            constraints=_constraints(strategy, model),
            policy=policy,
            max_in_flight=strategy.max_in_flight if strategy else None,
            windows=strategy.windows if strategy else None,
            counts_money=job.limits.counts_money,
        ),
        source=source,
    )


def make_supply(
    job: Job,
    model: PlannedModel,
    step: StepFacts,
    clouds: tuple[CloudFacts, ...],
    *,
    policy: Policy = Policy.WAN_ONE_F_ONE_B,
) -> ModelSupply:
    """What these clouds take for the model, with every link between them whose figures are known."""
    numbers = {cloud.name: number for number, cloud in enumerate(clouds)}
    links = {}
    for link in job.link:
        if all(name in numbers for name in link.between):
            for first, second in (link.between, link.between[::-1]):
                links[numbers[first], numbers[second]] = _link_facts(link, first, model)
    return ModelSupply(
        clouds=clouds,
        links=links,
        step=step,
        levels=levels(job, clouds, policy),
        costs_of=model.costs_of,
        memory_share=job.limits.memory_share,
        messages=model.messages,
        num_frozen=job.model.frozen_layers if job.model is not None else 0,
    )


def _pipeline(job: Job) -> PipelineStrategy | None:
    return job.strategy if isinstance(job.strategy, PipelineStrategy) else None


def _ordered(clouds: tuple[CloudFacts, ...], strategy: PipelineStrategy | None) -> tuple[CloudFacts, ...]:
    if strategy is None or strategy.clouds is None:
        return clouds
    by_name = {cloud.name: cloud for cloud in clouds}
    for name in strategy.clouds:
        if name not in by_name:
            raise UserError(
                f"strategy.clouds names {name!r}, but there is no such cloud",
                hint=f"the clouds are {', '.join(by_name)}",
            )
    return tuple(by_name[name] for name in strategy.clouds)


def _constraints(strategy: PipelineStrategy | None, model: PlannedModel) -> Constraints:
    stops = None
    if strategy is not None and strategy.layers is not None:
        stops = tuple(sum(strategy.layers[: stage + 1]) for stage in range(len(strategy.layers)))
    return Constraints(
        in_row=strategy is not None and (strategy.clouds is not None or stops is not None),
        stops=stops,
        cuts=model.cuts,
        uses_all=strategy is not None,
    )


def _check_given(
    strategy: PipelineStrategy | None, model: PlannedModel, step: StepFacts, clouds: tuple[CloudFacts, ...]
) -> None:
    if strategy is None:
        return
    if strategy.microbatches is not None and step.num_sequences % strategy.microbatches:
        raise UserError(
            f"the {step.num_sequences} sequences of a step cannot be divided into "
            f"{strategy.microbatches} micro-batches",
            hint=f"set strategy.microbatches to a divisor of {step.num_sequences}",
        )
    check_lists(strategy, num_clouds=len(clouds))
    if strategy.layers is not None and sum(strategy.layers) != model.num_layers:
        raise UserError(
            f"strategy.layers adds up to {sum(strategy.layers)}, but the model has {model.num_layers} layers",
            hint="make it add up, or leave it out and let the planner choose",
        )
    if len(clouds) > model.num_layers:
        raise UserError(
            f"{len(clouds)} clouds need {len(clouds)} layers at least, and the model has {model.num_layers}",
            hint="name fewer clouds in strategy.clouds, or take a deeper model",
        )


def check_lists(strategy: PipelineStrategy, *, num_clouds: int) -> None:
    """Refuse lists that have not one entry for each stage."""
    lists = {"layers": strategy.layers, "windows": strategy.windows, "max_in_flight": strategy.max_in_flight}
    for key, given in lists.items():
        if isinstance(given, tuple) and len(given) != num_clouds:
            raise UserError(
                f"strategy.{key} has {len(given)} entries for {num_clouds} stages",
                hint=f"give one number for each stage, or leave {key} out",
            )


def _link_terms(job: Job, link: LinkSpec, width: int) -> LinkTerms:
    return LinkTerms(
        between=link.between,
        usd_per_gib=link.usd_per_gib,
        bounds=Bounds(
            loss=LOSSES[job.limits.codec_loss],
            forward=link.codec.forward if isinstance(link.codec.forward, CodecSpec) else None,
            backward=link.codec.backward if isinstance(link.codec.backward, CodecSpec) else None,
        ),
        # As steering has it, or a run would change codecs that were planned right.
        rungs=codec_levels(link.boundary.crossing_width(width), shares_ids=True),
    )


def _link_facts(link: LinkSpec, first: str, model: PlannedModel) -> LinkFacts:
    return LinkFacts(
        line=line(link, first),
        width=link.boundary.crossing_width(model.width),
        bottleneck=_bottleneck(link, model),
    )


def _bottleneck(link: LinkSpec, model: PlannedModel) -> Bottleneck | None:
    if not isinstance(link.boundary, BottleneckSpec):
        return None
    return bottleneck_costs(link.boundary, width=model.width, vocabulary_size=model.vocabulary_size)
