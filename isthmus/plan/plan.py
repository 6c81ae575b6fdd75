"""A plan: stages and links, what a step takes and costs, the file `plan.json`, and how a job follows it."""

import enum
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, TypeAdapter

from isthmus.errors import UserError
from isthmus.events import Span
from isthmus.job import Job
from isthmus.plan.codecs import Loss
from isthmus.plan.job_facts import run_order
from isthmus.plan.memory import Memory, Sharding
from isthmus.plan.scenario import Caps, Policy, Scenario
from isthmus.plan.study import MemoryOptions
from isthmus.plan.times import CloudFacts
from isthmus.units import format_duration


class Form(enum.Enum):
    """How the work is split between clouds."""

    ALONE = "one cloud alone"
    PIPELINE = "pipeline"
    DATA = "data"
    GENERATOR_DISCRIMINATOR = "generator-discriminator"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One cloud's part: what it holds, and the memory that a rank of it needs, part by part."""

    cloud: str
    holds: str
    num_ranks: int
    busy_s: float
    """What its busiest rank computes in a step."""
    window: int
    memory: Mapping[str, int]
    capacity_bytes: int | None
    usd_per_hour: float | None
    layers: tuple[int, int] | None = None
    """The first layer, and the one behind the last."""
    sharding: Sharding = Sharding.NONE
    """What its ranks shard."""
    is_measured: bool = False
    """Whether its times are those of a profile, and not the catalogue's."""

    @property
    def memory_bytes(self) -> int:
        """What a rank needs in all."""
        return sum(self.memory.values())

    @property
    def memory_share(self) -> float:
        """The share of a rank's memory that it needs; 0 where that is unknown."""
        return self.memory_bytes / (self.capacity_bytes or math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLink:
    """What crosses a link in a step, from the first cloud to the second and back, and how it is coded."""

    between: tuple[str, str]
    down_bytes: float
    up_bytes: float
    forward_codec: str = "raw"
    backward_codec: str = "raw"
    usd_per_gib: float | None = None
    reason: str = ""

    @property
    def num_bytes(self) -> float:
        """The bytes of both directions."""
        return self.down_bytes + self.up_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The first steps, in which hidden states cross raw where bottlenecks are to begin."""

    num_steps: int
    step_s: float
    wan_bytes: float
    """Over all links, both ways, in a step."""
    usd_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan comes to; dollars are None where a price is unknown.

    Figures of a step are those behind the warm-up of bottlenecks; totals have both.
    """

    step_s: float
    tokens_per_s: float
    bubble: float
    """The share of a step in which clouds do not compute, mean over clouds."""
    wan_bytes: float
    """Over all links, both ways, in a step."""
    usd_per_step: float | None
    usd_per_million_tokens: float | None
    num_steps: int
    limiting: str
    """The bottleneck resource: an unlimited supply of it would shorten a step the most."""
    reliefs: Mapping[str, float] = field(default_factory=dict)
    """By what share an unlimited supply of each resource would shorten a step, the most first."""
    is_simulated: bool = False
    warmup: Warmup | None = None
    """None without bottlenecks."""

    @property
    def num_warmup_steps(self) -> int:
        """Steps before bottlenecks begin."""
        return 0 if self.warmup is None else self.warmup.num_steps

    @property
    def total_s(self) -> float:
        """The whole run."""
        return self._over_run(self.step_s, 0.0 if self.warmup is None else self.warmup.step_s)

    @property
    def total_usd(self) -> float | None:
        """The whole run, None where a price is unknown."""
        if self.usd_per_step is None:
            return None
        first_usd = None if self.warmup is None else self.warmup.usd_per_step
        return self._over_run(self.usd_per_step, first_usd or 0.0)

    @property
    def total_wan_bytes(self) -> float:
        """The whole run, over all links."""
        return self._over_run(self.wan_bytes, 0.0 if self.warmup is None else self.warmup.wan_bytes)

    def _over_run(self, each: float, first: float) -> float:
        """The sum of what every step takes, and every first one."""
        return self.num_warmup_steps * first + (self.num_steps - self.num_warmup_steps) * each


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How the stages work together; `max_in_flight` is None where memory bounds nothing."""

    num_microbatches: int
    microbatch_sequences: int
    policy: Policy
    max_in_flight: Caps | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """How often and how exactly the models of the clouds are synchronised."""

    inner_steps: int
    num_fragments: int
    bits: int
    delay_steps: int = 0
    """Steps between the start of an exchange and its end."""


PolicyName = Annotated[str, AfterValidator(lambda name: Policy(name).value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What of a plan all clouds of a run must know; codecs are of each hop, there and back."""

    num_microbatches: int
    layers: tuple[int, ...] = ()
    max_in_flight: Caps | None = None
    recompute: bool = False
    codecs: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()
    sharding: tuple[Sharding, ...] = ()
    """The sharding of each stage; none where nothing is said."""
    offload_optimizer: bool = False
    optimizer_bits: int = 32
    policy: PolicyName | None = None
    """What stages run by; None where nothing is said."""
    sync: DataSettings | None = None
    """How clouds synchronise in data parallel."""

    @property
    def memory_options(self) -> MemoryOptions:
        """The memory options of every stage."""
        return MemoryOptions(
            recompute=self.recompute,
            offload_optimizer=self.offload_optimizer,
            optimizer_bits=self.optimizer_bits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choice; `scenario` drives the simulator where the form is a pipeline, or one cloud alone."""

    form: Form
    stages: tuple[PlannedStage, ...]
    links: tuple[PlannedLink, ...]
    memory_options: MemoryOptions
    estimate: Estimate
    reason: str
    """Why it was taken, or why not."""
    settings: PipelineSettings | DataSettings | None = None
    scenario: Scenario | None = None
    warmup_scenario: Scenario | None = None
    """The same before bottlenecks begin, None without any."""
    spans: Annotated[tuple[Span, ...], Field(exclude=True)] = ()
    """Some simulated steps, to be drawn, where there is no scenario; plan.json leaves them out."""
    loss: Loss = Loss.NONE
    """The loss of codecs and rare synchronisation."""
    lossiness: int = 0
    """How many codec levels are less lossy than its most lossy one."""
    notes: tuple[str, ...] = ()
    runners_up: tuple["Plan", ...] = ()
    """Plans that were not taken, without their scenarios."""
    num_tried: int = 0

    @property
    def clouds(self) -> tuple[str, ...]:
        """The clouds that take part, in the order of their stages."""
        return tuple(stage.cloud for stage in self.stages)

    @property
    def memory_words(self) -> tuple[str, ...]:
        """Its memory options as a user reads them."""
        return self.memory_options.words(stage.sharding for stage in self.stages)

    @property
    def totals(self) -> tuple[float, float | None]:
        """Time and price of the whole run."""
        return self.estimate.total_s, self.estimate.total_usd

    @property
    def decisions(self) -> Decisions | None:
        """What a run follows, None where generators feed a discriminator."""
        common: dict[str, Any] = {
            "recompute": self.memory_options.recompute,
            "offload_optimizer": self.memory_options.offload_optimizer,
            "optimizer_bits": self.memory_options.optimizer_bits,
            "reasons": self.notes,
        }
        match self.settings:
            case DataSettings() as sync:
                common |= {"layers": (), "num_microbatches": 1, "max_in_flight": None, "codecs": ()}
                return Decisions(**common, sync=sync)
            case PipelineSettings() as settings:
                return Decisions(
                    **common,
                    layers=tuple(
                        stop - start for start, stop in (one.layers or (0, 0) for one in self.stages)
                    ),
                    num_microbatches=settings.num_microbatches,
                    max_in_flight=settings.max_in_flight,
                    codecs=tuple((one.forward_codec, one.backward_codec) for one in self.links),
                    sharding=tuple(one.sharding for one in self.stages),
                    policy=settings.policy.value,
                )
        return None

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(stop - start for start, stop in (one.layers or (0, 0) for one in self.stages))

    @property
    def memory_share(self) -> float | None:
        """The share of the fullest device's memory, None where no memory is known."""
        return max((one.memory_share for one in self.stages if one.capacity_bytes), default=None)

    @property
    def what(self) -> str:
        """The plan in a few words."""
        parts = [f"{stage.cloud} {stage.holds}" for stage in self.stages]
        return f"{self.form.value}: {', '.join(parts)}{self._detail}"

    @property
    def _detail(self) -> str:
        match self.settings:
            case PipelineSettings(num_microbatches=number, policy=Policy.LOCK_STEP):
                return f"; {number} micro-batches in lock-step"
            case PipelineSettings(num_microbatches=number):
                return f"; {number} micro-batches"
            case DataSettings(inner_steps=1, bits=bits):
                return f"; synchronised in each step in {bits} bit"
            case DataSettings(inner_steps=steps, num_fragments=fragments, bits=bits):
                return f"; {steps} steps apart, {fragments} fragments, {bits} bit"
        return ""


_GIB: Final = 2**30


def estimated(
    stages: Sequence[PlannedStage],
    links: Sequence[PlannedLink],
    *,
    step_s: float,
    num_tokens: float,
    num_steps: int,
    limiting: str = "",
    warmup: Warmup | None = None,
    is_simulated: bool = False,
) -> Estimate:
    """Speed and price of a step; the price is unknown if that of any cloud is."""
    usd = step_usd(stages, links, step_s)
    return Estimate(
        step_s=step_s,
        tokens_per_s=num_tokens / step_s,
        bubble=max(0.0, 1 - statistics.fmean(one.busy_s for one in stages) / step_s),
        wan_bytes=sum(one.num_bytes for one in links),
        usd_per_step=usd,
        usd_per_million_tokens=None if usd is None else usd / num_tokens * 1e6,
        num_steps=num_steps,
        limiting=limiting,
        is_simulated=is_simulated,
        warmup=warmup,
    )


def planned_stage(
    cloud: CloudFacts, holds: str, memory: Memory, sharding: Sharding, *, busy_s: float, window: int = 1
) -> PlannedStage:
    """The part of a cloud in a plan."""
    return PlannedStage(
        cloud=cloud.name,
        holds=holds,
        num_ranks=cloud.num_ranks,
        busy_s=busy_s,
        window=window,
        memory=_memory_parts(memory),
        capacity_bytes=cloud.capacity_bytes,
        usd_per_hour=cloud.usd_per_hour,
        sharding=sharding,
        is_measured=cloud.profile is not None,
    )


def _memory_parts(memory: Memory) -> dict[str, int]:
    """The memory of a rank at its fullest moment, without the parts that it does not have."""
    is_update = memory.update > memory.activations + memory.working
    names = ["weights", "gradients", "optimizer", "gathered", "codec", "buffers", "workspace"]
    names += ["update"] if is_update else ["activations", "working"]
    return {name: number for name in names if (number := getattr(memory, name)) > 0}


def step_usd(stages: Sequence[PlannedStage], links: Sequence[PlannedLink], step_s: float) -> float | None:
    """The price of a step."""
    prices = [stage.usd_per_hour for stage in stages]
    if None in prices:
        return None
    traffic_usd = sum(one.num_bytes / _GIB * (one.usd_per_gib or 0.0) for one in links)
    return sum(one or 0.0 for one in prices) * step_s / 3600 + traffic_usd


# What a plan must keep to, and which of several is taken.

Key = tuple[float, float]
"""What is to be least, and then the time."""
NEARLY: Final = 0.01
"""Plans nearly as good as the best make way for one with less loss, fewer memory options or fewer stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a plan must keep to, and whether its price or its time is to be least."""

    deadline_s: float = math.inf
    budget_usd: float = math.inf
    by_price: bool = False
    needs_price: bool = False
    """Whether pipelines without a known price are left out."""
    order: tuple[str, ...] = ()
    """The clouds as a run takes them by itself, which is the order of one of several equals."""

    @classmethod
    def of(cls, job: Job) -> "Aim":
        """The aim of a job: with a deadline the price is to be least, else the time."""
        limits = job.limits
        return cls(
            deadline_s=limits.deadline_s or math.inf,
            budget_usd=limits.budget_usd or math.inf,
            by_price=limits.deadline_s is not None,
            needs_price=limits.counts_money,
            order=run_order(job.used()),
        )

    def key(self, total_s: float, total_usd: float | None) -> Key:
        """What is to be least."""
        return (total_usd or 0.0, total_s) if self.by_price else (total_s, total_s)

    def allows(self, total_s: float, total_usd: float | None) -> bool:
        """Whether a run is within time and budget."""
        return total_s <= self.deadline_s and (total_usd or 0.0) <= self.budget_usd

    def pick(self, plans: Sequence[Plan]) -> Plan:
        """The best, or one that is nearly as good and has less loss, costs less or is simpler."""
        cheap = _nearly_least(plans, lambda one: self.key(*one.totals)[0])
        near = _nearly_least(cheap, lambda one: one.estimate.total_s)
        return min(near, key=lambda one: (*_rank(one)[:4], one.clouds != self.order, *_rank(one)[4:]))


def _rank(plan: Plan) -> tuple[float, ...]:
    """What one of several equals is chosen by."""
    total_s, total_usd = plan.totals
    return plan.loss, plan.lossiness, len(plan.memory_words), len(plan.stages), total_usd or 0.0, total_s


def _nearly_least(plans: Sequence[Plan], figure: Callable[[Plan], float]) -> list[Plan]:
    least = min(map(figure, plans))
    return [one for one in plans if figure(one) <= least * (1 + NEARLY)]


def _keep_loss(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans that cost no more quality than the job allows, or a sentence where none does."""
    allowed = [one for one in plans if one.loss <= Loss[job.limits.codec_loss.upper()]]
    if not allowed:
        least = min(one.loss for one in plans).name.lower()
        is_data = all(one.form is Form.DATA and one.loss > Loss.NONE for one in plans)
        raise UserError(
            f"every plan costs more quality than limits.codec_loss allows; the least lossy costs {least}",
            hint=f'set limits.codec_loss to "{least}"'
            + (", or strategy.inner_steps to 1" if is_data else ""),
        )
    return allowed


def _keep_priced(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans whose price is known where money counts, if any is; or what is missing for a budget."""
    if not job.limits.counts_money:
        return list(plans)
    priced = [one for one in plans if one.estimate.total_usd is not None]
    if not priced and job.limits.budget_usd is not None:
        stages = (stage for one in plans for stage in one.stages)
        raise unpriced_budget(next(one.cloud for one in stages if one.usd_per_hour is None))
    return priced or list(plans)


def unpriced_budget(cloud: str) -> UserError:
    """What is missing for a budget."""
    return UserError(
        f"limits.budget_usd is set, but the price of cloud {cloud!r} is not known",
        hint=f"set cloud.{cloud}.usd_per_hour",
    )


def excess(plan: Plan, job: Job) -> float:
    """The share by which a plan goes beyond the job's deadline or budget; 0 where it keeps both."""
    deadline_s, budget_usd = job.limits.deadline_s or math.inf, job.limits.budget_usd or math.inf
    total_s, total_usd = plan.totals
    return max(0.0, total_s / deadline_s - 1, (total_usd or 0.0) / budget_usd - 1)


def keep_limits(plans: Sequence[Plan], job: Job) -> list[Plan]:
    """The plans within all limits, or the limit that leaves none."""
    limits = job.limits
    allowed = _keep_priced(_keep_loss(plans, job), job)
    in_time = [one for one in allowed if one.estimate.total_s <= (limits.deadline_s or math.inf)]
    if not in_time:
        raise _too_slow(allowed, limits.deadline_s or math.inf)
    affordable = [
        one for one in in_time if (one.estimate.total_usd or 0.0) <= (limits.budget_usd or math.inf)
    ]
    if not affordable:
        raise _too_dear(in_time, limits.budget_usd or math.inf, has_deadline=limits.deadline_s is not None)
    return affordable


def _too_slow(plans: Sequence[Plan], deadline_s: float) -> UserError:
    fastest = min(plans, key=lambda one: one.estimate.total_s).estimate
    total_s = _up(fastest.total_s)
    return UserError(
        f"the fastest plan takes {format_duration(total_s)}, longer than limits.deadline of "
        f"{format_duration(deadline_s)}; it is limited by the {fastest.limiting}",
        hint=f'set limits.deadline to "{format_duration(total_s)}" or more, or lower train.steps',
    )


def _too_dear(plans: Sequence[Plan], budget_usd: float, *, has_deadline: bool) -> UserError:
    usd = _up(min(one.estimate.total_usd or 0.0 for one in plans))
    within = " within limits.deadline" if has_deadline else ""
    return UserError(
        f"the cheapest plan{within} costs ${usd:g}, more than limits.budget_usd of ${budget_usd:g}",
        hint=f"set limits.budget_usd to {usd:g} or more, or lower train.steps",
    )


def _up(value: float) -> float:
    """Round up to three digits."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    scale = 10.0**digits
    return math.ceil(round(value * scale, 6)) / scale


PLAN_FILE: Final = "plan.json"
VERSION: Final = 1


_PLAN: Final = TypeAdapter(Plan)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plan.json holds it."""
    values = dict(_PLAN.dump_python(plan, mode="json"))
    values |= {
        "version": VERSION,
        "loss": plan.loss.name.lower(),
        "what": plan.what,
        "memory_words": plan.memory_words,
        "decisions": None if plan.decisions is None else asdict(plan.decisions),
        "runners_up": [
            values | {"what": one.what, "why": one.reason, "memory_share": one.memory_share}
            for one, values in zip(plan.runners_up, values["runners_up"], strict=True)
        ],
    }
    values["estimate"] |= {
        "total_s": plan.estimate.total_s,
        "total_usd": plan.estimate.total_usd,
        "total_wan_bytes": plan.estimate.total_wan_bytes,
    }
    return values


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps(plan_to_dict(plan), indent=2) + "\n"


def scenario_of(text: str) -> Scenario | None:
    """The scenario that a plan.json holds, None where its form has none."""
    found: Scenario | None = _read(text, "scenario", TypeAdapter(Scenario | None))
    return found


def decisions_of(text: str) -> Decisions | None:
    """The decisions that a plan.json holds, None where its form has none."""
    found: Decisions | None = _read(text, "decisions", TypeAdapter(Decisions | None))
    return found


def _read(text: str, key: str, adapter: TypeAdapter[Any]) -> Any:
    try:
        values = json.loads(text)
        if values["version"] == VERSION:
            return adapter.validate_python(values[key])
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"the plan of this run has no {key} of format {VERSION}",
        hint="make it again with this version of Isthmus",
    )


_OPEN: Final = "auto"


Sections = dict[str, dict[str, object]]
"""Keys to set in the tables of a job file: `strategy`, `train` and `cloud.NAME`."""


def planned_changes(job: Job, plan: Plan) -> Sections:
    """What is to be set in a job so that it does as planned."""
    found = _memory_changes(job, plan.memory_options, {one.cloud: one.sharding for one in plan.stages})
    return {"strategy": _strategy(plan), **found}


def follow(job: Job, clouds: Sequence[str], decisions: Decisions | None) -> Job:
    """The job with nothing left open about memory; `clouds` are those of the stages."""
    wanted: Sections = {}
    if decisions is not None:
        sharding = dict(zip(clouds, decisions.sharding, strict=False))
        wanted = _memory_changes(job, decisions.memory_options, sharding)
    unsharded = {"sharding": Sharding.NONE.value}
    followed = (
        one.model_copy(update=wanted.get(f"cloud.{one.name}", unsharded)) if one.sharding == _OPEN else one
        for one in job.cloud
    )
    train = job.train.model_copy(update=wanted.get("train", {}))
    return job.model_copy(update={"train": train, "cloud": tuple(followed)})


def _strategy(plan: Plan) -> dict[str, object]:
    match plan.settings:
        case PipelineSettings() as settings:
            caps, found = settings.max_in_flight, dict[str, object]()
            if settings.policy.keeps_order:
                found["policy"] = settings.policy.value
            if caps is not None:
                found["max_in_flight"] = list(caps) if isinstance(caps, tuple) else caps
            return {
                "kind": "pipeline",
                "clouds": list(plan.clouds),
                "layers": list(plan.layer_counts),
                "microbatches": settings.num_microbatches,
                **found,
            }
        case DataSettings() as settings:
            return {
                "kind": "data",
                "inner_steps": settings.inner_steps,
                "fragments": settings.num_fragments,
                "bits": settings.bits,
            }
        case None:
            return {"kind": "generator-discriminator", "discriminator_cloud": plan.clouds[-1]}


def _memory_changes(job: Job, options: MemoryOptions, sharding: Mapping[str, Sharding]) -> Sections:
    train: dict[str, object] = {}
    # "auto" recomputes by itself what memory asks for.
    if options.recompute and job.train.recompute is False:
        train["recompute"] = True
    if options.offload_optimizer and not job.train.offload_optimizer:
        train["offload_optimizer"] = True
    if options.optimizer_bits != job.train.optimizer_bits:
        train["optimizer_bits"] = options.optimizer_bits
    free = (one for one in job.cloud if one.sharding == _OPEN and one.ranks > 1 and one.name in sharding)
    clouds: Sections = {f"cloud.{one.name}": {"sharding": sharding[one.name].value} for one in free}
    return ({"train": train} if train else {}) | clouds
