"""`isthmus plan`: predict what a job will take, before anything is paid."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

from rich.console import Console
from typer import Option

import isthmus
from isthmus.cli import output
from isthmus.cli.output import duration, percent, size, tabulate
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.load import update_job_file
from isthmus.observe.draw import Table, draw_chart, draw_text, paragraph
from isthmus.observe.timeline import Chart, chart_of_step, lay_out
from isthmus.plan.job_facts import run_order
from isthmus.plan.plan import Plan, PlannedStage, plan_to_dict, planned_changes
from isthmus.plan.simulated import simulate_scenario

# Boxes with their numbers in a picture, for each rank.
_NUM_DRAWN: Final = 12


def plan(
    job: output.JobArgument,
    write: Annotated[bool, Option("--write", help="Write the choice into the job file.")] = False,
    svg: output.SvgOption = None,
    html: output.HtmlOption = None,
    profile: output.ProfileOption = True,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Choose how to run a job, and predict its time, memory, bytes and dollars.

    This starts no training, and needs neither torch nor an accelerator. Where all clouds are on this machine
    and have no profile, they are measured for a few seconds.

    Example: `isthmus plan job.toml --set link.0.bandwidth="100 Mbps"`
    """
    output.check_folders(svg, html)
    loaded = isthmus.load_job(job, overrides=overrides or ())
    if write:
        _check_overrides(overrides or (), job)
    notes = output.console_for_notes()
    chosen = output.make_plan(loaded, notes, is_profiled=profile)
    tables, remarks = list(plan_tables(chosen)), list(plan_notes(chosen))
    if as_json:
        output.print_json(plan_to_dict(chosen))
    else:
        _show(Console(highlight=False), chosen, tables, [*remarks, *plan_advice(loaded, chosen, job)])
    if svg or html:
        title = f"{loaded.name}: {chosen.what}"
        drawing = draw_chart(_chart(chosen, _NUM_DRAWN * chosen.stages[0].num_ranks), title=title)
        shown = [table.to_html() for table in tables]
        about = [paragraph(chosen.reason), *shown, *map(paragraph, remarks)]
        output.write_pictures(notes, drawing, title=title, about=about, svg=svg, html=html)
    if write:
        update_job_file(job, planned_changes(loaded, chosen))
        notes.print(f"[green]✓[/] {job} now holds this choice")
    elif not as_json:
        notes.print(f"[dim]next: isthmus plan {job} --write puts this choice into the job[/]")


def _check_overrides(overrides: Sequence[str], job: Path) -> None:
    """Refuse to write the plan of another job; what is written itself may be overridden."""
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if section != "strategy" or key in ("windows", "generator"):
            raise UserError(
                f"--write would put the plan of a job changed by --set {text} into {job}",
                hint="put the change into the file first, or leave --set or --write out",
            )


def _show(console: Console, plan: Plan, tables: Sequence[Table], remarks: Sequence[str]) -> None:
    console.print(f"[bold]{plan.reason}[/]\n", soft_wrap=True)
    output.print_tables(console, tables)
    for remark in remarks:
        console.print(f"[dim]{remark}[/]", soft_wrap=True)
    console.print()
    console.print(draw_text(_chart(plan), width=console.width))


def _chart(plan: Plan, num_microbatches: int | None = None) -> Chart:
    """Return the chart of a step, of its beginning, or of some steps where clouds hold whole models."""
    if plan.scenario is not None:
        timeline = simulate_scenario(plan.scenario, num_steps=2)
        return chart_of_step(timeline, num_microbatches=num_microbatches)
    return lay_out(plan.spans, start_s=0.0, end_s=max(span.end_s for span in plan.spans), order=plan.clouds)


def plan_tables(plan: Plan) -> Iterator[Table]:
    rows = list(enumerate((plan, *plan.runners_up), 1))
    yield tabulate(
        rows,
        {
            "plan": lambda row: f"{row[0]} {'; '.join((row[1].what, *row[1].memory_words))}",
            "why it was taken or not": lambda row: "taken" if row[1] is plan else row[1].reason,
        },
    )
    yield _figures_table(rows)
    yield _stages_table(plan)
    yield _links_table(plan)


