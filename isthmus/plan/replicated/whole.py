"""A whole model on one cloud: what a rank takes for a micro-batch of it, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.plan.job_facts import CloudFacts, Level, MemoryOptions
from isthmus.plan.memory import Memory
from isthmus.plan.plan import PlannedStage, memory_parts
from isthmus.plan.replicated.replicas import Replica
from isthmus.plan.stage_tables import MAX_MICROBATCHES, ModelSupply, Setting, microbatch_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A cloud with a whole model."""

    cloud: CloudFacts
    setting: Setting
    supply: ModelSupply
    replica: Replica
    memory: Mapping[str, int]
    """Of a rank, part by part."""

    @property
    def savers(self) -> tuple[str, ...]:
        """What spares its memory."""
        return self._level.words([self.cloud])

    @property
    def sparing(self) -> MemoryOptions:
        """The same as the job's `[train]` has it."""
        return self._level.sparing

    @property
    def num_trained(self) -> int:
        """Parameters of the model that learn."""
        costs = self.supply.costs(self.cloud, self.setting)
        return costs.num_trained(range(costs.num_layers))

    def stage(self, holds: str, *, busy_s: float) -> PlannedStage:
        """Its part of a plan."""
        return PlannedStage(
            cloud=self.cloud.name,
            holds=holds,
            num_ranks=self.cloud.num_ranks,
            busy_s=busy_s,
            window=1,
            memory=self.memory,
            capacity_bytes=self.cloud.capacity_bytes,
            usd_per_hour=self.cloud.usd_per_hour,
            sharding=self._level.sharding(self.cloud),
            is_measured=self.cloud.profile is not None,
        )

    @property
    def _level(self) -> Level:
        return self.supply.levels[self.setting.level]


def whole_models(supply: ModelSupply) -> Mapping[int, list[Whole]]:
    """By number of micro-batches, the clouds that hold the whole model, sparing as little as they must."""
    found: dict[int, list[Whole]] = {}
    for number in microbatch_numbers(supply):
        fitting = (_whole(supply, index, number) for index in range(len(supply.clouds)))
        found[number] = [one for one in fitting if one is not None]
    return found


def microbatch_numbers(supply: ModelSupply) -> list[int]:
    """The numbers of micro-batches that are tried, from the least on."""
    return microbatch_choices(
        supply.step.num_sequences, given=None, most=MAX_MICROBATCHES, num_ranks=min(supply.num_ranks)
    )


def whole_memory(supply: ModelSupply, cloud: CloudFacts, setting: Setting) -> Memory:
    """What a rank needs for the whole model."""
    layers = range(supply.costs(cloud, setting).num_layers)
    return supply.memory(cloud, setting, layers, window=1)


def can_hold(supply: ModelSupply, index: int, setting: Setting) -> bool:
    """Whether a cloud has room for the whole model under a setting."""
    return bool(supply.table(index, setting).held[0, -1] >= 1)


def _whole(supply: ModelSupply, index: int, num_microbatches: int) -> Whole | None:
    for level in range(len(supply.levels)):
        setting = Setting(num_microbatches=num_microbatches, level=level)
        if can_hold(supply, index, setting):
            cloud, table = supply.clouds[index], supply.table(index, setting)
            replica = Replica(
                num_ranks=cloud.num_ranks,
                microbatch_s=float(table.forward_s[0, -1] + table.backward_s[0, -1]),
                update_s=float(table.update_s[0, -1]),
            )
            memory = memory_parts(whole_memory(supply, cloud, setting))
            return Whole(cloud=cloud, setting=setting, supply=supply, replica=replica, memory=memory)
    return None
