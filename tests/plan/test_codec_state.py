"""The memory that codecs keep between messages: as counted for plans, beside the real codecs' own."""

import pytest
import torch

from isthmus.job import parse_codec
from isthmus.plan.codecs import Crossing, Pair
from isthmus.plan.planner import plan
from tests.codec.cuts import KEY, make_cut, noise
from tests.plan.jobs import two_clouds

NUM_ROWS, WIDTH = 96, 64


def _bytes(state: dict[str, torch.Tensor]) -> int:
    return sum(one.nbytes for one in state.values())


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("raw", "raw"),
        ("rotate | int4", "feedback(0.9) | topk(0.1) | int4"),
        ("svd(0.5) | fp16", "svd(0.2) | int8"),
        ("subspace(8) | int4", "int4(stochastic)"),
        ("subspace(8, anchor=tokens) | int4", "int4(stochastic)"),
    ],
)
def test_state_is_counted_as_codecs_keep_it(forward: str, backward: str) -> None:
    """A basis is also unpacked at both ends, which no checkpoint holds."""
    pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
    cut = make_cut(pair.forward, pair.backward, width=WIDTH)
    ids = torch.arange(NUM_ROWS)
    payload = cut.sending.encode(noise(NUM_ROWS, WIDTH), key=KEY, ids_N=ids)
    cut.receiving.decode(payload, key=KEY, num_rows=NUM_ROWS, ids_N=ids)
    cut.send_back(noise(NUM_ROWS, WIDTH, seed=1))
    counted = pair.state_bytes(Crossing(num_rows=NUM_ROWS, width=WIDTH))
    unpacked = 4 * WIDTH * (1 + 8) if "subspace" in forward else 0
    kept = (_bytes(dict(end.state_dict())) for end in (cut.sending, cut.receiving))
    for count, own in zip(counted, kept, strict=True):
        assert own <= count + 64 <= own + unpacked + 128


def test_a_plan_counts_what_error_feedback_keeps() -> None:
    codecs = '{forward = "int8", backward = "feedback(0.9) | int8"}'
    with_state, without = (
        plan(two_clouds("strategy.kind=pipeline", "strategy.microbatches=16", f"link.0.codec={one}"))
        for one in (codecs, '{forward = "int8", backward = "int8"}')
    )
    memory = [stage.memory.get("codec", 0) for stage in with_state.stages]
    assert memory[0] == 0
    assert memory[1] > 0
    assert all("codec" not in stage.memory for stage in without.stages)