def _figures_table(rows: Sequence[tuple[int, Plan]]) -> Table:
    return tabulate(
        rows,
        {
            "plan": lambda row: str(row[0]),
            "step": lambda row: duration(row[1].estimate.step_s),
            "tokens/s": lambda row: f"{row[1].estimate.tokens_per_s:,.0f}",
            "bubble": lambda row: percent(row[1].estimate.bubble),
            "memory": lambda row: percent(row[1].memory_share),
            "WAN/step": lambda row: size(row[1].estimate.wan_bytes),
            "$/step": lambda row: _usd(row[1].estimate.usd_per_step),
            "$/Mtoken": lambda row: _usd(row[1].estimate.usd_per_million_tokens),
            "limited by the": lambda row: row[1].estimate.limiting,
        },
    )


def _stages_table(plan: Plan) -> Table:
    def largest(stage: PlannedStage) -> str:
        parts = sorted(stage.memory.items(), key=lambda item: -item[1])[:2]
        return ", ".join(f"{name} {size(number)}" for name, number in parts)

    return tabulate(
        plan.stages,
        {
            "cloud": lambda stage: stage.cloud,
            "holds": lambda stage: stage.holds,
            "ranks": lambda stage: str(stage.num_ranks),
            "busy": lambda stage: percent(stage.busy_s / plan.estimate.step_s),
            "in flight": lambda stage: str(stage.window),
            "memory of a rank": lambda stage: size(stage.memory_bytes),
            "of": lambda stage: "–" if stage.capacity_bytes is None else size(stage.capacity_bytes),
            "most of it": largest,
        },
    )


def _links_table(plan: Plan) -> Table:
    return tabulate(
        plan.links,
        {
            "link": lambda link: "–".join(link.between),
            "there in a step": lambda link: size(link.down_bytes),
            "back": lambda link: size(link.up_bytes),
            "codec there": lambda link: link.forward_codec,
            "codec back": lambda link: link.backward_codec,
            "$/step": lambda link: _usd(
                (link.down_bytes + link.up_bytes) / 2**30 * (link.usd_per_gib or 0.0)
            ),
        },
    )


def plan_notes(plan: Plan) -> Iterator[str]:
    """Yield remarks for below the tables, one line each."""
    estimate = plan.estimate
    usd = estimate.total_usd
    price = "" if usd is None else f" and ${usd:,.2f}" if usd >= 1 else f" and ${usd:.2g}"
    yield f"{estimate.num_steps} steps take {duration(estimate.total_s)}{price}"
    if estimate.reliefs:
        gains = (f"{what} {share:.0%}" for what, share in estimate.reliefs.items())
        yield f"a step would be shorter if one resource were unlimited: {', '.join(gains)}"
    if plan.memory_words:
        yield f"memory options: {', '.join(plan.memory_words)}{_where(plan)}"
    yield from (f"{'-'.join(link.between)}: {link.reason}" for link in plan.links if link.reason)
    yield from plan.notes
    for cloud in dict.fromkeys(stage.cloud for stage in plan.stages if stage.usd_per_hour is None):
        yield f"the price of cloud {cloud} is not known: set cloud.{cloud}.usd_per_hour"
    yield f"{plan.num_tried} {'plan' if plan.num_tried == 1 else 'plans'} compared"


def plan_advice(job: Job, plan: Plan, path: Path) -> Iterator[str]:
    """Yield what to do before a run: leave out idle clouds, and measure those that compute."""
    idle = [cloud.name for cloud in job.cloud if cloud.name not in plan.clouds]
    if idle:
        yield f"a run uses every cloud of its job: to run this plan, leave {' and '.join(idle)} out"
    elif plan.scenario is not None and plan.clouds != run_order(job.used()):
        yield f"a run takes the clouds as listed: isthmus plan {path} --write puts this order into the job"
    guessed = [stage.cloud for stage in plan.stages if not stage.is_measured]
    if guessed:
        yield (
            f"the speed of {' and of '.join(guessed)} is of the catalogue; better is a measured one, from a "
            f"device there: isthmus profile {path} --cloud {guessed[0]}"
        )


def _where(plan: Plan) -> str:
    """Names the clouds that shard their stages, unless all do."""
    sharded = [stage.cloud for stage in plan.stages if stage.sharding.value != "none"]
    return f" (sharding at {', '.join(sharded)})" if 0 < len(sharded) < len(plan.stages) else ""


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
