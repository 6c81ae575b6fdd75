"""Ways to spare memory: which there are, in what order they are tried, and what each means at a cloud.

copies → shared out → recompute → both → the optimizer on the host → 8-bit moments

The last two are last resorts: the one is slow, the other rounds. What a run refuses is no level.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from isthmus.job import Job
from isthmus.plan.costs.memory import OptimizerState, Savers, Sharding
from isthmus.plan.scenario import Policy
from isthmus.plan.search.facts import CloudFacts

_EIGHT_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparing:
    """What all stages of a plan do to spare memory, as the job's `[train]` has it."""

    recompute: bool = False
    offload_optimizer: bool = False
    optimizer_bits: int = 32

    @property
    def words(self) -> tuple[str, ...]:
        """What a user reads of it."""
        found = {
            "recompute": self.recompute,
            "optimizer on the host": self.offload_optimizer,
            "8-bit optimizer": self.optimizer_bits == _EIGHT_BITS,
        }
        return tuple(word for word, is_on in found.items() if is_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One way to spare memory; later ones spare more, and cost more."""

    sparing: Sparing = Sparing()
    sharing: Sharding = Sharding.NONE
    """What the ranks of a cloud share out, where the job leaves that open."""
    is_last_resort: bool = False

    def sharding(self, cloud: CloudFacts) -> Sharding:
        """What the ranks of a cloud share out; one rank has no one to share with."""
        if cloud.num_ranks == 1:
            return Sharding.NONE
        return self.sharing if cloud.sharding is None else cloud.sharding

    def savers(self, cloud: CloudFacts) -> Savers:
        """What it means at a cloud; the memory of a CPU is that of its host."""
        is_small = self.sparing.optimizer_bits == _EIGHT_BITS
        sharding = self.sharding(cloud)
        return Savers(
            optimizer=OptimizerState.EIGHT_BIT if is_small else OptimizerState.FLOAT32,
            sharding=sharding,
            num_shards=1 if sharding is Sharding.NONE else cloud.num_ranks,
            offload_optimizer=self.sparing.offload_optimizer and not cloud.accelerator.is_cpu,
        )

    def words(self, clouds: Iterable[CloudFacts]) -> tuple[str, ...]:
        """What a user reads of it, for stages at these clouds."""
        is_shared = any(self.sharding(cloud) is not Sharding.NONE for cloud in clouds)
        return (*(("sharding inside the cloud",) if is_shared else ()), *self.sparing.words)


def levels(job: Job, clouds: Sequence[CloudFacts], policy: Policy) -> tuple[Level, ...]:
    """What may be tried at these clouds, from the mildest on; what the job asks for is part of each.

    `recompute = "auto"` asks for nothing: a run then recomputes no more than its memory asks for.
    """
    asked = Sparing(
        recompute=job.train.recompute is True,
        offload_optimizer=job.train.offload_optimizer,
        optimizer_bits=job.train.optimizer_bits,
    )
    sharings = _sharings(clouds, policy)
    found = _all_ways(asked, sharings)
    if asked.offload_optimizer or asked.optimizer_bits == _EIGHT_BITS:
        return tuple(found)
    resorts = (replace(asked, offload_optimizer=True), replace(asked, optimizer_bits=_EIGHT_BITS))
    rest = [replace(level, is_last_resort=True) for one in resorts for level in _all_ways(one, sharings)]
    return (*found, *rest)


def _all_ways(asked: Sparing, sharings: Sequence[Sharding]) -> list[Level]:
    return [
        Level(sparing=replace(asked, recompute=recompute), sharing=sharing)
        for recompute in ((True,) if asked.recompute else (False, True))
        for sharing in sharings
    ]


def _sharings(clouds: Sequence[CloudFacts], policy: Policy) -> tuple[Sharding, ...]:
    """What ranks may share out, from nothing on, where some cloud leaves that open."""
    if all(cloud.num_ranks == 1 or cloud.sharding is not None for cloud in clouds):
        return (Sharding.NONE,)
    return (Sharding.NONE, Sharding.OPTIMIZER, *((Sharding.FULL,) if policy.keeps_order else ()))
