"""What crossing costs, for a search that counts money: a dollar is the time for which all clouds cost one."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from isthmus.plan.scenario import HopLoad
from isthmus.plan.search.loads import Terms
from isthmus.plan.search.settings import Found, Setting, StageTable, measure_with
from isthmus.plan.search.supply import ModelSupply

_GIB: Final = 2**30
_S_PER_HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolled:
    """The same clouds, with links that take as much longer as their traffic is worth."""

    supply: ModelSupply
    terms: Terms

    @property
    def num_ranks(self) -> Sequence[int]:
        """Of each cloud."""
        return self.supply.num_ranks

    @property
    def pairs(self) -> Collection[tuple[int, int]]:
        """The clouds that a link joins, both ways."""
        return self.supply.pairs

    @property
    def num_frozen(self) -> int:
        """Layers from the first on through which nothing goes back."""
        return self.supply.num_frozen

    def table(self, cloud: int, setting: Setting) -> StageTable:
        """What a cloud takes for any of its possible stages."""
        return self.supply.table(cloud, setting)

    def hop(self, pair: tuple[int, int], setting: Setting, *, has_gradient: bool = True) -> HopLoad | None:
        """What a micro-batch sends; the toll of a whole step is taken once, as coding is."""
        hop = self.supply.hop(pair, setting, has_gradient=has_gradient)
        usd_per_hour = _usd_per_hour(self.supply, range(len(self.supply.clouds)))
        if hop is None or not usd_per_hour:
            return hop
        toll_s = _S_PER_HOUR / usd_per_hour * _usd(hop, pair, setting, self.supply, self.terms)
        return replace(hop, forward_coding_s=hop.forward_coding_s + toll_s)


def least_usd(found: Found, supply: ModelSupply, terms: Terms) -> float:
    """What a step comes to at the least, by formula, with codecs as strong as is allowed."""
    partition, setting = found.partition, found.setting
    hops = list(_hops(found, supply))
    num_ranks = [supply.num_ranks[cloud] for cloud in partition.clouds]
    step_s = measure_with(found.problem, partition, hops, num_ranks).step_s
    pairs = zip(hops, pairwise(partition.clouds), strict=True)
    traffic_usd = sum(_usd(hop, pair, setting, supply, terms) for hop, pair in pairs)
    return _usd_per_hour(supply, partition.clouds) * step_s / _S_PER_HOUR + traffic_usd


def _hops(found: Found, supply: ModelSupply) -> Iterator[HopLoad]:
    partition = found.partition
    for pair, stop in zip(pairwise(partition.clouds), partition.stops, strict=False):
        hop = supply.hop(pair, found.setting, has_gradient=stop > supply.num_frozen)
        if hop is None:
            raise ValueError(f"there is no way between clouds {pair}")
        yield hop


def _usd(hop: HopLoad, pair: tuple[int, int], setting: Setting, supply: ModelSupply, terms: Terms) -> float:
    """Of what crosses a link in a step."""
    usd_per_gib = terms.links[frozenset(supply.clouds[one].name for one in pair)].usd_per_gib or 0.0
    return setting.num_microbatches * (hop.forward_bytes + hop.backward_bytes) / _GIB * usd_per_gib


def _usd_per_hour(supply: ModelSupply, clouds: Collection[int]) -> float:
    return sum(supply.clouds[one].usd_per_hour or 0.0 for one in clouds)
