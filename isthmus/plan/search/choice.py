"""What the planner chose: who does what, what it will take, why, and what else there was."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.plan.costs.memory import Sharding
from isthmus.plan.ladder import Loss
from isthmus.plan.scenario import Caps, Policy, Scenario
from isthmus.plan.search.sparing import Sparing


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
    """What its ranks share out."""
    is_measured: bool = False
    """Whether its times are those of a profile, and not the catalogue's."""

    @property
    def memory_bytes(self) -> int:
        """What a rank needs in all."""
        return sum(self.memory.values())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleSplit:
    """The share of a step in which clouds do not compute, mean over clouds, by what it is spent on."""

    fill: float
    latency: float
    bandwidth: float
    imbalance: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.fill + self.latency + self.bandwidth + self.imbalance


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
    bubble: BubbleSplit
    wan_bytes: float
    """Over all links, both ways, in a step."""
    usd_per_step: float | None
    usd_per_million_tokens: float | None
    num_steps: int
    limiting: str
    """The resource of which no end would shorten a step the most."""
    reliefs: Mapping[str, float] = field(default_factory=dict)
    """By what share no end of each would shorten it, the most first; none where the form has no schedule."""
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
    """How often and how exactly the clouds' models are made one."""

    inner_steps: int
    num_fragments: int
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What of a plan all clouds of a run must know; codecs are of each hop, there and back."""

    layers: tuple[int, ...]
    num_microbatches: int
    max_in_flight: Caps | None
    recompute: bool
    codecs: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...] = ()
    sharding: tuple[str, ...] = ()
    """Of each stage; none where nothing is said."""
    offload_optimizer: bool = False
    optimizer_bits: int = 32
    policy: str | None = None
    """What stages run by; None where nothing is said."""

    @property
    def sparing(self) -> Sparing:
        """What spares memory at every stage."""
        return Sparing(
            recompute=self.recompute,
            offload_optimizer=self.offload_optimizer,
            optimizer_bits=self.optimizer_bits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was not taken, and why."""

    form: Form
    what: str
    estimate: Estimate
    memory_share: float | None
    why: str
    savers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choice; `scenario` drives the simulator where the form is a pipeline, or one cloud alone."""

    form: Form
    stages: tuple[PlannedStage, ...]
    links: tuple[PlannedLink, ...]
    savers: tuple[str, ...]
    """What spares memory, in words."""
    estimate: Estimate
    reason: str
    sparing: Sparing = Sparing()  # noqa: RUF009 it is frozen
    settings: PipelineSettings | DataSettings | None = None
    scenario: Scenario | None = None
    warmup_scenario: Scenario | None = None
    """The same before bottlenecks begin, None without any."""
    loss: Loss = Loss.NONE
    """Of codecs and rare synchronisation."""
    strength: int = 0
    """Of its strongest codec: how many are milder."""
    notes: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    num_tried: int = 0

    @property
    def clouds(self) -> tuple[str, ...]:
        """The clouds that take part, in the order of their stages."""
        return tuple(stage.cloud for stage in self.stages)

    @property
    def decisions(self) -> Decisions | None:
        """What a run follows, None where the form is no pipeline."""
        if not isinstance(self.settings, PipelineSettings):
            return None
        return Decisions(
            layers=tuple(stop - start for start, stop in (one.layers or (0, 0) for one in self.stages)),
            num_microbatches=self.settings.num_microbatches,
            max_in_flight=self.settings.max_in_flight,
            recompute=self.sparing.recompute,
            codecs=tuple((one.forward_codec, one.backward_codec) for one in self.links),
            reasons=self.notes,
            sharding=tuple(one.sharding.value for one in self.stages),
            offload_optimizer=self.sparing.offload_optimizer,
            optimizer_bits=self.sparing.optimizer_bits,
            policy=self.settings.policy.value,
        )

    @property
    def memory_share(self) -> float | None:
        """Of the fullest device's memory, None where no memory is known."""
        known = [(one.memory_bytes, one.capacity_bytes) for one in self.stages if one.capacity_bytes]
        return max((needed / there for needed, there in known if there), default=None)

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
