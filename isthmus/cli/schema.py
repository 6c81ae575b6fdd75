"""`isthmus schema`: the JSON schema of a job file."""

import json

import typer


def schema() -> None:
    """Print the JSON schema of a job file, for editors that complete and check it."""
    from isthmus.job.schema import job_schema

    typer.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))
