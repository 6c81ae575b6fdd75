"""`isthmus simulate`: the steps of a plan over time, and what faults would cost."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.options import JsonOption, ProfileOption, SetOption
from isthmus.cli.pictures import HtmlOption, Pictures, PngOption, SvgOption, tell_written
from isthmus.cli.tables import as_rich, duration
from isthmus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.observe.page import Table
    from isthmus.observe.timeline import Chart
    from isthmus.plan.scenario import Scenario
    from isthmus.plan.simulated_pipeline import Checkpointing
    from isthmus.plan.simulation.lines import Disturbance
    from isthmus.plan.simulation.timeline import SimulatedStep, Stopped, Timeline

# A step is shown when its time differs by this share from the one before.
_CHANGE = 0.02


def simulate(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file, or the plan.json of a plan.")],
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="How many steps.")] = 10,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Faults of links and clouds, by time.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jitter.")] = 0,
    svg: SvgOption = None,
    png: PngOption = None,
    html: HtmlOption = None,
    profile: ProfileOption = True,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the plan of a job on a virtual clock: no accelerator, no network, no money.

    The very scheduler of the workers decides what is computed and sent. Faults are those of `isthmus run
    --faults`, and clouds that are slow or gone.
    """
    from rich.console import Console

    from isthmus.observe.drawing import draw_chart
    from isthmus.observe.page import Section
    from isthmus.plan.simulated_pipeline import simulate_scenario

    scenario, checkpoint = _scenario(job, overrides or (), is_profiled=profile)
    script = _script(faults, scenario)
    found = simulate_scenario(scenario, num_steps=steps, seed=seed, faults=script, checkpoint=checkpoint)
    costs = _costs(scenario, steps, seed, script)
    console = Console(highlight=False, stderr=as_json)
    if as_json:
        typer.echo(json.dumps(_facts(found, script, costs), indent=2))
    else:
        _show(console, scenario, found, script, costs)
    chart = _chart(found, script)
    tables = [_steps_table(scenario, found), _traffic_table(found)]
    sections = [Section(heading="Steps and traffic", parts=tuple(tables))]
    pictures = Pictures(svg=svg, png=png, html=html)
    title = f"{job.stem}, simulated"
    tell_written(console, pictures.write(draw_chart(chart, title=title), title=title, sections=sections))


def _scenario(
    path: Path, overrides: Sequence[str], *, is_profiled: bool
) -> "tuple[Scenario, Checkpointing | None]":
    if path.suffix == ".json":
        return _scenario_of_plan(path, overrides), None
    from rich.console import Console

    from isthmus.cli.measuring import cost_source, learn_for_plan
    from isthmus.job import load_job
    from isthmus.plan.planner import plan
    from isthmus.plan.simulated_pipeline import Checkpointing

    job = load_job(path, overrides=overrides)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("planning") as status:
        report = status.update
        known = learn_for_plan(job, is_wanted=is_profiled, note=notes.print, report=report)
    scenario = plan(known, source=cost_source()).scenario
    if scenario is None:
        raise UserError(
            "the best plan is no pipeline, and only pipelines can be simulated so far",
            hint='set strategy.kind to "pipeline"',
        )
    return scenario, Checkpointing(every_s=job.checkpoint.every_s, stage_bytes=(0,) * scenario.num_stages)


def _scenario_of_plan(path: Path, overrides: Sequence[str]) -> "Scenario":
    from isthmus.job.load import read_job_text
    from isthmus.plan.search.plan_file import scenario_of

    if overrides:
        raise UserError("--set changes a job, not a plan that is made", hint="give the job file instead")
    scenario = scenario_of(read_job_text(path))
    if scenario is None:
        raise UserError(f"the plan of {path} is no pipeline", hint="only pipelines can be simulated so far")
    return scenario


def _script(path: Path | None, scenario: "Scenario") -> "tuple[Disturbance, ...]":
    from itertools import pairwise

    from isthmus.plan.faults import load_script

    if path is None:
        return ()
    clouds = [stage.cloud for stage in scenario.stages]
    return load_script(path, links=list(pairwise(clouds)), clouds=clouds)


def _costs(
    scenario: "Scenario", num_steps: int, seed: int, script: "Sequence[Disturbance]"
) -> "list[float | None]":
    """By how much each fault alone puts off the end of the run; None where it ends it."""
    from isthmus.plan.simulated_pipeline import simulate_scenario

    if not script:
        return []
    plain_s = simulate_scenario(scenario, num_steps=num_steps, seed=seed).steps[-1].end_s
    alone = (simulate_scenario(scenario, num_steps=num_steps, seed=seed, faults=[one]) for one in script)
    return [None if one.stopped else one.steps[-1].end_s - plain_s for one in alone]


