"""`isthmus checkpoints` and `isthmus export`: what a run has saved, and the model in it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from isthmus.cli import output
from isthmus.cli.output import JsonOption, print_json, print_tables, size, tabulate
from isthmus.observe.report import find_run


def checkpoints(
    run: output.RunArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare the digests.")
    ] = False,
    prune: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Verify, keep the newest N that restore the run, remove others."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List, verify or prune the checkpoints of a run.

    The list has steps, clouds and sizes, and says of each step whether it restores the run, or why not.

    Example: `isthmus checkpoints runs/demo --verify`
    """
    folder = find_run(run)
    # These import torch, and mistakes in options are told without it.
    from isthmus.job.rundir import lock_run
    from isthmus.train.checkpoint import prune_steps, saved_steps

    console = Console(highlight=False, stderr=as_json)
    removed = []
    if prune is not None:
        with lock_run(folder, note=console.print):
            removed = list(prune_steps(folder, keep=prune))
    steps = saved_steps(folder, verify=verify or prune is not None)
    if as_json:
        print_json(
            {
                "run": folder,
                "checkpoints": [asdict(one) for one in steps],
                "removed": [one.step for one in removed],
            }
        )
    else:
        table = tabulate(
            steps,
            {
                "step": lambda one: str(one.step),
                "clouds": lambda one: ", ".join(one.clouds),
                "size": lambda one: size(one.num_bytes),
                "restores the run": lambda one: "yes" if one.problem is None else f"no: {one.problem}",
            },
        )
        print_tables(console, [table])
        for one in removed:
            console.print(f"removed step {one.step}, {size(one.num_bytes)}")
        if not steps:
            console.print(f"{folder} has no checkpoints")
    if steps and all(one.problem for one in steps):
        raise typer.Exit(1)


def export(
    run: output.RunArgument,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The step; the newest unless given.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; as saved unless given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder; RUN/export-N unless given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export the model of a checkpoint, also before the run has ended.

    The result is a folder that `from_pretrained` loads. The records of all stages must be here. Where each
    cloud trains a model of its own, DIR gets a folder for each.

    Example: `isthmus export runs/demo --dtype bfloat16`
    """
    folder = find_run(run)
    import torch

    from isthmus.train.export import export_run, steps_to_export

    steps = steps_to_export(folder, wanted=step)
    chosen = next(iter(steps.values()))
    target = out or folder / f"export-{chosen}"
    of = None if dtype is None else getattr(torch, dtype)
    export_run(folder, target, steps=steps, dtype=of, note=output.console_for_notes().print)
    if as_json:
        print_json({"run": folder, "step": chosen, "model": target})
    else:
        Console(highlight=False, soft_wrap=True).print(
            f"[green]✓[/] wrote the model of step {chosen} to {target}"
        )
