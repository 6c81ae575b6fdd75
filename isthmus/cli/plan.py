"""`isthmus plan`: what a job will take, before anything is paid."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from isthmus.cli.options import JobArgument, JsonOption, SetOption
from isthmus.cli.pictures import HtmlOption, Pictures, PngOption, SvgOption, tell_written
from isthmus.cli.tables import as_rich, duration

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.events import Span
    from isthmus.job import Job
    from isthmus.observe.page import Table
    from isthmus.observe.timeline import Chart
    from isthmus.plan.levers import Lever
    from isthmus.plan.search.choice import BubbleSplit, Estimate, Plan, PlannedStage

# Boxes with their numbers in a picture, for each rank.
_NUM_DRAWN: Final = 12
_BY_FORMULA: Final = "≈"


def plan(
    job: JobArgument,
    write: Annotated[bool, typer.Option("--write", help="Put the choice into the job file.")] = False,
    svg: SvgOption = None,
    png: PngOption = None,
    html: HtmlOption = None,
    with_levers: Annotated[
        bool, typer.Option("--levers/--no-levers", help="Also say what one thing changed would bring.")
    ] = True,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose how to run a job, and say what it will take: time, memory, bytes and dollars.

    Nothing is started, and neither torch nor an accelerator is needed.
    """
    from rich.console import Console

    from isthmus.job import load_job, update_job_sections
    from isthmus.plan.following import planned_changes
    from isthmus.plan.levers import levers
    from isthmus.plan.planner import plan as make_plan

    loaded = load_job(job, overrides=overrides or ())
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("planning") as status:
        chosen = make_plan(loaded, progress=status.update)
        found = levers(loaded, chosen, progress=status.update) if with_levers else ()
    if as_json:
        typer.echo(json.dumps(_facts(chosen, found), indent=2))
    else:
        _show(Console(highlight=False), chosen, found)
    _draw(notes, Pictures(svg=svg, png=png, html=html), loaded, chosen, found)
    if write:
        changes = planned_changes(loaded, chosen)
        update_job_sections(job, changes.sections, clouds=changes.clouds)
        notes.print(f"[green]✓[/] {job} now holds this choice")
    elif not as_json:
        notes.print(f"[dim]next: isthmus plan {job} --write puts this choice into the job[/]")


def _facts(plan: "Plan", levers: "Sequence[Lever]") -> dict[str, Any]:
    from isthmus.plan.search.choice import plan_to_dict

    return {**plan_to_dict(plan), "levers": [asdict(lever) for lever in levers]}


def _show(console: "Console", plan: "Plan", levers: "Sequence[Lever]") -> None:
    from isthmus.observe.gantt import draw_text

    console.print(f"[bold]{plan.reason}[/]", soft_wrap=True)
    for table in _tables(plan, levers):
        console.print()
        console.print(as_rich(table))
    for note in _notes(plan):
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    console.print()
    console.print(draw_text(_chart(plan), width=console.width))


def _tables(plan: "Plan", levers: "Sequence[Lever]") -> "Iterator[Table]":
    yield _names_table(plan)
    yield _plans_table(plan)
    yield _bubbles_table(plan)
    yield _stages_table(plan)
    if plan.links:
        yield _links_table(plan)
    if levers:
        yield _levers_table(levers)


def _names_table(plan: "Plan") -> "Table":
    from isthmus.observe.page import Table

    whys = [(plan.what, plan.savers, "taken")]
    whys += [(one.what, one.savers, one.why) for one in plan.runners_up]
    rows = [
        (f"{number} {'; '.join((what, *savers))}", why) for number, (what, savers, why) in enumerate(whys, 1)
    ]
    return Table(header=("plan", "why it was taken or not"), rows=tuple(rows))


def _plans_table(plan: "Plan") -> "Table":
    from isthmus.observe.page import Table

    every = [(plan.estimate, plan.memory_share)]
    every += [(one.estimate, one.memory_share) for one in plan.runners_up]
    rows = [(str(number), *_figures(*one)) for number, one in enumerate(every, start=1)]
    header = ("plan", "step", "tokens/s", "memory", "WAN/step", "$/step", "$/Mtoken", "limited by the")
    return Table(header=header, rows=tuple(rows))


def _figures(estimate: "Estimate", memory_share: float | None) -> tuple[str, ...]:
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


def _bubbles_table(plan: "Plan") -> "Table":
    from isthmus.observe.page import Table

    bubbles = [plan.estimate.bubble, *(one.estimate.bubble for one in plan.runners_up)]
    rows = [
        (str(number), *(f"{share:.0%}" for share in (one.total, *_shares(one))))
        for number, one in enumerate(bubbles, start=1)
    ]
    header = ("plan", "bubble", "of it filling", "latency", "bandwidth", "imbalance")
    return Table(header=header, rows=tuple(rows))


def _shares(bubble: "BubbleSplit") -> tuple[float, ...]:
    return (bubble.fill, bubble.latency, bubble.bandwidth, bubble.imbalance)


