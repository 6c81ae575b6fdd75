"""`isthmus plan`: what a job will take, before anything is paid."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from isthmus.cli.options import JobArgument, JsonOption, ProfileOption, SetOption
from isthmus.cli.pictures import HtmlOption, Pictures, PngOption, SvgOption, tell_written
from isthmus.cli.tables import as_rich
from isthmus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.events import Span
    from isthmus.job import Job
    from isthmus.observe.timeline import Chart
    from isthmus.plan.levers import Lever
    from isthmus.plan.search.choice import Plan

# Keys of [strategy] that hold a choice.
_WRITTEN: Final = frozenset(
    {
        "kind",
        "clouds",
        "layers",
        "microbatches",
        "max_in_flight",
        "policy",
        "inner_steps",
        "fragments",
        "bits",
        "discriminator_cloud",
    }
)
# Boxes with their numbers in a picture, for each rank.
_NUM_DRAWN: Final = 12


def plan(
    job: JobArgument,
    write: Annotated[bool, typer.Option("--write", help="Put the choice into the job file.")] = False,
    svg: SvgOption = None,
    png: PngOption = None,
    html: HtmlOption = None,
    with_levers: Annotated[
        bool, typer.Option("--levers/--no-levers", help="Also say what one thing changed would bring.")
    ] = True,
    profile: ProfileOption = True,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose how to run a job, and say what it will take: time, memory, bytes and dollars.

    No training is started, and neither torch nor an accelerator is needed. Where all clouds are on this
    machine and have no profile, they are measured for a few seconds.
    """
    from rich.console import Console

    from isthmus.cli.measuring import cost_source, learn_for_plan
    from isthmus.cli.plan_tables import plan_advice, why_not_planned_run
    from isthmus.job import load_job, update_job_sections
    from isthmus.plan.following import planned_changes
    from isthmus.plan.levers import levers
    from isthmus.plan.planner import plan as make_plan

    loaded = load_job(job, overrides=overrides or ())
    if write:
        _check_overrides(overrides or (), job)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("planning") as status:
        known = learn_for_plan(
            loaded,
            is_wanted=profile,
            note=notes.print,
            report=lambda what: status.update(f"measuring {what}"),
        )
        source = cost_source()
        chosen = make_plan(known, progress=status.update, source=source)
        found = levers(known, chosen, progress=status.update, source=source) if with_levers else ()
    if as_json:
        typer.echo(json.dumps(_facts(chosen, found), indent=2))
    else:
        _show(Console(highlight=False), chosen, found, advice=plan_advice(loaded, chosen, job))
    _draw(notes, Pictures(svg=svg, png=png, html=html), loaded, chosen, found)
    if write:
        changes = planned_changes(loaded, chosen)
        update_job_sections(job, changes.sections, clouds=changes.clouds)
        notes.print(f"[green]✓[/] {job} now holds this choice")
        if why_not := why_not_planned_run(chosen):
            notes.print(f'[yellow]{why_not}: set strategy.kind to "pipeline" before a run[/]')
    elif not as_json:
        notes.print(f"[dim]next: isthmus plan {job} --write puts this choice into the job[/]")


def _check_overrides(overrides: Sequence[str], job: Path) -> None:
    """Refuse to write the plan of another job; what is written itself may be overridden."""
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if section != "strategy" or key not in _WRITTEN:
            raise UserError(
                f"--write would put the plan of a job changed by --set {text} into {job}",
                hint="put the change into the file first, or leave --set or --write out",
            )


def _facts(plan: "Plan", levers: "Sequence[Lever]") -> dict[str, Any]:
    from isthmus.plan.search.plan_file import plan_to_dict

    return {**plan_to_dict(plan), "levers": [asdict(lever) for lever in levers]}


def _show(console: "Console", plan: "Plan", levers: "Sequence[Lever]", *, advice: Iterator[str]) -> None:
    from isthmus.cli.plan_tables import plan_notes, plan_tables
    from isthmus.observe.gantt import draw_text

    console.print(f"[bold]{plan.reason}[/]", soft_wrap=True)
    for table in plan_tables(plan, levers):
        console.print()
        console.print(as_rich(table))
    for note in (*plan_notes(plan), *advice):
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    console.print()
    console.print(draw_text(_chart(plan), width=console.width))


def _chart(plan: "Plan") -> "Chart":
    """One step, or a sketch of a few where the form has no scheduler yet."""
    from isthmus.observe.timeline import chart_of_step, lay_out
    from isthmus.plan.replicated.sketch import sketch
    from isthmus.plan.simulated_pipeline import simulate_scenario

    if plan.scenario is not None:
        return chart_of_step(simulate_scenario(plan.scenario, num_steps=2))
    spans = sketch(plan)
    end_s = max(span.end_s for span in spans)
    return lay_out(spans, start_s=0.0, end_s=end_s, order=plan.clouds)


def _beginning(plan: "Plan") -> "Chart":
    """As much of a step as can be drawn box by box: until the slowest rank has done some micro-batches."""
    from isthmus.observe.timeline import lay_out, shifted
    from isthmus.plan.simulated_pipeline import simulate_scenario

    scenario = plan.scenario
    if scenario is None:
        return _chart(plan)
    timeline = simulate_scenario(scenario, num_steps=2)
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
    from isthmus.cli.plan_tables import plan_notes, plan_tables
    from isthmus.observe.drawing import draw_chart
    from isthmus.observe.page import Section

    title = f"{job.name}: {plan.what}"
    sections = [
        Section(heading="The plan", parts=(plan.reason, *plan_tables(plan, levers), *plan_notes(plan)))
    ]
    drawing = draw_chart(_beginning(plan), title=title)
    tell_written(notes, pictures.write(drawing, title=title, sections=sections))
