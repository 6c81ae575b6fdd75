from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stages.loop import Scale, StageLoop
from stages.plain import PlainLoop
from torch._dynamo.utils import counters

from isthmus.job.codec import parse_codec
from isthmus.plan.ladder import Pair
from isthmus.train.device import Device

# Torch's compiler raises, and means to hide, warnings of its own.
pytestmark = pytest.mark.filterwarnings("default")

SCALE = Scale(width=64, num_layers=3, vocabulary_size=128, num_sequences=2, length=16, num_microbatches=2)
CODEC = parse_codec("rotate | int4")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ids() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, SCALE.vocabulary_size, (2, 16), generator=generator) for _ in range(2)]


def num_graphs() -> Any:
    return counters["stats"]["unique_graphs"]


def test_the_stage_compiles_one_layer_for_all(ids: list[torch.Tensor]) -> None:
    loop = StageLoop(SCALE, Device("cpu"), Pair(forward=CODEC, backward=CODEC), ids, is_sharded=False)
    loop.stage.compile_layers(backend="eager")
    loop.device.begin()
    loop.run(2)
    loop.close()
    assert num_graphs() == 1
    assert [span.kind for span in loop.watcher.spans].count("forward") == 4
    assert {piece.kind for piece in loop.device.pieces()} == {"codec", "decode"}


def test_the_plain_loop_compiles_one_layer_for_all(ids: list[torch.Tensor]) -> None:
    loop = PlainLoop(SCALE.config(SCALE.num_layers), torch.device("cpu"), is_sharded=False)
    loop.compile(backend="eager")
    for _ in range(2):
        loop.step(ids, torch.ones(2, 16, 64))
    assert num_graphs() == 1
