"""A pipeline as far as its time goes: stages with their times, hops with their bytes, lines, and its JSON."""

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.errors import UserError

Caps = int | tuple[int, ...]
"""The most micro-batches that a rank keeps in flight: one number for all stages, or one for each."""


class Policy(enum.Enum):
    """Which pass goes first where there is a choice."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOCK_STEP = "lock-step"
    WAN_ONE_F_ONE_B = "wan-1f1b"

    @property
    def keeps_order(self) -> bool:
        """Whether passes have one order, whatever arrives when."""
        return self is not Policy.WAN_ONE_F_ONE_B

    @property
    def hides_round_trips(self) -> bool:
        """Whether windows are as large as measured round trips ask for."""
        return self in (Policy.LOCK_STEP, Policy.WAN_ONE_F_ONE_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One stage at one cloud: times of one micro-batch on one rank, and of what ends a step.

    The ranks of a cloud share its micro-batches; `update_s` holds the collectives inside the cloud and the
    optimizer.
    """

    cloud: str
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    num_ranks: int = 1

    @property
    def interval_s(self) -> float:
        """Time per micro-batch of the whole stage, `t`, when its ranks are all at work."""
        return (self.forward_s + self.backward_s) / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The WAN between neighbouring stages, seen along the pipeline: one bandwidth down, another up.

    `handling_s` is what the two ends take to hand a message over, beside its time on the line and under way.
    """

    down_bps: float
    up_bps: float
    latency_s: float
    jitter_s: float = 0.0
    handling_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """What every message takes beside its time on the line."""
        return self.latency_s + self.handling_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HopLoad:
    """What one micro-batch sends over the line behind a stage, on the wire, and what coding it takes.

    Coding happens beside the computation: it delays a message and does not occupy the stage.
    """

    line: Line
    forward_bytes: int
    backward_bytes: int
    forward_coding_s: float = 0.0
    backward_coding_s: float = 0.0

    @property
    def delays_s(self) -> float:
        """What a micro-batch's messages are under way, there and, if anything goes back, back."""
        return (2 if self.backward_bytes else 1) * self.line.delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pipeline as far as its time goes; one hop between each two neighbouring stages.

    `windows` are per rank of each stage; None lets each be found from the times, as the workers do, up to
    `max_in_flight`.
    """

    stages: tuple[StageLoad, ...]
    hops: tuple[HopLoad, ...]
    num_microbatches: int
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    windows: tuple[int, ...] | None = None
    first_trained: int = 0
    max_in_flight: Caps | None = None

    def __post_init__(self) -> None:
        if len(self.hops) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages with {len(self.hops)} hops")

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has, `p`."""
        return len(self.stages)


def caps_from_json(value: Any) -> Caps | None:
    """What JSON made of caps, which has no tuples."""
    if value is None:
        return None
    return tuple(int(one) for one in value) if isinstance(value, list | tuple) else int(value)


def scenario_to_dict(scenario: Scenario) -> dict[str, Any]:
    """A scenario as plan.json holds it."""
    return {**asdict(scenario), "policy": scenario.policy.value}


def scenario_from_dict(values: Mapping[str, Any]) -> Scenario:
    """The scenario that `scenario_to_dict` gave."""
    try:
        windows = values.get("windows")
        return Scenario(
            stages=tuple(StageLoad(**one) for one in values["stages"]),
            hops=tuple(HopLoad(**{**one, "line": Line(**one["line"])}) for one in values["hops"]),
            num_microbatches=int(values["num_microbatches"]),
            policy=Policy(values["policy"]),
            windows=None if windows is None else tuple(int(one) for one in windows),
            first_trained=int(values.get("first_trained", 0)),
            max_in_flight=caps_from_json(values.get("max_in_flight")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"what should be the scenario of a plan is none: {error!r}",
            hint="make the plan again with this version of Isthmus",
        ) from None
