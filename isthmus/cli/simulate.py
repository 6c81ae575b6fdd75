"""`isthmus simulate`: the steps of a plan over time, and what faults would cost."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from typer import Argument, Option

import isthmus
from isthmus.cli import output
from isthmus.cli.output import duration, tabulate
from isthmus.errors import UserError
from isthmus.job.faults import CloudFault, CloudFaultKind, FaultKind, load_faults
from isthmus.job.load import read_text
from isthmus.observe.draw import Table, draw_chart, draw_text
from isthmus.observe.timeline import chart_of_step
from isthmus.plan.lines import Disturbance
from isthmus.plan.plan import scenario_of
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulate import SimulatedStep, Stopped, Timeline
from isthmus.units import format_bytes

# A step is shown when its time differs by this share from the one before.
_CHANGE: Final = 0.02


def simulate(
    job: Annotated[Path, Argument(metavar="JOB", help="The job file, or the plan.json of a plan.")],
    steps: Annotated[int, Option(min=1, max=100_000, help="Number of steps.")] = 10,
    faults: Annotated[Path | None, Option(metavar="FILE", help="Play the faults of this file.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the jitter.")] = 0,
    svg: output.SvgOption = None,
    html: output.HtmlOption = None,
    profile: output.ProfileOption = True,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Simulate the steps of a job's plan, and what faults would cost.

    The schedulers of the workers run on a virtual clock, without accelerator and network. The file of faults
    is that of `isthmus run --faults`; it may also slow clouds down or lose them for good.

    Example: `isthmus simulate job.toml --steps 100 --faults faults.toml`
    """
    output.check_folders(svg, html)
    scenario, checkpoint_every_s = _scenario(job, overrides or (), is_profiled=profile)
    clouds = [stage.cloud for stage in scenario.stages]
    script: Sequence[Disturbance] = ()
    if faults is not None:
        ranks = {stage.cloud: stage.num_ranks for stage in scenario.stages}
        script = load_faults(faults, links=list(pairwise(clouds)), clouds=ranks, verb="simulate")
    found = isthmus.simulate(
        scenario, steps=steps, seed=seed, faults=script, checkpoint_every_s=checkpoint_every_s
    )
    costs = _costs(scenario, steps, seed, script)
    tables = [_steps_table(clouds, found), _traffic_table(found), _faults_table(script, costs)]
    console = Console(highlight=False, stderr=as_json)
    # The step that the first fault falls into, if there is one.
    chart = chart_of_step(found, at_s=script[0].at_s if script else None)
    if as_json:
        output.print_json(_facts(found, script, costs))
    else:
        console.print(draw_text(chart, width=console.width), end="\n\n")
        output.print_tables(console, tables)
        if found.stopped is not None:
            console.print(f"\n[bold red]{_loss(found.stopped)}[/]")
    title = f"{job.stem}, simulated"
    about = [table.to_html() for table in tables[:2]]
    output.write_pictures(
        console, draw_chart(chart, title=title), title=title, about=about, svg=svg, html=html
    )


def _scenario(path: Path, overrides: Sequence[str], *, is_profiled: bool) -> tuple[Scenario, float | None]:
    """Return the scenario to simulate, and the time between two checkpoints."""
    if path.suffix == ".json":
        if overrides:
            raise UserError("--set changes a job, not a plan that is made", hint="give the job file instead")
        scenario, checkpoint_every_s = scenario_of(read_text(path)), None
    else:
        job = isthmus.load_job(path, overrides=overrides)
        notes = output.console_for_notes()
        scenario = output.make_plan(job, notes, is_profiled=is_profiled, is_quick=True).scenario
        checkpoint_every_s = job.checkpoint.every_s
    if scenario is None:
        raise UserError(
            f"the plan of {path} is no pipeline, and only pipelines can be simulated so far",
            hint='set strategy.kind to "pipeline"',
        )
    return scenario, checkpoint_every_s


def _costs(
    scenario: Scenario, num_steps: int, seed: int, script: Sequence[Disturbance]
) -> list[float | None]:
    """Return by how much each fault alone delays the end of the run; None where it ends the run."""
    if not script:
        return []
    plain_s = isthmus.simulate(scenario, steps=num_steps, seed=seed).steps[-1].end_s
    alone = (isthmus.simulate(scenario, steps=num_steps, seed=seed, faults=[one]) for one in script)
    return [None if one.stopped else one.steps[-1].end_s - plain_s for one in alone]


def _steps_table(clouds: Sequence[str], found: Timeline) -> Table:
    rows = [
        (
            str(step.step + 1),
            duration(step.start_s),
            duration(step.duration_s),
            *(f"{bubble:.1%}" for bubble in step.bubbles),
            " ".join(map(str, step.windows)),
        )
        for step in _worth_showing(found.steps)
    ]
    header = ("step", "from", "takes", *(f"bubble of {cloud}" for cloud in clouds), "in flight")
    return Table(header=header, rows=tuple(rows))


def _worth_showing(steps: Sequence[SimulatedStep]) -> Iterator[SimulatedStep]:
    """Yield the first step, the last, and every one that takes another time than the one before."""
    for place, step in enumerate(steps):
        before_s = steps[place - 1].duration_s if place else 0.0
        is_edge = place in (0, len(steps) - 1)
        if is_edge or abs(step.duration_s - before_s) > _CHANGE * before_s:
            yield step


def _traffic_table(found: Timeline) -> Table:
    return tabulate(
        found.traffic,
        {
            "line": lambda one: "-".join(one.between),
            "down in all": lambda one: format_bytes(one.down_bytes),
            "up in all": lambda one: format_bytes(one.up_bytes),
            "copies of checkpoints": lambda one: format_bytes(one.checkpoint_bytes),
        },
    )


def _faults_table(script: Sequence[Disturbance], costs: Sequence[float | None]) -> Table:
    return tabulate(
        zip(script, costs, strict=True),
        {
            "fault": lambda row: _what(row[0]),
            "at": lambda row: duration(row[0].at_s),
            "costs, alone": lambda row: _cost(*row),
        },
    )


def _cost(fault: Disturbance, cost_s: float | None) -> str:
    if fault.kind in (FaultKind.CORRUPT, CloudFaultKind.FILL_DISK, CloudFaultKind.SPOIL):
        return "not simulated"
    return "stops the run until it returns" if cost_s is None else duration(cost_s)


def _what(fault: Disturbance) -> str:
    where = fault.cloud if isinstance(fault, CloudFault) else "-".join(fault.between)
    lasts = f" for {duration(fault.duration_s)}" if fault.duration_s else ""
    by = f", {fault.factor:g} times" if fault.factor != 1 else ""
    return f"{where} {fault.kind.value}{lasts}{by}"


def _loss(stopped: Stopped) -> str:
    return (
        f"cloud {stopped.cloud} is lost at {duration(stopped.at_s)}, in step {stopped.step + 1}: "
        f"the others wait for it; what was saved goes back to step {stopped.safe_step}, "
        f"{duration(stopped.lost_s)} of work are lost"
    )


def _facts(found: Timeline, script: Sequence[Disturbance], costs: Sequence[float | None]) -> dict[str, Any]:
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


def _counted(one: SimulatedStep | Stopped) -> dict[str, Any]:
    """Return the fields, with the step counted from 1 as in the tables."""
    return {**asdict(one), "step": one.step + 1}
