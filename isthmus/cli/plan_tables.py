"""What `isthmus plan` prints: tables, and a line for each thing that they leave unsaid."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from isthmus.cli.tables import duration
from isthmus.job import Job
from isthmus.job.sections import why_not_run
from isthmus.observe.page import Table
from isthmus.plan.levers import Lever
from isthmus.plan.search.choice import BubbleSplit, Estimate, Form, Plan, PlannedStage
from isthmus.units import format_bytes, shorten

_BY_FORMULA: Final = "≈"


def plan_tables(plan: Plan, levers: Sequence[Lever]) -> Iterator[Table]:
    """All that is known of a plan and of those that lost, table by table."""
    yield _names_table(plan)
    yield _plans_table(plan)
    yield _bubbles_table(plan)
    yield _stages_table(plan)
    if plan.links:
        yield _links_table(plan)
    if levers:
        yield _levers_table(levers)


def _names_table(plan: Plan) -> Table:
    whys = [(plan.what, plan.savers, "taken")]
    whys += [(one.what, one.savers, one.why) for one in plan.runners_up]
    rows = [
        (f"{number} {'; '.join((what, *savers))}", why) for number, (what, savers, why) in enumerate(whys, 1)
    ]
    return Table(header=("plan", "why it was taken or not"), rows=tuple(rows))


def _plans_table(plan: Plan) -> Table:
    every = [(plan.estimate, plan.memory_share)]
    every += [(one.estimate, one.memory_share) for one in plan.runners_up]
    rows = [(str(number), *_figures(*one)) for number, one in enumerate(every, start=1)]
    header = ("plan", "step", "tokens/s", "memory", "WAN/step", "$/step", "$/Mtoken", "limited by the")
    return Table(header=header, rows=tuple(rows))


def _figures(estimate: Estimate, memory_share: float | None) -> tuple[str, ...]:
    about = "" if estimate.is_simulated else _BY_FORMULA
    return (
        about + duration(estimate.step_s),
        f"{about}{estimate.tokens_per_s:,.0f}",
        "–" if memory_share is None else f"{memory_share:.0%}",
        _size(estimate.wan_bytes),
        _usd(estimate.usd_per_step),
        _usd(estimate.usd_per_million_tokens),
        estimate.limiting,
    )


def _bubbles_table(plan: Plan) -> Table:
    bubbles = [plan.estimate.bubble, *(one.estimate.bubble for one in plan.runners_up)]
    rows = [
        (str(number), *(f"{share:.0%}" for share in (one.total, *_shares(one))))
        for number, one in enumerate(bubbles, start=1)
    ]
    header = ("plan", "bubble", "of it filling", "latency", "bandwidth", "imbalance")
    return Table(header=header, rows=tuple(rows))


def _shares(bubble: BubbleSplit) -> tuple[float, ...]:
    return (bubble.fill, bubble.latency, bubble.bandwidth, bubble.imbalance)


def _stages_table(plan: Plan) -> Table:
    header = ("cloud", "holds", "ranks", "busy", "in flight", "memory of a rank", "of", "most of it")
    return Table(header=header, rows=tuple(_stage_row(stage, plan) for stage in plan.stages))


def _stage_row(stage: PlannedStage, plan: Plan) -> tuple[str, ...]:
    largest = sorted(stage.memory.items(), key=lambda item: -item[1])[:2]
    return (
        stage.cloud,
        stage.holds,
        str(stage.num_ranks),
        f"{stage.busy_s / plan.estimate.step_s:.0%}",
        str(stage.window),
        _size(stage.memory_bytes),
        "–" if stage.capacity_bytes is None else _size(stage.capacity_bytes),
        ", ".join(f"{name} {_size(number)}" for name, number in largest),
    )


def _links_table(plan: Plan) -> Table:
    rows = [
        (
            "–".join(link.between),
            _size(link.down_bytes),
            _size(link.up_bytes),
            link.forward_codec,
            link.backward_codec,
            _usd((link.down_bytes + link.up_bytes) / 2**30 * (link.usd_per_gib or 0.0)),
        )
        for link in plan.links
    ]
    header = ("link", "there in a step", "back", "codec there", "codec back", "$/step")
    return Table(header=header, rows=tuple(rows))


def _levers_table(levers: Sequence[Lever]) -> Table:
    rows = [
        (one.what, _change(one.step_change), "–" if one.usd_change is None else _change(one.usd_change))
        for one in levers
    ]
    return Table(header=("one thing changed", "time per token", "$ per token"), rows=tuple(rows))


def plan_notes(plan: Plan) -> Iterator[str]:
    """What the tables leave unsaid, a line each."""
    estimate = plan.estimate
    usd = estimate.total_usd
    price = "" if usd is None else f" and ${usd:,.2f}" if usd >= 1 else f" and ${usd:.2g}"
    yield f"{estimate.num_steps} steps take {duration(estimate.total_s)}{price}"
    if estimate.reliefs:
        gains = (f"{what} {share:.0%}" for what, share in estimate.reliefs.items())
        yield f"with no end of each a step would be shorter by: {', '.join(gains)}"
    if plan.savers:
        yield f"memory is spared by {', '.join(plan.savers)}{_where(plan)}"
    yield from (f"{'-'.join(link.between)}: {link.reason}" for link in plan.links if link.reason)
    yield from plan.notes
    if why_not := why_not_planned_run(plan):
        yield f'{why_not}; where strategy.kind is "auto", a run takes the best pipeline instead'
    for cloud in dict.fromkeys(stage.cloud for stage in plan.stages if stage.usd_per_hour is None):
        yield f"the price of cloud {cloud} is not known: set cloud.{cloud}.usd_per_hour"
    every = (estimate, *(one.estimate for one in plan.runners_up))
    legend = "" if all(one.is_simulated for one in every) else f"; {_BY_FORMULA} is by formula, not simulated"
    yield f"{plan.num_tried} {'plan' if plan.num_tried == 1 else 'plans'} weighed{legend}"


def why_not_planned_run(plan: Plan) -> str | None:
    """Why `isthmus run` cannot follow a plan, None where it can."""
    return None if plan.form is Form.ALONE else why_not_run(plan.form.value)


def plan_advice(job: Job, plan: Plan, path: Path) -> Iterator[str]:
    """What to do before a run: leave out clouds that take no part, and measure those that do."""
    idle = [cloud.name for cloud in job.cloud if cloud.name not in plan.clouds]
    if idle:
        yield f"a run uses every cloud of its job: to run this plan, leave {' and '.join(idle)} out"
    guessed = [stage.cloud for stage in plan.stages if not stage.is_measured]
    if guessed:
        yield (
            f"the speed of {' and of '.join(guessed)} is of the catalogue; better is a measured one, from a "
            f"device there: isthmus profile {path} --cloud {guessed[0]}"
        )


def _where(plan: Plan) -> str:
    """Which clouds share their stages out, where not all do."""
    shared = [stage.cloud for stage in plan.stages if stage.sharding.value != "none"]
    return f" (sharding at {', '.join(shared)})" if 0 < len(shared) < len(plan.stages) else ""


def _size(num_bytes: float) -> str:
    return format_bytes(int(shorten(num_bytes)))


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _change(share: float) -> str:
    return "none" if abs(share) < 0.005 else f"{share:+.0%}".replace("-", "−")
