"""All pipelines of a job under a setting: orders of clouds, cuts of layers, and the least time of each.

Up to four clouds every order of every subset and every cut is enumerated. Beyond that a beam extends orders
cloud by cloud: under a cap on the time of a stage each cloud takes as many layers as keep to it, the orders
with the least time per layer are kept, and every cut near those that are found is enumerated.
"""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, permutations, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from isthmus.plan.codecs import RAW_PAIR
from isthmus.plan.step_time import HopTimes, Mask, StageTimes, Table, step_bound_s
from isthmus.plan.study import Clouds, Setting, Study

Stops = NDArray[np.int64]
"""Rows of where the layers of each stage end."""

_GIB: Final = 2**30
_NO_CAP: Final = 2.0**40
# Clouds whose orders and cuts are all enumerated.
_MAX_ENUMERATED: Final = 4
_BEAM_WIDTH: Final = 24
_NUM_HALVINGS: Final = 9
_CAPS: Final = (1.0, 1.02, 1.05, 1.1, 1.16, 1.25, 1.4, 1.7, 2.2)
# Of so few stages a beam has all cuts, of more those near the ones that it finds.
_MAX_ALL_CUTS: Final = 2


@dataclass(frozen=True, kw_only=True)
class CloudOrder:
    """One order of clouds under one setting, with all its cuts or those that a beam found."""

    study: Study
    setting: Setting
    clouds: Clouds
    found_stops: Stops | None = None

    @property
    def stops(self) -> Stops:
        """The cuts, one row each."""
        if self.found_stops is not None:
            return self.found_stops
        if self.study.stops is not None:
            return np.array([self.study.stops])
        return all_cuts(self.study.model.num_layers, len(self.clouds), self.study.model.cuts)

    @property
    def num_steps(self) -> int:
        """Steps behind the warm-up of bottlenecks."""
        return self.study.step.num_steps - self.study.num_warmup_steps(self.clouds)

    @cached_property
    def _hops(self) -> list[tuple[HopTimes | None, HopTimes | None]]:
        """Each hop with a gradient and without."""
        has_frozen = self.study.num_frozen > 0
        return [
            (
                _any_hop(self.study, self.clouds, cut, self.setting, has_gradient=True),
                _any_hop(self.study, self.clouds, cut, self.setting, has_gradient=False)
                if has_frozen
                else None,
            )
            for cut in range(len(self.clouds) - 1)
        ]

    @cached_property
    def _least_hops(self) -> list[HopTimes] | None:
        """The least of each hop, None where some cut cannot be."""
        both = [[one for one in pair if one is not None] for pair in self._hops]
        return [HopTimes.least(pair) for pair in both] if all(both) else None

    def slowest_s(self, *, fits: bool) -> float:
        """The least time of the slowest stage over all cuts; infinite where none fits."""
        if self._least_hops is None:
            return math.inf
        stages_s = [_stages_s(self.study, cloud, self.setting, fits=fits) for cloud in self.clouds]
        if self.found_stops is None and self.study.stops is None and self.study.model.cuts is None:
            best_s = stages_s[0][0]
            for stage_s in stages_s[1:]:
                best_s = np.maximum(best_s[:, None], stage_s).min(axis=0)
            return float(best_s[-1])
        rows = self.stops
        each = zip(stages_s, _starts(rows).T, rows.T, strict=True)
        return float(np.maximum.reduce([one[a, b] for one, a, b in each]).min(initial=math.inf))

    def least_step_s(self) -> float:
        """The bound of the cuts that a beam found, or one without cuts: the slowest stage, and every line."""
        if self.found_stops is not None:
            total_s, _, _ = self.bounds(self.found_stops, fits=True)
            return float(total_s.min(initial=math.inf)) / self.num_steps
        hops = self._least_hops or []
        once_s = sum(float(one.there_s + one.back_s) for one in hops)
        more = self.setting.num_microbatches - 1
        lines_s = [once_s + more * float(np.maximum(one.down_s, one.up_s)) for one in hops]
        return max(self.slowest_s(fits=False), *lines_s, 0.0)

    def least_usd(self, step_s: float) -> float | None:
        """What a step costs at least if it takes so long."""
        rate = self.study.usd_per_s(self.clouds)
        if rate is None:
            return None
        hops = enumerate(self._least_hops or [])
        return rate * step_s + sum(float(one.num_bytes) * self._usd_per_byte(cut) for cut, one in hops)

    def bounds(self, rows: Stops, *, fits: bool) -> tuple[Table, Table, Table]:
        """The least time of a run for every cut, infinite where none fits; its price; its slowest stage."""
        stages, is_possible = self._stages(rows, fits=fits)
        hops, usd = [], np.zeros(len(rows))
        for cut, (both_ways, one_way) in enumerate(self._hops):
            goes_back = rows[:, cut] > self.study.num_frozen
            is_possible &= np.where(goes_back, both_ways is not None, one_way is not None)
            if (known := both_ways or one_way) is None:
                raise ValueError("no cut is possible, so none has a bound")
            hop = (both_ways or known).where(goes_back, one_way or known)
            hops.append(hop)
            usd += hop.num_bytes * self._usd_per_byte(cut)
        total_s = self.num_steps * self._step_s(stages, hops)
        if num_first := self.study.num_warmup_steps(self.clouds):
            total_s += num_first * self._step_s(stages, self._first_hops(hops))
        total_usd = self.num_steps * usd + (self.study.usd_per_s(self.clouds) or 0.0) * total_s
        slowest_s = np.maximum.reduce([one.pass_s / one.num_ranks for one in stages])
        return np.where(is_possible, total_s, np.inf), total_usd, slowest_s

    def is_bound_by_memory(self, rows: Stops) -> bool:
        """Whether some stage has less memory than all its micro-batches would take."""
        each = zip(self.clouds, _starts(rows).T, rows.T, strict=True)
        return any(
            bool(
                (
                    self.study.table(cloud, self.setting).num_fitting[a, b]
                    < _rounds(self.study, cloud, self.setting)
                ).any()
            )
            for cloud, a, b in each
        )

    def _step_s(self, stages: Sequence[StageTimes], hops: Sequence[HopTimes]) -> Table:
        number = self.setting.num_microbatches
        return step_bound_s(stages, hops, num_microbatches=number, policy=self.study.policy)

    def _first_hops(self, hops: Sequence[HopTimes]) -> list[HopTimes]:
        """The hops before bottlenecks begin, when hidden states cross raw."""
        before, found = self.study.before_bottlenecks, []
        for cut, (pair, hop) in enumerate(zip(pairwise(self.clouds), hops, strict=True)):
            crossing = before.crossing(self.clouds, cut, self.setting, has_gradient=True)
            raw = HopTimes.of(before.coded_hop(pair, crossing, RAW_PAIR))
            found.append(hop if self.study.links[pair].bottleneck is None else raw)
        return found

    def _usd_per_byte(self, cut: int) -> float:
        """The price of a byte in all micro-batches of a step over one hop."""
        price = self.study.links[self.clouds[cut], self.clouds[cut + 1]].usd_per_gib
        return self.setting.num_microbatches * (price or 0.0) / _GIB

    def _stages(self, rows: Stops, *, fits: bool) -> tuple[list[StageTimes], Mask]:
        study = self.study
        given = study.strategy.windows or study.strategy.max_in_flight
        stages, is_possible = [], np.ones(len(rows), dtype=bool)
        for index, (cloud, start, stop) in enumerate(zip(self.clouds, _starts(rows).T, rows.T, strict=True)):
            table = study.table(cloud, self.setting)
            cap = given[index] if isinstance(given, tuple) else given
            fitting = table.num_fitting[start, stop] if fits else np.full(len(rows), np.inf)
            is_possible &= fitting >= 1
            is_trained = (stop > study.num_frozen) | (index == len(self.clouds) - 1)
            stages.append(
                StageTimes(
                    forward_s=table.forward_s[start, stop],
                    backward_s=np.where(is_trained, table.backward_s[start, stop], 0.0),
                    update_s=table.update_s[start, stop],
                    cap=np.minimum(fitting, cap or _NO_CAP),
                    num_ranks=study.clouds[cloud].num_ranks,
                    is_trained=is_trained,
                )
            )
        return stages, is_possible


