"""Why no two linked clouds hold the whole models that they should, and the nearest changes that let them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from isthmus.errors import UserError
from isthmus.plan.job_facts import CloudFacts
from isthmus.plan.replicated.whole import can_hold, microbatch_numbers, whole_memory
from isthmus.plan.stage_tables import ModelSupply, Setting
from isthmus.plan.study import Study
from isthmus.units import format_bytes, join_words

_NO_END: Final = 2.0**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A cloud, a whole model that it should hold, and the least that a rank of it needs for that."""

    cloud: CloudFacts
    holds: str
    least_bytes: int
    room_bytes: int
    savers: tuple[str, ...]
    """What spares so much."""

    @property
    def fits(self) -> bool:
        """Whether a rank has room for it."""
        return self.least_bytes <= self.room_bytes

    @property
    def memory_share(self) -> float:
        """What it needs of a rank's memory; nothing where that is unknown."""
        return self.least_bytes / (self.cloud.capacity_bytes or math.inf)


Pair = tuple[Holder, Holder]


def holders(supply: ModelSupply, holds: str) -> list[Holder]:
    """Every cloud that could hold the model if it had the memory, with all that spares some."""
    found = (_holder(supply, index, holds) for index in range(len(supply.clouds)))
    return [one for one in found if one is not None]


def linked_fit(study: Study, pairs: Iterable[Pair]) -> Pair | None:
    """The first two linked clouds that both have room."""
    return next((pair for pair in pairs if _is_linked(study, pair) and _fit(pair)), None)


def no_room(
    study: Study, pairs_of: Callable[[Study], Sequence[Pair]], *, claim: str, ways: Sequence[str] = ()
) -> UserError:
    """What is in the way where no linked pair fits; `ways` are further ones out of it, known to work."""
    pairs = pairs_of(study)
    apart = next((pair for pair in pairs if _fit(pair)), None)
    nearest = min((pair for pair in pairs if _is_linked(study, pair)), key=_shares, default=None)
    found = [*ways, *_narrow_way(study, pairs_of)]
    if apart is not None:
        found.append(_link_wanted(study, apart))
    if nearest is not None:
        found += _memory_ways(nearest, study.job.limits.memory_share)
    if not found:
        found.append('set cloud.NAME.sharding to "auto" where it is "full"')
    return UserError(f"{claim}: {_cause(apart, nearest)}", hint="; or ".join(found))


def _holder(supply: ModelSupply, index: int, holds: str) -> Holder | None:
    cloud = supply.clouds[index]
    settings = _strictest(supply, index)
    if not settings:
        return None
    # Of those that spare as much, the first is the mildest.
    best = min(settings, key=lambda one: whole_memory(supply, cloud, one).total_bytes)
    return Holder(
        cloud=cloud,
        holds=holds,
        least_bytes=whole_memory(supply, cloud, best).total_bytes,
        room_bytes=cloud.room_bytes(supply.memory_share),
        savers=supply.levels[best.level].words([cloud]),
    )


def _strictest(supply: ModelSupply, index: int) -> list[Setting]:
    """All that can be done with the smallest micro-batches, were there memory without end."""
    roomy = replace(supply, memory_share=_NO_END, _tables={})
    for number in reversed(microbatch_numbers(supply)):
        settings = [Setting(num_microbatches=number, level=level) for level in range(len(supply.levels))]
        possible = [one for one in settings if can_hold(roomy, index, one)]
        if possible:
            return possible
    return []


def _cause(apart: Pair | None, nearest: Pair | None) -> str:
    if apart is not None:
        return f"{join_words([repr(one.cloud.name) for one in apart])} have room, but no link joins them"
    if nearest is None:
        return "micro-batches cannot be dealt out to ranks in lock-step, however much memory there is"
    worst = max(nearest, key=lambda one: one.memory_share)
    spared = f"even with {join_words(worst.savers)}, " if worst.savers else ""
    return (
        f"{spared}a rank of {worst.cloud.name!r} needs {format_bytes(worst.least_bytes)} for {worst.holds}, "
        f"and limits.memory_share leaves it {format_bytes(worst.room_bytes)}"
    )


def _narrow_way(study: Study, pairs_of: Callable[[Study], Sequence[Pair]]) -> Iterator[str]:
    if study.job.train.precision == "float32":
        train = study.job.train.model_copy(update={"precision": "bfloat16"})
        narrow = study.of(study.job.model_copy(update={"train": train}))
        if linked_fit(narrow, pairs_of(narrow)):
            yield 'set train.precision to "bfloat16"'


def _memory_ways(pair: Pair, share: float) -> Iterator[str]:
    wanted_share = math.ceil(100 * max(one.memory_share for one in pair)) / 100
    if wanted_share <= 1:
        yield f"set limits.memory_share to {wanted_share:g}"
    wanted = [
        f"devices of {_enough(one.least_bytes / share)} in {one.cloud.name!r}" for one in pair if not one.fits
    ]
    yield f"{join_words(wanted)} would do"


def _link_wanted(study: Study, pair: Pair) -> str:
    first, second = (one.cloud.name for one in pair)
    listens = any(study.job.cloud_named(name).listen for name in (first, second))
    return f'add a [[link]] with between = ["{first}", "{second}"], bandwidth and rtt' + (
        "" if listens else f", and set cloud.{first}.listen"
    )


def _is_linked(study: Study, pair: Pair) -> bool:
    names = {one.cloud.name for one in pair}
    return any(set(link.between) == names for link in study.job.link)


def _fit(pair: Pair) -> bool:
    return all(one.fits for one in pair)


def _shares(pair: Pair) -> list[float]:
    return sorted((one.memory_share for one in pair), reverse=True)


def _enough(num_bytes: float) -> str:
    """Rounded up, so that what is asked for does."""
    return f"{math.ceil(10 * num_bytes / 2**30) / 10:g} GiB"
