"""The grammar of codecs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job import CodecSpec, CodecStep, parse_codec
from isthmus.job.findings import FieldError
from tests.job.strategies import codec_specs


@settings(deadline=None)
@given(codec_specs)
def test_text_round_trips(spec: CodecSpec) -> None:
    assert parse_codec(str(spec)) == spec


@settings(deadline=None)
@given(codec_specs)
def test_space_between_tokens_means_nothing(spec: CodecSpec) -> None:
    text = str(spec)
    for mark in "|(),=":
        text = text.replace(mark, f"  {mark} ")
    assert parse_codec(f" {text} ") == spec


@settings(deadline=None)
@given(st.text(alphabet="rawsvd0.6 |(),=e-", max_size=20))
def test_any_text_is_a_codec_or_a_field_error(text: str) -> None:
    try:
        spec = parse_codec(text)
    except FieldError:
        return
    assert parse_codec(str(spec)) == spec


def test_parts() -> None:
    assert parse_codec("svd(0.6) | int4(stochastic, group=64)") == CodecSpec(
        steps=(
            CodecStep(name="svd", arguments=(0.6,)),
            CodecStep(name="int4", arguments=("stochastic",), options=(("group", 64),)),
        )
    )


def test_a_whole_number_stays_whole() -> None:
    (step,) = parse_codec("subspace(64)").steps
    assert isinstance(step.arguments[0], int)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected the name of a codec at column 1 of ''"),
        ("fp16 |", "expected the name of a codec at column 7 of 'fp16 |'"),
        ("fp16 fp16", "expected '|' or the end at column 6 of 'fp16 fp16'"),
        ("svd()", "expected a number or a word at column 5 of 'svd()'"),
        ("svd(0.6", "expected ',' or ')' at column 8 of 'svd(0.6'"),
        ("svd(-1)", "expected a number or a word at column 5 of 'svd(-1)'"),
        ("svd(1e999)", "expected a number that is not so large at column 5 of 'svd(1e999)'"),
        ("int4(group=)", "expected a number or a word at column 12 of 'int4(group=)'"),
        (
            "int4(group=8, group=9)",
            "expected an option not yet given at column 15 of 'int4(group=8, group=9)'",
        ),
        (
            "int4(group=8, 9)",
            "expected an option, since arguments go before options at column 15 of 'int4(group=8, 9)'",
        ),
        ("fp16 | topc", "unknown codec 'topc' at column 8 of 'fp16 | topc'"),
    ],
)
def test_errors_say_where(text: str, what: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_codec(text)
    assert caught.value.what == what