def all_orders(study: Study, setting: Setting) -> Iterator[CloudOrder]:
    """Every order of clouds along the links under a setting, the shortest first, or those of a beam."""
    num_clouds, is_in_row = len(study.clouds), study.is_in_row
    if num_clouds <= _MAX_ENUMERATED or is_in_row:
        walks = [tuple(range(num_clouds))] if is_in_row else _all_walks(study)
        for clouds in walks:
            is_joined = all(pair in study.links for pair in pairwise(clouds))
            if is_joined and (len(clouds) <= _MAX_ENUMERATED or study.stops is not None):
                yield CloudOrder(study=study, setting=setting, clouds=clouds)
    if num_clouds > _MAX_ENUMERATED and study.stops is None:
        for clouds, stops in _Beam.of(study, setting).walks().items():
            yield CloudOrder(study=study, setting=setting, clouds=clouds, found_stops=stops)


def _all_walks(study: Study) -> Iterator[Clouds]:
    return (one for size in study.sizes for one in permutations(range(len(study.clouds)), size))


@functools.lru_cache(maxsize=64)
def all_cuts(num_layers: int, num_stages: int, allowed: frozenset[int] | None) -> Stops:
    """Every way to cut the layers into stages, one row each."""
    found = list(combinations(range(1, num_layers) if allowed is None else sorted(allowed), num_stages - 1))
    inner = np.array(found, dtype=np.int64).reshape(len(found), num_stages - 1)
    return np.hstack([inner, np.full((len(found), 1), num_layers)])


