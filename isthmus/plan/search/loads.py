"""From a partition to a scenario: times of its stages, codecs of its hops from the mildest on, windows."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from isthmus.job import parse_codec
from isthmus.plan.codec_choice import Bounds, Choice, Figures, choose
from isthmus.plan.costs.bottlenecks import HalfCosts
from isthmus.plan.ladder import Crossing, Pair, Rung
from isthmus.plan.scenario import (
    Caps,
    HopLoad,
    Policy,
    Scenario,
    StageLoad,
    at_worst,
    expected,
    next_windows,
    window_bounds,
)
from isthmus.plan.search.facts import CloudFacts
from isthmus.plan.search.settings import Constraints, Found, Setting, measure_with
from isthmus.plan.search.supply import ModelSupply

_RAW: Final = Pair(forward=parse_codec("raw"), backward=parse_codec("raw"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What the job says of a link: its price, and the codecs it may have."""

    between: tuple[str, str]
    usd_per_gib: float | None
    bounds: Bounds
    rungs: Sequence[Rung]

    @property
    def num_thrifty(self) -> int:
        """How many rungs may be left out to save money: none where nothing is paid, and never the last."""
        return max(0, len(self._allowed) - 1) if self.usd_per_gib else 0

    def rungs_from(self, first: int) -> Sequence[Rung]:
        """Without so many of the mildest, as far as may be."""
        first = min(first, self.num_thrifty)
        return self._allowed[first:] if first else self.rungs

    @property
    def _allowed(self) -> Sequence[Rung]:
        return [one for one in self.rungs if one.loss <= self.bounds.loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a pipeline must keep to, beside its supply."""

    links: dict[frozenset[str], LinkTerms]
    constraints: Constraints
    policy: Policy
    max_in_flight: Caps | None
    windows: tuple[int, ...] | None
    enough_usd: float | None = None
    """Codecs may be stronger than time asks for until a run costs no more; None where money is no matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """A pipeline with all that its time depends on; `step_s` is by formula."""

    setting: Setting
    clouds: tuple[CloudFacts, ...]
    layers: tuple[range, ...]
    scenario: Scenario
    wanted: tuple[int, ...]
    """Windows that would hide every round trip."""
    windows: tuple[int, ...]
    """Those that memory, and the job, allow."""
    most_in_flight: tuple[int, ...]
    """The same, or those of the warm-up where they are larger."""
    choices: tuple[Choice, ...]
    halves: tuple[tuple[HalfCosts, ...], ...]
    """Of bottlenecks, at each stage."""
    step_s: float
    num_warmup_steps: int = 0
    warmup: Scenario | None = None
    """The same before bottlenecks begin."""

    @property
    def hides_all(self) -> bool:
        """Whether enough is in flight to hide a message behind the computing of others."""
        if self.scenario.policy is Policy.ONE_F_ONE_B:
            return False
        return all(window >= wanted for window, wanted in zip(self.windows, self.wanted, strict=True))


def load_up(found: Found, supply: ModelSupply, terms: Terms, *, hides: bool = True, thrift: int = 0) -> Loads:
    """What was found, with codecs and windows; the fastest codecs where computing `hides` no message.

    On links whose traffic is paid for, `thrift` of the mildest codecs are passed over.
    """
    setting, partition = found.setting, found.partition
    stages = tuple(
        _stage_load(supply, setting, cloud, layers)
        for cloud, layers in zip(partition.clouds, partition.ranges, strict=True)
    )
    interval_s = max(stage.interval_s for stage in stages) if hides else 0.0
    choices, hops = _hops(found, supply, terms, interval_s=interval_s, thrift=thrift)
    trained = (number for number, stop in enumerate(partition.stops) if stop > supply.num_frozen)
    scenario = Scenario(
        stages=stages,
        hops=hops,
        num_microbatches=setting.num_microbatches,
        policy=terms.policy,
        first_trained=next(trained, len(stages) - 1),
    )
    num_warmup_steps = supply.num_warmup_steps(partition.clouds)
    before = replace(scenario, hops=_raw_hops(found, supply, choices)) if num_warmup_steps else scenario
    held, measured = _held(found, supply, terms), expected(scenario)
    wanted = terms.windows or next_windows(scenario, measured)
    caps = _caps({scenario, before}, wanted, held)
    fixed = None if terms.windows is None else _given_windows(scenario, terms.windows, held)
    windows = fixed or next_windows(scenario, measured, max_in_flight=caps)
    first_windows = windows
    if num_warmup_steps and fixed is None:
        first_windows = next_windows(before, expected(before), max_in_flight=caps)
    return Loads(
        setting=setting,
        clouds=tuple(supply.clouds[cloud] for cloud in partition.clouds),
        layers=partition.ranges,
        scenario=replace(scenario, windows=fixed, max_in_flight=caps),
        wanted=wanted,
        windows=windows,
        most_in_flight=tuple(max(sizes) for sizes in zip(windows, first_windows, strict=True)),
        choices=choices,
        halves=supply.halves(partition.clouds),
        num_warmup_steps=num_warmup_steps,
        warmup=replace(before, windows=fixed, max_in_flight=caps) if num_warmup_steps else None,
        step_s=measure_with(found.problem, partition, hops, [one.num_ranks for one in stages]).step_s,
    )


def line_times(hop: HopLoad) -> tuple[float, float]:
    """Seconds that one message takes on the line, down and up."""
    return 8 * hop.forward_bytes / hop.line.down_bps, 8 * hop.backward_bytes / hop.line.up_bps


def _stage_load(supply: ModelSupply, setting: Setting, cloud: int, layers: range) -> StageLoad:
    table, spot = supply.table(cloud, setting), (layers.start, layers.stop)
    return StageLoad(
        cloud=supply.clouds[cloud].name,
        forward_s=float(table.forward_s[spot]),
        backward_s=float(table.backward_s[spot]),
        update_s=float(table.update_s[spot]),
        num_ranks=supply.clouds[cloud].num_ranks,
    )


def _hops(
    found: Found, supply: ModelSupply, terms: Terms, *, interval_s: float, thrift: int
) -> tuple[tuple[Choice, ...], tuple[HopLoad, ...]]:
    """The mildest codecs that computing hides, and what then crosses."""
    choices, hops = [], []
    for pair, crossing in _crossings(found, supply):
        line = supply.links[pair].line
        link = terms.links[frozenset(supply.clouds[one].name for one in pair)]
        choice = choose(
            crossing,
            Figures(interval_s=interval_s, down_bps=line.down_bps, up_bps=line.up_bps),
            rungs=link.rungs_from(thrift),
            bounds=link.bounds,
        )
        choices.append(choice)
        hops.append(supply.coded_hop(pair, crossing, choice.pair))
    return tuple(choices), tuple(hops)


def _raw_hops(found: Found, supply: ModelSupply, choices: Sequence[Choice]) -> tuple[HopLoad, ...]:
    """What crosses before bottlenecks begin: raw hidden states there, and elsewhere as chosen."""
    before = supply.before_bottlenecks
    return tuple(
        before.coded_hop(pair, crossing, choice.pair if supply.links[pair].bottleneck is None else _RAW)
        for (pair, crossing), choice in zip(_crossings(found, before), choices, strict=True)
    )


def _crossings(found: Found, supply: ModelSupply) -> Iterator[tuple[tuple[int, int], Crossing]]:
    """What a micro-batch puts across each cut; nothing goes back to frozen layers."""
    clouds, stops, setting = found.partition.clouds, found.partition.stops, found.setting
    element_bytes = supply.element_bytes(clouds, setting)
    for pair, stop, num_bytes in zip(pairwise(clouds), stops, element_bytes, strict=False):
        has_gradient = stop > supply.num_frozen
        yield pair, supply.crossing(pair, setting, has_gradient=has_gradient, element_bytes=num_bytes)


def _held(found: Found, supply: ModelSupply, terms: Terms) -> list[float]:
    """The most that a rank of each stage may keep in flight."""
    spots = zip(found.partition.clouds, found.partition.ranges, strict=True)
    held = [
        float(supply.table(cloud, found.setting).held[layers.start, layers.stop]) for cloud, layers in spots
    ]
    given = terms.max_in_flight
    caps = given if isinstance(given, tuple) else (given,) * len(held)
    return [min(one, cap or one) for one, cap in zip(held, caps, strict=True)]


def _caps(scenarios: Collection[Scenario], wanted: Sequence[int], held: Sequence[float]) -> Caps | None:
    """What each stage can hold, one number where all hold the same, and None where that binds nobody.

    Workers whose messages meet on the line may ask for more than is expected, and are bound then too; so are
    those of a warm-up.
    """
    most = [next_windows(one, at_worst(one)) for one in scenarios]
    asked = [max(sizes) for sizes in zip(wanted, *most, strict=True)]
    if all(one >= size for one, size in zip(held, asked, strict=True)):
        return None
    number = max(one.num_microbatches for one in scenarios)
    caps = tuple(int(max(1, min(one, number))) for one in held)
    return caps if len(set(caps)) > 1 else caps[0]


def _given_windows(scenario: Scenario, given: Sequence[int], held: Sequence[float]) -> tuple[int, ...]:
    """As far as memory holds them, and stages that keep an order would not wait for each other."""
    sizes: list[int] = []
    for size, most in zip(given, held, strict=True):
        bounds = window_bounds(scenario, sizes) if scenario.policy.keeps_order else []
        sizes.append(int(max(1, min(size, most, *bounds))))
    return tuple(sizes)
