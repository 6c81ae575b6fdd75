"""Plans in which every cloud holds the whole model and the copies are made one, rarely or in every step."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from isthmus.errors import UserError
from isthmus.job import DataStrategy, Job, PipelineStrategy
from isthmus.plan.job_facts import line
from isthmus.plan.plan import BubbleSplit, DataSettings, Form, Plan, PlannedLink, estimated
from isthmus.plan.refusals import excess, fits
from isthmus.plan.replicated.refusals import holders, no_room
from isthmus.plan.replicated.replicas import Sync, SyncCosts, Wire, path, sync_choices, sync_costs
from isthmus.plan.replicated.whole import Whole, whole_models
from isthmus.plan.study import Study

# Every subset of more clouds than this would be too many; then all that hold the model and are joined count.
_MAX_SUBSETS: Final = 6


def data_plans(study: Study) -> list[Plan]:
    """Copies of the model on two clouds or more, made one as often as each choice says.

    Where there is none, and the job asks for no other form, why.
    """
    given = study.job.strategy if isinstance(study.job.strategy, DataStrategy) else None
    plans = list(_plans(study, given or DataStrategy(kind="data")))
    if given is not None and not plans:
        raise _refusal(study)
    return plans


def _plans(study: Study, given: DataStrategy) -> Iterator[Plan]:
    syncs = list(
        sync_choices(
            num_layers=study.model.num_layers,
            inner_steps=given.inner_steps,
            num_fragments=given.fragments,
            bits=given.bits,
        )
    )
    for wholes in whole_models(study.supply).values():
        for chosen in _joined(study.job, wholes):
            wires = _wires(study.job, chosen)
            yield from _while_needed((_plan(study, chosen, wires, sync) for sync in syncs), study.job)


def _while_needed(plans: Iterable[Plan], job: Job) -> Iterator[Plan]:
    """From the most exact on, up to the first that hides its traffic and is within the limits.

    Rarer ones would only cost quality; but traffic has a price, and under a deadline the cheapest is wanted.
    """
    for one in plans:
        yield one
        if not one.estimate.bubble.total and job.limits.deadline_s is None and not excess(one, job):
            return


def _joined(job: Job, wholes: Sequence[Whole]) -> Iterator[Sequence[Whole]]:
    """Sets of two clouds or more that links join: all there are, or of many clouds the largest."""
    if len(wholes) > _MAX_SUBSETS:
        yield from _largest_joined(job, wholes)
        return
    for size in range(2, len(wholes) + 1):
        for chosen in combinations(wholes, size):
            wires = _wires(job, chosen)
            if all(path(0, other, wires) for other in range(1, size)):
                yield chosen


def _largest_joined(job: Job, wholes: Sequence[Whole]) -> Iterator[Sequence[Whole]]:
    wires = _wires(job, wholes)
    left = list(range(len(wholes)))
    while left:
        joined = [one for one in left if path(left[0], one, wires)]
        left = [one for one in left if one not in joined]
        if len(joined) > 1:
            yield [wholes[one] for one in joined]


def _refusal(study: Study) -> UserError:
    if len(study.clouds) < 2:
        return UserError(
            "data parallel between clouds needs two clouds", hint="add a [[cloud]] and a [[link]]"
        )
    way = 'set strategy.kind to "pipeline", which gives each cloud some of the layers'
    return no_room(
        study,
        lambda one: list(combinations(holders(one.supply, "the whole model"), 2)),
        claim="the whole model fits on no two linked clouds",
        ways=[way] if _fits_as_pipeline(study) else [],
    )


def _fits_as_pipeline(study: Study) -> bool:
    try:
        cut = study.of(study.job.model_copy(update={"strategy": PipelineStrategy(kind="pipeline")}))
    except UserError:
        # Such as more clouds than layers.
        return False
    return fits(cut)


def _plan(study: Study, wholes: Sequence[Whole], wires: Sequence[Wire], sync: Sync) -> Plan:
    costs = sync_costs(
        [one.replica for one in wholes],
        wires,
        sync,
        num_parameters=wholes[0].num_trained,
        num_microbatches=wholes[0].setting.num_microbatches,
    )
    stages = tuple(one.stage("the whole model", busy_s=costs.compute_s) for one in wholes)
    links = tuple(_link(study.job, wholes, wire, costs) for wire in wires)
    estimate = estimated(
        stages,
        links,
        step_s=costs.step_s,
        num_tokens=study.step.num_tokens,
        num_steps=study.step.num_steps,
        bubble=BubbleSplit(
            fill=0.0,
            latency=costs.latency_s / costs.step_s,
            bandwidth=costs.bandwidth_s / costs.step_s,
            imbalance=0.0,
        ),
        limiting=_limiting(wholes, costs, sync),
    )
    return Plan(
        form=Form.DATA,
        stages=stages,
        links=links,
        savers=max((one.savers for one in wholes), key=len),
        sparing=max((one.sparing for one in wholes), key=lambda one: len(one.words)),
        estimate=estimate,
        reason="",
        settings=DataSettings(inner_steps=sync.inner_steps, num_fragments=sync.num_fragments, bits=sync.bits),
        loss=costs.loss,
        notes=(costs.note,),
    )


def _link(job: Job, wholes: Sequence[Whole], wire: Wire, costs: SyncCosts) -> PlannedLink:
    first, second = (wholes[one].cloud.name for one in wire.between)
    link = next(one for one in job.link if set(one.between) == {first, second})
    return PlannedLink(
        between=(first, second),
        down_bytes=costs.step_bytes[wire.between],
        up_bytes=costs.step_bytes[wire.between[::-1]],
        usd_per_gib=link.usd_per_gib,
    )


def _limiting(wholes: Sequence[Whole], costs: SyncCosts, sync: Sync) -> str:
    """What no end of would shorten a step the most; beside rare exchanges all is computed that can be."""
    gains_s = {"bandwidth": costs.bandwidth_s, "round trip": costs.latency_s}
    gains_s["compute"] = costs.compute_s if sync.is_exact or not costs.bandwidth_s else 0.0
    most = max(gains_s, key=lambda one: gains_s[one])
    if most == "compute" or costs.busiest is None:
        return "compute of all clouds"
    return f"{most} of {'-'.join(wholes[one].cloud.name for one in costs.busiest)}"


def _wires(job: Job, wholes: Sequence[Whole]) -> list[Wire]:
    names = [one.cloud.name for one in wholes]
    wires = []
    for link in job.link:
        if all(name in names for name in link.between):
            seen = line(link, link.between[0])
            first, second = (names.index(name) for name in link.between)
            wires.append(
                Wire(
                    between=(first, second),
                    down_bps=seen.down_bps,
                    up_bps=seen.up_bps,
                    rtt_s=2 * seen.latency_s,
                )
            )
    return wires