def _any_hop(
    study: Study, clouds: Clouds, cut: int, setting: Setting, *, has_gradient: bool
) -> HopTimes | None:
    """The hop behind a stage with any codec that is allowed: no less time, no fewer bytes.

    None where there can be no cut.
    """
    pair = clouds[cut], clouds[cut + 1]
    if not study.can_cross(pair, setting, has_gradient=has_gradient):
        return None
    crossing = study.crossing(clouds, cut, setting, has_gradient=has_gradient)

    def least() -> HopTimes:
        allowed = study.links[pair].options(crossing)
        return HopTimes.least([HopTimes.of(study.coded_hop(pair, crossing, one.pair)) for one in allowed])

    return study.once(("hop", pair, crossing), least)


def _stages_s(study: Study, cloud: int, setting: Setting, *, fits: bool) -> Table:
    """What a cloud computes in a step for the layers (a, b); infinite without layers or memory."""
    table = study.table(cloud, setting)
    step_s = _rounds(study, cloud, setting) * (table.forward_s + table.backward_s)
    has_none = np.tri(len(step_s), dtype=bool)
    return np.where(has_none | (fits & (table.num_fitting < 1)), np.inf, step_s)


def _rounds(study: Study, cloud: int, setting: Setting) -> int:
    """Micro-batches of the busiest rank of a cloud."""
    return -(-setting.num_microbatches // study.clouds[cloud].num_ranks)


def _starts(rows: Stops) -> Stops:
    return np.hstack([np.zeros((len(rows), 1), dtype=np.int64), rows[:, :-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beam:
    """Orders of many clouds: `stages_s` is what each cloud takes for the layers (a, b) in a step."""

    study: Study
    stages_s: Sequence[Table]
    once_s: Sequence[Table]
    """What one micro-batch takes at each cloud."""
    hops_s: Mapping[tuple[int, int], float]
    """What it takes there and back between two clouds."""
    lines_s: Mapping[tuple[int, int], float]
    """How long all messages of a step are on the line between two clouds, in the slower direction."""

    @classmethod
    def of(cls, study: Study, setting: Setting) -> "_Beam":
        clouds = range(len(study.clouds))
        tables = [study.table(cloud, setting) for cloud in clouds]
        every = {pair: _any_hop(study, pair, 0, setting, has_gradient=True) for pair in sorted(study.links)}
        hops = {pair: one for pair, one in every.items() if one is not None}
        number = setting.num_microbatches
        return cls(
            study=study,
            stages_s=[_stages_s(study, cloud, setting, fits=True) for cloud in clouds],
            once_s=[one.forward_s + one.backward_s for one in tables],
            hops_s={pair: float(one.there_s + one.back_s) for pair, one in hops.items()},
            lines_s={pair: number * float(np.maximum(one.down_s, one.up_s)) for pair, one in hops.items()},
        )

    @property
    def num_layers(self) -> int:
        return self.study.model.num_layers

    def walks(self) -> dict[Clouds, Stops]:
        """Orders that were found, each with the cuts that are worth a bound."""
        found: dict[Clouds, set[tuple[int, ...]]] = {}
        for cap_s in self._caps_s():
            for clouds, stops in self._under(cap_s):
                found.setdefault(clouds, set()).add(stops)
        return {clouds: self._near(stops) for clouds, stops in found.items()}

    def _caps_s(self) -> Sequence[float]:
        """The least cap under which any order places all layers, and some above it."""
        finite_s = [one[np.isfinite(one)] for one in self.stages_s]
        finite_s += [np.array([one]) for one in self.lines_s.values() if one > 0]
        least_s = min((float(one.min()) for one in finite_s if one.size), default=0.0)
        most_s = max((float(one.max()) for one in finite_s if one.size), default=0.0)
        if least_s <= 0 or not any(self._under(most_s)):
            return ()
        for _ in range(_NUM_HALVINGS):
            middle_s = math.sqrt(least_s * most_s)
            least_s, most_s = (least_s, middle_s) if any(self._under(middle_s)) else (middle_s, most_s)
        return [most_s * one for one in _CAPS]

    def _under(self, cap_s: float) -> Iterator[tuple[Clouds, tuple[int, ...]]]:
        places = np.arange(self.num_layers + 1)
        # For each first layer, the last end that keeps to the cap; 0 where none does.
        ends = [np.where(one <= cap_s, places[None, :], 0).max(axis=1) for one in self.stages_s]
        states: list[tuple[float, Clouds, tuple[int, ...]]] = [(0.0, (), ())]
        sizes = self.study.sizes
        for depth in range(len(self.stages_s)):
            num_left = sizes.start - depth - 1
            grown = [
                (once_s + added_s, (*clouds, cloud), (*stops, stop))
                for once_s, clouds, stops in states
                for cloud, stop, added_s in self._next(clouds, stops, ends, cap_s, num_left=num_left)
            ]
            for _, clouds, stops in grown:
                if stops[-1] == self.num_layers and len(clouds) in sizes:
                    yield clouds, stops
            rest = [one for one in grown if one[2][-1] < self.num_layers]
            states = sorted(rest, key=lambda one: (one[0] / one[2][-1], one[1]))[:_BEAM_WIDTH]

    def _next(
        self, order: Clouds, stops: tuple[int, ...], ends: Sequence[Stops], cap_s: float, *, num_left: int
    ) -> Iterator[tuple[int, int, float]]:
        start = stops[-1] if stops else 0
        for cloud in [len(order)] if self.study.is_in_row else range(len(self.stages_s)):
            if cloud in order or (order and self.lines_s.get((order[-1], cloud), math.inf) > cap_s):
                continue
            # Every cloud that is still to come needs a layer.
            stop = min(int(ends[cloud][start]), self.num_layers - max(0, num_left))
            if stop > start and math.isfinite(self.stages_s[cloud][start, stop]):
                hop_s = self.hops_s[order[-1], cloud] if order else 0.0
                yield cloud, stop, hop_s + float(self.once_s[cloud][start, stop])

    def _near(self, found: Collection[tuple[int, ...]]) -> Stops:
        """The cuts that were found, and those with one end or two neighbouring ends moved."""
        num_stages, allowed = len(next(iter(found))), self.study.model.cuts
        if num_stages <= _MAX_ALL_CUTS:
            return all_cuts(self.num_layers, num_stages, allowed)
        moves = [(0,) * num_stages]
        for index, size, wide in product(range(num_stages - 1), (-3, -2, -1, 1, 2, 3), (1, 2)):
            ends = range(index, min(index + wide, num_stages - 1))
            moves.append(tuple(size if one in ends else 0 for one in range(num_stages)))
        rows = np.unique(np.concatenate([np.array(one) + np.array(moves) for one in sorted(found)]), axis=0)
        is_cut = (np.diff(rows, axis=1, prepend=0) > 0).all(axis=1)
        if allowed is not None:
            is_cut &= np.isin(rows[:, :-1], sorted(allowed)).all(axis=1)
        return np.asarray(rows[is_cut])
