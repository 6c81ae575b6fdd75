"""The grammar of codecs."""

import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.errors import FieldError
from isthmus.job import CodecSpec, LinkSpec, parse_codec
from isthmus.job.codec import gradient_codec
from isthmus.job.codec_steps import Anchor, Integers, Rotate, Subspace, Svd
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
    assert parse_codec("svd(0.6) | int4(stochastic, group=32)") == CodecSpec(
        steps=(Svd(ratio=0.6), Integers(bits=4, group=32, is_stochastic=True))
    )
    assert parse_codec("subspace(64, anchor=tokens, every=9) | rotate | int8(scale=tensor)") == CodecSpec(
        steps=(Subspace(rank=64, anchor=Anchor.TOKENS, every=9), Rotate(), Integers(bits=8, group=None))
    )


def test_defaults_are_not_written() -> None:
    assert str(parse_codec("subspace(8, anchor=none, every=100) | int4(group=64)")) == "subspace(8) | int4"
    assert str(parse_codec("svd(1)")) == "svd(1.0)"


@pytest.mark.parametrize("text", ["int8(group={})", "topk({})", "subspace({}) | int4", "int8({})"])
def test_a_number_of_any_length_is_read_or_refused(text: str) -> None:
    for digits in ("9" * 5000, "0" * 5000, f"{'9' * 5000}.5", f"1e{'9' * 5000}"):
        with pytest.raises(FieldError):
            parse_codec(text.format(digits))


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("subspace(8, anchor=token)", "did you mean 'tokens'?"),
        ("int4(grup=64)", "did you mean 'group'?"),
        ("topk(2)", "docs/codecs.md shows what topk takes"),
    ],
)
def test_cures(text: str, cure: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_codec(text)
    assert caught.value.cure == cure


STEPS = (
    *("raw", "fp16", "int8", "int4(stochastic)", "int2", "center", "rotate"),
    *("topk(0.1)", "svd(0.5)", "subspace(8)", "feedback(0.9)"),
)
MISWRITTEN = (
    *("", "fp16 |", "svd", "topk(2)", "svd(0)", "feedback", "feedback(2)", "feedback(0.9) | raw"),
    *("subspace", "subspace(0)", "subspace(8, anchor=foo)", "subspace(8, every=0)"),
    *("svd(0.5, rank=3)", "rotate(4) | int4", "center(1)", "rotate(by=4) | int4", "fp16(fast=1)"),
    *("int2(stochastic)", "int2(4)", "int8(64)", "int8(group=7)", "int4(scale=row)"),
    *("int4(group=64, scale=tensor)", "Auto", "none", "rotate | int8 | center | int4"),
    *("subspace(8) | topk(0.1) | svd(0.5) | int4", "svd(0.5) | topk(2)", "fp16 fp16", "svd()"),
    *("svd(0.6", "svd(-1)", "svd(1e999)", "int8(group=1234567890)", "int4(group=)"),
    *("int4(group=8, group=9)", "int4(group=8, 9)", "fp16 | topc", "int4 | svd(0.5)", "fp16 | int8"),
    *("raw | raw", "topk(0.5) | topk(0.5) | int8", "topk(0.1) | feedback(0.9)"),
    *("topk(0.1) | subspace(8)", "subspace(8) | svd(0.5)", "subspace(8) | subspace(4)"),
    *("subspace(4) | center | int4", "center | subspace(4)", "topk(0.1) | center | int8"),
    *("feedback(0.9) | subspace(8) | int4", "rotate | fp16", "topk(some)", "topk(0)", "svd(1.5)"),
    *("int2(64)", "int8(group=4)", "int8(group=64.5)", "subspace(0.5)", "subspace(8, anchor=ids)"),
    *("feedback(2) | int4",),
)
Choice = str | dict[str, str]


def refusal(codec: Choice) -> FieldError | None:
    """What a link says to a codec that it cannot have."""
    try:
        LinkSpec.model_validate({"between": ["east", "west"], "codec": codec})
    except ValidationError as error:
        found = error.errors()[0]["ctx"]["error"]
        assert isinstance(found, FieldError)
        return found
    return None


def offered(cure: str, codec: Choice) -> list[Choice]:
    """The codecs that a cure spells out, in the place of what was refused."""
    if "codec = {" in cure:
        table: dict[str, str] = tomllib.loads(cure[cure.index("codec = {") :])["codec"]
        return [table]
    texts = re.findall(r'"([^"]*)"', cure)
    if 'backward = "' in cure:
        return [{"backward": text} for text in texts]
    if isinstance(codec, str):
        return list(texts)
    side = "forward" if 'forward = "' in cure else "backward"
    return [{**codec, side: text} for text in texts]


def check_cure(codec: Choice) -> None:
    found = refusal(codec)
    if found is None:
        return
    assert found.cure, codec
    for choice in offered(found.cure, codec):
        assert refusal(choice) is None, (codec, found.cure)


@pytest.mark.parametrize("first", STEPS)
def test_no_cure_is_refused_in_turn(first: str) -> None:
    for second in STEPS:
        check_cure(f"{first} | {second}")
        for third in STEPS:
            check_cure(f"{first} | {second} | {third}")


@pytest.mark.parametrize("text", MISWRITTEN)
def test_a_miswritten_codec_is_refused_with_a_cure_that_is_not(text: str) -> None:
    found = refusal(text)
    assert found is not None
    assert found.what
    check_cure(text)


def test_no_cure_of_two_codecs_is_refused_in_turn() -> None:
    alone = [f"{one}{more}" for one in STEPS for more in ("", " | int4")]
    both = [
        text for text in alone if refusal({"forward": text}) is None or refusal({"backward": text}) is None
    ]
    both += ["subspace(4) | int4", "feedback(0.5) | center | topk(0.1) | int8", "auto"]
    for forward in both:
        for backward in both:
            check_cure({"forward": forward, "backward": backward})


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("raw", 32),
        ("fp16", 16),
        ("bf16", 16),
        ("int8", 8.25),
        ("rotate | int8", 8.25),
        ("rotate | int4", 4.25),
        ("center | rotate | int4", 4.3125),
        ("rotate | int4(group=128)", 4.125),
        ("int2", 2.25),
        ("topk(0.1) | int8", 1.84375),
        ("svd(0.6) | fp16", 16 * 115 / 192),
    ],
)
def test_bits_per_element(text: str, bits: float) -> None:
    assert parse_codec(text).bits_per_element(256, 768) == bits


