"""All pipelines worth a closer look: the fastest by formula, and the cheapest where money counts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from isthmus.plan.costs.memory import Sharding
from isthmus.plan.search.assess import assess_all
from isthmus.plan.search.choice import PipelineSettings, Plan
from isthmus.plan.search.settings import Found, Supply, search
from isthmus.plan.search.sparing import Sparing
from isthmus.plan.search.study import Study, study
from isthmus.plan.search.supply import MAX_MICROBATCHES, microbatch_choices
from isthmus.plan.search.tolls import Tolled, least_usd

Progress = Callable[[str], None]

_MAX_ASSESSED: Final = 400


def pipelines(ready: Study, progress: Progress) -> list[Plan]:
    """Ranks go their own ways, or in lock-step too where memory binds them: then they can share out more."""
    found = list(_cuts(ready, progress))
    mild = mild_sparings(ready)
    best = min(
        (one for one in found if one.sparing in mild), key=lambda one: one.estimate.step_s, default=None
    )
    alike = ready.in_lock_step if best is None or _is_bound(best) else None
    if alike is None:
        return found
    every = [*found, *(one for one in _cuts(_sharing_all(alike), progress) if _shares_all(one))]
    fewest = min((len(one.stages) for one in every if one.sparing in mild), default=math.inf)
    return [one for one in every if one.sparing in mild or len(one.stages) < fewest]


def _sharing_all(ready: Study) -> Study:
    """With nothing to try but what is tried for: ranks that share out all of a stage."""
    levels = [one for one in ready.supply.levels if one.sharing is Sharding.FULL]
    supply = replace(ready.supply, levels=levels, _tables={}, _memory={}, _costs={})
    return replace(ready, supply=supply)


def _shares_all(plan: Plan) -> bool:
    return any(stage.sharding is Sharding.FULL for stage in plan.stages)


def _is_bound(plan: Plan) -> bool:
    """Whether more memory would do it good."""
    caps = plan.settings.max_in_flight if isinstance(plan.settings, PipelineSettings) else None
    return caps is not None or plan.sparing.recompute


def _cuts(ready: Study, progress: Progress) -> Iterator[Plan]:
    """With the codecs that are allowed, and with those of less loss.

    Partitions are found as if all links had the strongest; but where milder ones hide a link it gets these,
    and other partitions may suit them better.
    """
    yield from _cut(ready, progress)
    limits = ready.job.limits
    if limits.codec_loss == "some":
        careful = ready.job.model_copy(update={"limits": limits.model_copy(update={"codec_loss": "slight"})})
        yield from _cut(study(careful, policy=ready.terms.policy), progress)


def _cut(ready: Study, progress: Progress) -> Iterator[Plan]:
    ranks = [cloud.num_ranks for cloud in ready.clouds]
    numbers = microbatch_choices(
        ready.step.num_sequences,
        given=ready.strategy.microbatches,
        most=MAX_MICROBATCHES,
        num_ranks=min(ranks),
        multiple_of=math.lcm(*ranks) if ready.terms.policy.keeps_order else 1,
    )
    progress(f"cutting the model for {len(numbers)} numbers of micro-batches")
    for one in _promising(ready, _search(ready, ready.supply, numbers), numbers):
        yield from assess_all(one.refined, ready.supply, ready.terms)


def _promising(ready: Study, found: Sequence[Found], microbatches: Sequence[int]) -> Sequence[Found]:
    """The fastest by formula, and where money counts the cheapest too."""
    if ready.terms.enough_usd is None:
        return found[:_MAX_ASSESSED]
    tolled = Tolled(supply=ready.supply, terms=ready.terms)
    every_set = _search(ready, tolled, microbatches, keeps_every_set=True)
    cheap = sorted((*every_set, *found), key=lambda one: least_usd(one, ready.supply, ready.terms))
    chosen = (*cheap[: _MAX_ASSESSED // 4], *found[: _MAX_ASSESSED // 4])
    return list({one.key: one for one in chosen}.values())


def _search(
    ready: Study, supply: Supply, microbatches: Sequence[int], *, keeps_every_set: bool = False
) -> list[Found]:
    """What fits; by a last resort only what nothing else makes fit, or what has fewer stages for it."""
    levels = ready.supply.levels
    look = partial(
        search,
        supply,
        microbatches=microbatches,
        constraints=ready.terms.constraints,
        keeps_every_set=keeps_every_set,
    )
    num_mild = sum(not one.is_last_resort for one in levels)
    found = look(num_levels=num_mild)
    fewest = min((len(one.partition.clouds) for one in found), default=math.inf)
    least = len(ready.clouds) if ready.terms.constraints.uses_all else 1
    if num_mild == len(levels) or fewest <= least:
        return found
    resorts = look(first_level=num_mild, num_levels=len(levels))
    fewer = (one for one in resorts if len(one.partition.clouds) < fewest)
    return sorted([*found, *fewer], key=lambda one: one.partition.step_s)


def mild_sparings(ready: Study) -> set[Sparing]:
    """What may be spared without a last resort."""
    return {one.sparing for one in ready.supply.levels if not one.is_last_resort}
