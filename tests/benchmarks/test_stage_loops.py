from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from crossing import BEYOND, HERE
from stages.far_end import FarThread
from stages.far_process import FarProcess, Served
from stages.loop import Scale, StageLoop
from stages.plain import PlainLoop
from stages.watched import WatchedDevice
from torch._dynamo.utils import counters

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import RAW_PAIR, Pair
from isthmus.wan.memory import MemoryLink

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
    loop = StageLoop(SCALE, WatchedDevice("cpu"), ids, is_sharded=False)
    loop.stage.compile_layers(backend="eager")
    loop.device.begin()
    take_steps(loop, Pair(forward=CODEC, backward=CODEC), num_steps=2)
    assert num_graphs() == 1
    # One step more than the script has asked for ends the run.
    assert [span.kind for span in loop.record.spans].count("forward") == 3 * SCALE.num_microbatches
    assert {piece.kind for piece in loop.device.pieces()} == {"codec", "decode"}


def test_a_stage_goes_from_codec_to_codec(ids: list[torch.Tensor]) -> None:
    loop = StageLoop(SCALE, WatchedDevice("cpu"), ids, is_sharded=False)
    for pair in (RAW_PAIR, Pair(forward=CODEC, backward=CODEC)):
        take_steps(loop, pair, num_steps=1)
    assert [one.windows for one in loop.record.steps] == [(2, 1)] * 4


def test_a_script_that_fails_ends_both_stages(ids: list[torch.Tensor]) -> None:
    loop = StageLoop(SCALE, WatchedDevice("cpu"), ids, is_sharded=False)
    with pytest.raises(ZeroDivisionError):
        take_steps(loop, RAW_PAIR, num_steps=2, fail=lambda: 1 // 0)


def test_a_far_end_behind_a_link_answers_run_after_run(ids: list[torch.Tensor]) -> None:
    loop = StageLoop(SCALE, WatchedDevice("cpu"), ids, is_sharded=False)
    served = Served(scale=SCALE, dtype=torch.float32, max_in_flight=2)
    with MemoryLink(HERE.cloud, BEYOND.cloud) as wan, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(served.serve, wan.end(BEYOND.cloud))
        far_end = FarProcess(link=wan.end(HERE.cloud))
        for pair in (RAW_PAIR, Pair(forward=CODEC, backward=CODEC)):
            take_steps(loop, pair, num_steps=1, far_end=far_end)
        far_end.end()
        serving.result(timeout=60)
    assert len(loop.record.steps) == 4


def take_steps(
    loop: StageLoop,
    pair: Pair,
    *,
    num_steps: int,
    fail: Callable[[], object] = lambda: None,
    far_end: FarThread | FarProcess | None = None,
) -> None:
    def script() -> Iterator[None]:
        for _ in range(num_steps):
            yield
        fail()

    config = SCALE.run_config(pair, max_in_flight=2)
    far_end = far_end or FarThread(shape=SCALE.shape, dtype=torch.float32)
    with far_end.begin(config) as link:
        loop.run(config, link, script())


def test_the_plain_loop_compiles_one_layer_for_all(ids: list[torch.Tensor]) -> None:
    loop = PlainLoop(SCALE.config(SCALE.num_layers), torch.device("cpu"), is_sharded=False)
    loop.compile(backend="eager")
    for _ in range(2):
        loop.step(ids, torch.ones(2, 16, 64))
    assert num_graphs() == 1
