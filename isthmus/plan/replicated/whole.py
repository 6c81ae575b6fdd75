"""A whole model on one cloud: what a rank takes for a micro-batch of it, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from isthmus.plan.replicated.replicas import Replica
from isthmus.plan.search.choice import PlannedStage
from isthmus.plan.search.estimates import memory_parts
from isthmus.plan.search.facts import CloudFacts
from isthmus.plan.search.settings import Setting
from isthmus.plan.search.sparing import Level, Sparing
from isthmus.plan.search.supply import ModelSupply, microbatch_choices

_MAX_MICROBATCHES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A cloud with a whole model."""

    cloud: CloudFacts
    setting: Setting
    supply: ModelSupply
    replica: Replica

    @property
    def savers(self) -> tuple[str, ...]:
        """What spares its memory."""
        return self._level.words([self.cloud])

    @property
    def sparing(self) -> Sparing:
        """The same as the job's `[train]` has it."""
        return self._level.sparing

    @property
    def num_trained(self) -> int:
        """Parameters of the model that learn."""
        return self.supply.costs(self.cloud, self.setting).num_trained(self._layers)

    def stage(self, holds: str, *, busy_s: float) -> PlannedStage:
        """Its part of a plan."""
        memory = self.supply.memory(self.cloud, self.setting, self._layers, window=1)
        return PlannedStage(
            cloud=self.cloud.name,
            holds=holds,
            num_ranks=self.cloud.num_ranks,
            busy_s=busy_s,
            window=1,
            memory=memory_parts(memory),
            capacity_bytes=self.cloud.capacity_bytes,
            usd_per_hour=self.cloud.usd_per_hour,
            sharding=self._level.sharding(self.cloud),
            is_measured=self.cloud.profile is not None,
        )

    @property
    def _level(self) -> Level:
        return self.supply.levels[self.setting.level]

    @property
    def _layers(self) -> range:
        return range(self.supply.costs(self.cloud, self.setting).num_layers)


def whole_models(supply: ModelSupply) -> Mapping[int, list[Whole]]:
    """By number of micro-batches, the clouds that hold the whole model, sparing as little as they must."""
    found: dict[int, list[Whole]] = {}
    num_ranks = min(supply.num_ranks)
    numbers = microbatch_choices(
        supply.step.num_sequences, given=None, most=_MAX_MICROBATCHES, num_ranks=num_ranks
    )
    for number in numbers:
        fitting = (_whole(supply, index, number) for index in range(len(supply.clouds)))
        found[number] = [one for one in fitting if one is not None]
    return found


def _whole(supply: ModelSupply, index: int, num_microbatches: int) -> Whole | None:
    cloud = supply.clouds[index]
    for level in range(len(supply.levels)):
        setting = Setting(num_microbatches=num_microbatches, level=level)
        table = supply.table(index, setting)
        if table.held[0, -1] >= 1:
            replica = Replica(
                num_ranks=cloud.num_ranks,
                microbatch_s=float(table.forward_s[0, -1] + table.backward_s[0, -1]),
                update_s=float(table.update_s[0, -1]),
            )
            return Whole(cloud=cloud, setting=setting, supply=supply, replica=replica)
    return None
