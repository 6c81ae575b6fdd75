"""All pipelines of a job under a setting: orders of clouds, cuts of layers, and the least time of each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from isthmus.plan.candidates import Terms
from isthmus.plan.codecs import RAW_PAIR, Crossing, Figures, options
from isthmus.plan.stage_tables import ModelSupply, Setting
from isthmus.plan.step_time import HopTimes, Mask, StageTimes, Table, step_bound_s
from isthmus.plan.walks import MAX_ENUMERATED, Beam, Stops, all_cuts, all_orders, least_slowest_s

_GIB: Final = 2**30
_NO_CAP: Final = 2.0**40


@dataclass(frozen=True, slots=True, kw_only=True)
class _HopSpace:
    """A hop with any codec that is allowed: no less time, no fewer bytes."""

    times: HopTimes
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Space:
    """The pipelines of a job under one policy: orders, cuts, and what each takes at least."""

    supply: ModelSupply
    terms: Terms
    _hops: dict[tuple[tuple[int, int], Crossing], _HopSpace] = field(default_factory=dict)

    @property
    def num_clouds(self) -> int:
        """All that may take part."""
        return len(self.supply.clouds)

    def rounds(self, cloud: int, setting: Setting) -> int:
        """Micro-batches of the busiest rank of a cloud."""
        return -(-setting.num_microbatches // self.supply.num_ranks[cloud])

    def groups(self, setting: Setting) -> Iterator["Group"]:
        """All orders of clouds under a setting, each with its cuts."""
        if self.num_clouds <= MAX_ENUMERATED or self.terms.constraints.in_row:
            for order in all_orders(self.num_clouds, self.supply.pairs, self.terms.constraints):
                if len(order) <= MAX_ENUMERATED or self.terms.constraints.stops is not None:
                    yield Group(space=self, setting=setting, clouds=order)
        if self.num_clouds > MAX_ENUMERATED and self.terms.constraints.stops is None:
            for order, stops in self._beam(setting).walks().items():
                yield Group(space=self, setting=setting, clouds=order, given_stops=stops)

    def can_be(self, setting: Setting, size: int) -> bool:
        """Whether any pipeline of so many stages fits under a setting."""
        groups = (one for one in self.groups(setting) if len(one.clouds) == size)
        return any(math.isfinite(one.slowest_s(fits=True)) for one in groups)

    def stages_s(self, cloud: int, setting: Setting, *, fits: bool) -> Table:
        """What a cloud computes in a step for the layers (a, b); infinite without layers or memory."""
        table = self.supply.table(cloud, setting)
        step_s = self.rounds(cloud, setting) * (table.forward_s + table.backward_s)
        return np.where((table.held >= 1) | (not fits), step_s, np.inf) + _no_layers(len(step_s))

    def hop(
        self, order: Sequence[int], index: int, setting: Setting, *, has_gradient: bool
    ) -> _HopSpace | None:
        """The hop behind a stage with any codec that is allowed, None where there can be no cut."""
        pair = order[index], order[index + 1]
        if not self.supply.can_cross(pair, setting, has_gradient=has_gradient):
            return None
        element_bytes = self.supply.element_bytes(order[: index + 2], setting)[index]
        crossing = self.supply.crossing(pair, setting, has_gradient=has_gradient, element_bytes=element_bytes)
        if (pair, crossing) not in self._hops:
            self._hops[pair, crossing] = self._any_hop(pair, crossing)
        return self._hops[pair, crossing]

    def _any_hop(self, pair: tuple[int, int], crossing: Crossing) -> _HopSpace:
        line = self.supply.links[pair].line
        link = self.terms.links[frozenset(self.supply.clouds[one].name for one in pair)]
        figures = Figures(interval_s=0.0, down_bps=line.down_bps, up_bps=line.up_bps)
        allowed = options(crossing, figures, levels=link.rungs, bounds=link.bounds)
        hops = [self.supply.coded_hop(pair, crossing, one.pair) for one in allowed]
        return _HopSpace(
            times=HopTimes.least([HopTimes.of(one) for one in hops]),
            num_bytes=min(one.forward_bytes + one.backward_bytes for one in hops),
        )

    def _beam(self, setting: Setting) -> Beam:
        clouds = range(self.num_clouds)
        tables = [self.supply.table(cloud, setting) for cloud in clouds]
        hops = {pair: self.hop(pair, 0, setting, has_gradient=True) for pair in sorted(self.supply.pairs)}
        return Beam(
            stages_s=[self.stages_s(cloud, setting, fits=True) for cloud in clouds],
            once_s=[one.forward_s + one.backward_s for one in tables],
            hops_s={
                pair: float(one.times.there_s + one.times.back_s)
                for pair, one in hops.items()
                if one is not None
            },
            lines_s={
                pair: setting.num_microbatches * float(np.maximum(one.times.down_s, one.times.up_s))
                for pair, one in hops.items()
                if one is not None
            },
            constraints=self.terms.constraints,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """One order of clouds under one setting, with all its cuts."""

    space: Space
    setting: Setting
    clouds: tuple[int, ...]
    given_stops: Stops | None = None

    @property
    def stops(self) -> Stops:
        """The cuts, one row each."""
        if self.given_stops is not None:
            return self.given_stops
        num_layers = len(self.space.supply.table(self.clouds[0], self.setting).held) - 1
        return all_cuts(num_layers, len(self.clouds), self.space.terms.constraints)

    @property
    def usd_per_s(self) -> float | None:
        """What its clouds cost, None where that is not known."""
        prices = [self.space.supply.clouds[cloud].usd_per_hour for cloud in self.clouds]
        return None if None in prices else sum(one or 0.0 for one in prices) / 3600

    @cached_property
    def hops(self) -> list[tuple[_HopSpace | None, _HopSpace | None]]:
        """Each hop with a gradient and without."""
        return [
            (
                self.space.hop(self.clouds, index, self.setting, has_gradient=True),
                self.space.hop(self.clouds, index, self.setting, has_gradient=False)
                if self.space.supply.num_frozen
                else None,
            )
            for index in range(len(self.clouds) - 1)
        ]

    def slowest_s(self, *, fits: bool) -> float:
        """The least time of the slowest stage over all cuts; infinite where none fits."""
        if any(one is None and other is None for one, other in self.hops):
            return math.inf
        if self.given_stops is None and self.space.terms.constraints.stops is None:
            stages_s = [self.space.stages_s(cloud, self.setting, fits=fits) for cloud in self.clouds]
            if self.space.terms.constraints.cuts is None:
                return least_slowest_s(stages_s)
        rows = self.stops
        each = zip(self.clouds, _starts(rows).T, rows.T, strict=True)
        slowest_s = [self.space.stages_s(cloud, self.setting, fits=fits)[a, b] for cloud, a, b in each]
        return float(np.maximum.reduce(slowest_s).min(initial=math.inf))

    def least_step_s(self) -> float:
        """The bound of the cuts that are given, or one without cuts: the slowest stage, and every line."""
        if self.given_stops is not None:
            total_s, _, _ = self.bounds(self.given_stops, fits=True)
            return float(total_s.min(initial=math.inf)) / self.num_steps
        found_s = [self.slowest_s(fits=False)]
        both = [[one for one in pair if one is not None] for pair in self.hops]
        if all(both):
            hops = [HopTimes.least([one.times for one in pair]) for pair in both]
            once_s = sum(float(one.there_s + one.back_s) for one in hops)
            more = self.setting.num_microbatches - 1
            found_s += [once_s + more * float(np.maximum(one.down_s, one.up_s)) for one in hops]
        return max(found_s)

    def least_usd(self, step_s: float) -> float | None:
        """What a step costs at least if it takes so long."""
        rate = self.usd_per_s
        if rate is None:
            return None
        return rate * step_s + sum(
            min(one.num_bytes for one in pair if one is not None) * self._usd_per_byte(index)
            for index, pair in enumerate(self.hops)
        )

    def bounds(self, rows: Stops, *, fits: bool) -> tuple[Table, Table, Table]:
        """The least time of a run for every cut, infinite where none fits; its price; its slowest stage."""
        stages, is_possible = self._stages(rows, fits=fits)
        hops, usd = [], np.zeros(len(rows))
        for index, pair in enumerate(self.hops):
            goes_back = rows[:, index] > self.space.supply.num_frozen
            there = [one for one in pair if one is not None]
            both, one_way = pair[0] or there[0], pair[1] or there[0]
            is_possible &= np.where(goes_back, pair[0] is not None, pair[1] is not None)
            hops.append(both.times.where(goes_back, one_way.times))
            usd += np.where(goes_back, both.num_bytes, one_way.num_bytes) * self._usd_per_byte(index)
        total_s = self.num_steps * self._step_s(stages, hops)
        if num_first := self.space.supply.num_warmup_steps(self.clouds):
            total_s += num_first * self._step_s(stages, self._first_hops(hops))
        total_usd = self.num_steps * usd + (self.usd_per_s or 0.0) * total_s
        slowest_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
        return np.where(is_possible, total_s, np.inf), total_usd, slowest_s

    @property
    def num_steps(self) -> int:
        """Steps behind the warm-up of bottlenecks."""
        supply = self.space.supply
        return supply.step.num_steps - supply.num_warmup_steps(self.clouds)

    def _step_s(self, stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> Table:
        number, policy = self.setting.num_microbatches, self.space.terms.policy
        return step_bound_s(stages, hops, num_microbatches=number, policy=policy)

    def _first_hops(self, hops: Sequence[HopTimes]) -> list[HopTimes]:
        """The same before bottlenecks begin, when hidden states cross raw."""
        before, links = self.space.supply.before_bottlenecks, self.space.supply.links
        element_bytes = before.element_bytes(self.clouds, self.setting)
        found = []
        for pair, hop, num_bytes in zip(pairwise(self.clouds), hops, element_bytes, strict=True):
            crossing = before.crossing(pair, self.setting, has_gradient=True, element_bytes=num_bytes)
            raw = HopTimes.of(before.coded_hop(pair, crossing, RAW_PAIR))
            found.append(hop if links[pair].bottleneck is None else raw)
        return found

    def _usd_per_byte(self, index: int) -> float:
        """Of all micro-batches of a step over one hop."""
        pair = self.clouds[index : index + 2]
        link = self.space.terms.links[frozenset(self.space.supply.clouds[one].name for one in pair)]
        return self.setting.num_microbatches * (link.usd_per_gib or 0.0) / _GIB

    def _stages(self, rows: Stops, *, fits: bool) -> tuple[list[StageTimes], Mask]:
        supply, terms = self.space.supply, self.space.terms
        given = terms.windows or terms.max_in_flight
        stages, is_possible = [], np.ones(len(rows), dtype=bool)
        for index, (cloud, start, stop) in enumerate(zip(self.clouds, _starts(rows).T, rows.T, strict=True)):
            table = supply.table(cloud, self.setting)
            cap = given[index] if isinstance(given, tuple) else given
            held = table.held[start, stop] if fits else np.full(len(rows), np.inf)
            is_possible &= held >= 1
            is_trained = (stop > supply.num_frozen) | (index == len(self.clouds) - 1)
            stages.append(
                StageTimes(
                    forward_s=table.forward_s[start, stop],
                    backward_s=np.where(is_trained, table.backward_s[start, stop], 0.0),
                    update_s=table.update_s[start, stop],
                    cap=np.minimum(held, cap or _NO_CAP),
                    num_ranks=supply.num_ranks[cloud],
                    is_trained=is_trained,
                )
            )
        return stages, is_possible


def is_bound_by_memory(group: Group, rows: Stops) -> bool:
    """Whether some stage has less memory than all its micro-batches would take."""
    supply, setting = group.space.supply, group.setting
    each = zip(group.clouds, _starts(rows).T, rows.T, strict=True)
    return any(
        bool((supply.table(cloud, setting).held[a, b] < group.space.rounds(cloud, setting)).any())
        for cloud, a, b in each
    )


def _starts(rows: Stops) -> Stops:
    return np.hstack([np.zeros((len(rows), 1), dtype=np.int64), rows[:, :-1]])


def _no_layers(size: int) -> Table:
    """Infinite where a stage would have no layer."""
    return np.where(np.tri(size, dtype=bool), np.inf, 0.0)