def test_one_scale_per_tensor_is_four_bytes() -> None:
    assert parse_codec("int8(scale=tensor)").part_bytes(256, 768) == (4, 256 * 768)


def test_no_rows_take_no_bytes() -> None:
    for text in ("raw", "int8(scale=tensor)", "rotate | int4", "topk(0.1) | svd(0.5) | int2"):
        assert parse_codec(text).wire_bytes(0, 768) == 0


def test_raw_elements_are_as_large_as_they_are() -> None:
    assert parse_codec("raw").wire_bytes(3, 5, element_bytes=2) == 30
    assert parse_codec("svd(0.5)").wire_bytes(3, 5, element_bytes=2) == parse_codec("svd(0.5)").wire_bytes(
        3, 5
    )


def test_factors_are_sent_only_where_they_are_smaller() -> None:
    assert parse_codec("svd(0.5) | fp16").part_bytes(100, 100) == (25 * 100 * 2, 25 * 100 * 2)
    assert parse_codec("svd(1) | fp16").part_bytes(100, 100) == (100 * 100 * 2,)
    assert parse_codec("svd(0.5) | fp16").part_bytes(1, 100) == (200,)


def test_indices_or_bitmap_whichever_is_smaller() -> None:
    assert parse_codec("topk(0.01)").part_bytes(3, 1000) == (3 * 13, 3 * 10 * 4)  # 10 indices of 10 bits
    assert parse_codec("topk(0.5)").part_bytes(3, 1000) == (3 * 125, 3 * 500 * 4)


def gradient(forward: str, backward: str) -> str:
    return str(gradient_codec(parse_codec(forward), parse_codec(backward)))


def test_a_gradient_takes_what_its_activation_has_settled() -> None:
    assert gradient("int4", "rotate | int8") == "rotate | int8"
    assert gradient("topk(0.1) | int4", "topk(0.1) | int8") == "same-indices(0.1) | int8"
    assert gradient("topk(0.1) | int4", "topk(0.2) | int8") == "topk(0.2) | int8"
    assert gradient("svd(0.5) | topk(0.1)", "topk(0.1)") == "topk(0.1)"
    assert gradient("topk(0.1)", "feedback(0.9) | topk(0.1)") == "feedback(0.9) | same-indices(0.1)"
    assert gradient("center | topk(0.1)", "center | topk(0.1) | int8") == "center | same-indices(0.1) | int8"
    assert gradient("int8", "center | topk(0.1) | int8") == "center | topk(0.1) | int8"
    assert gradient("subspace(8) | int4", "int4(stochastic)") == "same-basis(8) | int4(stochastic)"
    assert gradient("subspace(8) | int4", "subspace(8) | rotate | int4") == "same-basis(8) | rotate | int4"


def test_sizes_of_gradients() -> None:
    topk = parse_codec("topk(0.1) | int8")
    assert gradient_codec(topk, topk).wire_bytes(256, 768) == topk.wire_bytes(256, 768) - 256 * 96
    subspace = parse_codec("subspace(64) | int4")
    assert gradient_codec(subspace, parse_codec("int4")).wire_bytes(10, 768) == 10 * (32 + 2)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("subspace(8)", "topk(0.1)"),
        ("subspace(8) | int4", "center | int4"),
        ("subspace(8)", "subspace(4)"),
        ("int4", "subspace(8)"),
    ],
)
def test_codecs_that_do_not_go_together(forward: str, backward: str) -> None:
    with pytest.raises(FieldError, match="activation") as caught:
        gradient(forward, backward)
    assert caught.value.cure
