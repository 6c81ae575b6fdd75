"""The text of a boundary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import FieldError
from isthmus.job.codec import (
    BottleneckSpec,
    BoundarySpec,
    HiddenSpec,
    Init,
    MemorySpec,
    parse_boundary,
)
from isthmus.job.codec_steps import Anchor

bottlenecks = st.builds(
    BottleneckSpec,
    rank=st.integers(1, 4096),
    init=st.sampled_from(Init),
    anchor=st.sampled_from(Anchor),
    num_warmup_steps=st.integers(1, 10_000),
).filter(lambda spec: (spec.init, spec.anchor) != (Init.FFN_SVD, Anchor.TOKENS))


@settings(deadline=None)
@given(st.just(HiddenSpec()) | st.just(MemorySpec()) | bottlenecks)
def test_text_round_trips(spec: BoundarySpec) -> None:
    assert parse_boundary(str(spec)) == spec


@settings(deadline=None)
@given(st.text(alphabet="bottleneck(64, init=pca)hidden", max_size=24))
def test_any_text_is_a_boundary_or_a_field_error(text: str) -> None:
    try:
        spec = parse_boundary(text)
    except FieldError:
        return
    assert parse_boundary(str(spec)) == spec


def test_options_have_defaults_and_any_order() -> None:
    assert parse_boundary("bottleneck(64)") == BottleneckSpec(rank=64)
    assert parse_boundary(" bottleneck ( 8,warmup = 5 , anchor=none) ") == BottleneckSpec(
        rank=8, anchor=Anchor.NONE, num_warmup_steps=5
    )


def test_what_crosses_is_as_wide_as_the_hidden_states_or_the_rank() -> None:
    assert parse_boundary("hidden").crossing_width(768) == 768
    assert parse_boundary("bottleneck(64)").crossing_width(768) == 64


def test_a_comparison_needs_no_warmup() -> None:
    spec = parse_boundary("bottleneck(8, init=random, anchor=none, warmup=0)")
    assert spec == BottleneckSpec(rank=8, init=Init.RANDOM, anchor=Anchor.NONE, num_warmup_steps=0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hidden | bottleneck(8)",
        "hiden",
        "hidden(8)",
        "bottleneck",
        "bottleneck(x)",
        "bottleneck(8, 9)",
        "bottleneck(8, warmups=3)",
        "bottleneck(8, init=pca, init=pca)",
        "bottleneck(8, init=svd)",
        "bottleneck(8, anchor=id)",
        "bottleneck(8, warmup=soon)",
        "bottleneck(8, warmup=0)",
        "bottleneck(8, init=random, warmup=0)",
    ],
)
def test_nonsense_is_refused_with_a_cure(text: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_boundary(text)
    assert caught.value.what
    assert caught.value.cure