def _stages_table(plan: "Plan") -> "Table":
    from isthmus.observe.page import Table

    header = ("cloud", "holds", "ranks", "busy", "in flight", "memory of a rank", "of", "most of it")
    return Table(header=header, rows=tuple(_stage_row(stage, plan) for stage in plan.stages))


def _stage_row(stage: "PlannedStage", plan: "Plan") -> tuple[str, ...]:
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


def _links_table(plan: "Plan") -> "Table":
    from isthmus.observe.page import Table

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


def _levers_table(levers: "Sequence[Lever]") -> "Table":
    from isthmus.observe.page import Table

    rows = [
        (one.what, _change(one.step_change), "–" if one.usd_change is None else _change(one.usd_change))
        for one in levers
    ]
    return Table(header=("one thing changed", "time per token", "$ per token"), rows=tuple(rows))


def _notes(plan: "Plan") -> Iterator[str]:
    estimate = plan.estimate
    price = "" if estimate.total_usd is None else f" and ${estimate.total_usd:,.2f}"
    yield f"{estimate.num_steps} steps take {duration(estimate.total_s)}{price}"
    if plan.savers:
        yield f"memory is spared by {', '.join(plan.savers)}{_where(plan)}"
    yield from (f"{'-'.join(link.between)}: {link.reason}" for link in plan.links if link.reason)
    yield from plan.notes
    if estimate.usd_per_step is None:
        yield "the price of a cloud is not known: set its usd_per_hour"
    every = (estimate, *(one.estimate for one in plan.runners_up))
    legend = "" if all(one.is_simulated for one in every) else f"; {_BY_FORMULA} is by formula, not simulated"
    yield f"{plan.num_tried} {'plan' if plan.num_tried == 1 else 'plans'} weighed{legend}"


def _where(plan: "Plan") -> str:
    """Which clouds share their stages out, where not all do."""
    shared = [stage.cloud for stage in plan.stages if stage.sharding.value != "none"]
    return f" (sharding at {', '.join(shared)})" if 0 < len(shared) < len(plan.stages) else ""


def _chart(plan: "Plan") -> "Chart":
    """One step, or a sketch of a few where the form has no scheduler yet."""
    from isthmus.observe.timeline import chart_of_step, lay_out
    from isthmus.plan.replicated.sketch import sketch
    from isthmus.plan.simulate import simulate

    if plan.scenario is not None:
        return chart_of_step(simulate(plan.scenario, num_steps=2))
    spans = sketch(plan)
    end_s = max(span.end_s for span in spans)
    return lay_out(spans, start_s=0.0, end_s=end_s, order=plan.clouds)


def _beginning(plan: "Plan") -> "Chart":
    """As much of a step as can be drawn box by box: until the slowest rank has done some micro-batches."""
    from isthmus.observe.timeline import lay_out, shifted
    from isthmus.plan.simulate import simulate

    scenario = plan.scenario
    if scenario is None:
        return _chart(plan)
    timeline = simulate(scenario, num_steps=2)
    step = timeline.steps[-1]
    passes_s = [stage.forward_s + stage.backward_s for stage in scenario.stages]
    travel_s = sum(2 * hop.line.latency_s for hop in scenario.hops)
    end_s = step.duration_s
    if scenario.num_microbatches > _NUM_DRAWN * scenario.stages[0].num_ranks:
        end_s = min(end_s, sum(passes_s) + travel_s + _NUM_DRAWN * max(passes_s))
    spans = [one for one in shifted(timeline.spans, -step.start_s) if one.end_s > 0 and one.start_s < end_s]
    return lay_out(_of_first_ranks(spans), start_s=0.0, end_s=end_s, order=plan.clouds)


def _of_first_ranks(spans: "Sequence[Span]") -> "list[Span]":
    """What the ranks that are drawn compute, and only that on the lines: hundreds of ranks share them."""
    from isthmus.observe.timeline import LINE_MARK, microbatch_of

    drawn = {microbatch_of(one) for one in spans if one.track.endswith(("/0", "/1"))}
    return [one for one in spans if not drawn or LINE_MARK not in one.track or microbatch_of(one) in drawn]


def _draw(notes: "Console", pictures: Pictures, job: "Job", plan: "Plan", levers: "Sequence[Lever]") -> None:
    if (pictures.svg, pictures.png, pictures.html) == (None, None, None):
        return
    from isthmus.observe.drawing import draw_chart
    from isthmus.observe.page import Section

    title = f"{job.name}: {plan.what}"
    sections = [Section(heading="The plan", parts=(plan.reason, *_tables(plan, levers), *_notes(plan)))]
    drawing = draw_chart(_beginning(plan), title=title)
    tell_written(notes, pictures.write(drawing, title=title, sections=sections))


def _size(num_bytes: float) -> str:
    from isthmus.units import format_bytes

    return format_bytes(int(float(f"{num_bytes:.3g}")))


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _change(share: float) -> str:
    return "none" if abs(share) < 0.005 else f"{share:+.0%}".replace("-", "−")