def _chart(found: "Timeline", script: "Sequence[Disturbance]") -> "Chart":
    """The step that the first fault falls into, else one as most are."""
    from isthmus.observe.timeline import chart_of_step, clouds_in_order, lay_out, shifted

    hit = [step for step in found.steps if script and step.start_s <= script[0].at_s < step.end_s]
    if not hit:
        return chart_of_step(found)
    spans = shifted(found.spans, -hit[0].start_s)
    order = clouds_in_order(found.spans)
    return lay_out(spans, start_s=0.0, end_s=hit[0].duration_s, order=order)


def _show(
    console: "Console",
    scenario: "Scenario",
    found: "Timeline",
    script: "Sequence[Disturbance]",
    costs: "Sequence[float | None]",
) -> None:
    from isthmus.observe.gantt import draw_text

    console.print(draw_text(_chart(found, script), width=console.width))
    for table in (_steps_table(scenario, found), _traffic_table(found), _faults_table(script, costs)):
        if table.rows:
            console.print()
            console.print(as_rich(table))
    if found.stopped is not None:
        console.print(f"\n[bold red]{_loss(found)}[/]")


def _steps_table(scenario: "Scenario", found: "Timeline") -> "Table":
    from isthmus.observe.page import Table

    clouds = [stage.cloud for stage in scenario.stages]
    header = ("step", "from", "takes", *(f"bubble of {cloud}" for cloud in clouds), "in flight")
    return Table(header=header, rows=tuple(_step_row(step) for step in _worth_showing(found.steps)))


def _worth_showing(steps: "Sequence[SimulatedStep]") -> "Iterator[SimulatedStep]":
    """The first, the last, and every one that takes another time than the one before."""
    for place, step in enumerate(steps):
        before_s = steps[place - 1].duration_s if place else 0.0
        is_edge = place in (0, len(steps) - 1)
        if is_edge or abs(step.duration_s - before_s) > _CHANGE * before_s:
            yield step


def _step_row(step: "SimulatedStep") -> tuple[str, ...]:
    return (
        str(step.step + 1),
        duration(step.start_s),
        duration(step.duration_s),
        *(f"{bubble:.1%}" for bubble in step.bubbles),
        " ".join(map(str, step.windows)),
    )


def _traffic_table(found: "Timeline") -> "Table":
    from isthmus.observe.page import Table
    from isthmus.units import format_bytes

    rows = [
        (
            "-".join(one.between),
            *(format_bytes(size) for size in (one.down_bytes, one.up_bytes, one.checkpoint_bytes)),
        )
        for one in found.traffic
    ]
    return Table(header=("line", "down in all", "up in all", "copies of checkpoints"), rows=tuple(rows))


def _faults_table(script: "Sequence[Disturbance]", costs: "Sequence[float | None]") -> "Table":
    from isthmus.observe.page import Table

    rows = [
        (_what(fault), duration(fault.at_s), _cost(fault, cost_s))
        for fault, cost_s in zip(script, costs, strict=True)
    ]
    return Table(header=("fault", "at", "costs, alone"), rows=tuple(rows))


def _cost(fault: "Disturbance", cost_s: float | None) -> str:
    from isthmus.plan.faults import FaultKind

    if fault.kind is FaultKind.CORRUPT:
        return "not simulated"
    return "ends the run" if cost_s is None else duration(cost_s)


def _what(fault: "Disturbance") -> str:
    from isthmus.plan.faults import CloudFault

    where = fault.cloud if isinstance(fault, CloudFault) else "-".join(fault.between)
    lasts = f" for {duration(fault.duration_s)}" if fault.duration_s else ""
    by = f", {fault.factor:g} times" if fault.factor != 1 else ""
    return f"{where} {fault.kind.value}{lasts}{by}"


def _loss(found: "Timeline") -> str:
    if found.stopped is None:
        return ""
    stopped = found.stopped
    return (
        f"cloud {stopped.cloud} is gone at {duration(stopped.at_s)}, in step {stopped.step + 1}: "
        f"the run ends; what was saved goes back to step {stopped.safe_step}, "
        f"{duration(stopped.lost_s)} of work are lost"
    )


def _facts(
    found: "Timeline", script: "Sequence[Disturbance]", costs: "Sequence[float | None]"
) -> dict[str, Any]:
    has_steps = bool(found.steps)
    return {
        "step_s": found.step_s if has_steps else None,
        "bubble": found.bubble if has_steps else None,
        "steps": [
            {**_counted(step), "duration_s": step.duration_s, "bubbles": step.bubbles} for step in found.steps
        ],
        "traffic": [asdict(one) for one in found.traffic],
        "faults": [
            {"what": _what(fault), "at_s": fault.at_s, "cost_s": cost_s, "ends_the_run": cost_s is None}
            for fault, cost_s in zip(script, costs, strict=True)
        ],
        "stopped": None if found.stopped is None else _counted(found.stopped),
    }


def _counted(one: "SimulatedStep | Stopped") -> dict[str, Any]:
    """Its fields, with the step counted from 1 as in the tables."""
    return {**asdict(one), "step": one.step + 1}
