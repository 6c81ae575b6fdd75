"""`isthmus schema`."""

import json

import pytest

from isthmus.cli.main import schema
from isthmus.job import job_schema


def test_prints_the_schema_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    schema()
    assert json.loads(capsys.readouterr().out) == job_schema()
