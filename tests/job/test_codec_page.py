"""The page about codecs says what is true."""

import re
from pathlib import Path

import pytest

from isthmus.job import parse_codec
from isthmus.job.codec import CODEC_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
ROW = re.compile(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
ROWS = [(text.replace("\\|", "|"), *map(float, figures)) for text, *figures in ROW.findall(PAGE)]


@pytest.mark.parametrize(("text", "bits", "to_float32", "to_bf16"), ROWS)
def test_figures(text: str, bits: float, to_float32: float, to_bf16: float) -> None:
    exact = parse_codec(text).bits_per_element(256, 768)
    assert bits == round(exact, 2)
    assert to_float32 == round(32 / exact, 1)
    assert to_bf16 == round(16 / exact, 1)


def test_every_step_is_there() -> None:
    assert len(ROWS) > 10
    assert [name for name in CODEC_NAMES if f"`{name}" not in PAGE] == []
