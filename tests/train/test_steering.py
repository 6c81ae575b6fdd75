"""Codecs change at the same step at both ends of a cut, from what the wires have measured."""

import pytest
import torch

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import RAW_PAIR, Pair
from isthmus.plan.end_of_step import Cosines, Tally
from tests.model.cases import blueprint
from tests.train.chain import CutCase, Given, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.test_exactness import batches


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_both_ends_change_at_the_same_step(num_stages: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 4)
    own, coded = pair("subspace(5) | int8", "int8"), pair("rotate | int8", "rotate | int8(stochastic)")
    schedule = {0: RAW_PAIR, 1: RAW_PAIR, 2: coded, 3: own, 4: own}

    def steer(found: Tally) -> tuple[Pair, ...]:
        return (schedule[found.step],) * (num_stages - 1)

    runs = []
    for _ in range(2):
        with chain(plan, config(num_stages, 4, cuts=(CutCase(codecs=own),) * (num_stages - 1))) as found:
            found.run(Given(steps), steer=steer)
        runs.append(found)
    assert_same(parameters_of(runs[0].stages), parameters_of(runs[1].stages))
    coded_at = {
        span.name.split()[1].split(".")[0] for span in found.records[1].spans if span.kind == "decode"
    }
    assert coded_at == {"0", "3", "4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_stage_learns_the_size_of_what_crosses_each_cut(dtype: torch.dtype) -> None:
    plan = blueprint("llama")
    seen: list[tuple[int, ...]] = []

    def steer(found: Tally) -> tuple[Pair, ...]:
        seen.append(found.element_bytes)
        return tuple(cut.codecs for cut in cuts)

    cuts = (CutCase(), CutCase(codecs=pair("rotate | int8", "raw")))
    with chain(plan, config(3, 2, cuts=cuts)) as found:
        for stage in found.stages:
            stage.to(dtype)
        found.run(Given(batches(plan, 2)), steer=steer)
    assert set(seen) == {(dtype.itemsize, dtype.itemsize)}


def test_the_guard_sees_what_a_coarse_codec_does() -> None:
    plan = blueprint("llama")
    seen: list[Cosines] = []

    def steer(found: Tally) -> tuple[Pair, ...]:
        seen.extend(found.cosines)
        return (own.codecs,)

    own = CutCase(codecs=pair("int2", "topk(0.2) | int8"), guard_every=3)
    with chain(plan, config(2, 4, cuts=(own,))) as found:
        found.run(Given(batches(plan, 4)), steer=steer)
    assert len(seen) == 5
    assert all(0 < one.forward < 0.98 and 0 < one.backward < 0.98 for one in seen)
    for record, track, lowest in (
        (found.records[0], "north→east", [one.forward for one in seen]),
        (found.records[1], "east→north", [one.backward for one in seen]),
    ):
        assert {one.track for one in record.measurements} == {track}
        by_step = {step: [one.cosine for one in record.measurements if one.step == step] for step in range(5)}
        assert [min(cosines) for cosines in by_step.values()] == lowest
        assert all(one.relative_error > 0 for one in record.measurements)
