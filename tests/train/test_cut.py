"""What a peer or a checkpoint says of a cut's codecs."""

import pytest

from isthmus.errors import FrameError
from isthmus.job.codec import parse_codec
from isthmus.plan.ladder import Pair
from isthmus.train.crossing.cut import read_pair, texts_of


def test_a_pair_is_read_back() -> None:
    pair = Pair(forward=parse_codec("center | rotate | int4"), backward=parse_codec("rotate | int8"))
    assert read_pair(list(texts_of(pair))) == pair


@pytest.mark.parametrize(
    "texts",
    [
        None,
        ["raw"],
        ["raw", 1],
        ["raw", "none"],
        ["raw", "subspace(8)"],
        ["fp16 | int8", "raw"],
        [f"int8(group={'9' * 5000})", "raw"],
        [f"topk(1e{'9' * 5000})", "raw"],
        ["center | " * 5000 + "raw", "raw"],
        ["(" * 5000, "raw"],
        ["\ud800", "raw"],
    ],
)
def test_anything_else_is_no_valid_frame(texts: object) -> None:
    with pytest.raises(FrameError) as caught:
        read_pair(texts)
    assert len(caught.value.message) < 300
