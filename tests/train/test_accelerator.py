"""What holds on the CPU holds on an accelerator, where codecs have a stream of their own."""

import pytest
import torch

from isthmus.model.stage import Batch, StageInput
from isthmus.train.device import Device
from tests.model.cases import RNG_KEY, blueprint, build, make_batch
from tests.train.chain import CutCase, Given, chain, config
from tests.train.reference import assert_same, parameters_of
from tests.train.resuming import keep_all, take_up
from tests.train.test_codecs import BOTTLENECK, cut
from tests.train.test_exactness import batches

CUTS = {
    "raw": CutCase(),
    "int4": cut("rotate | int4", "rotate | int4(stochastic)", guard_every=2),
    "topk": cut("topk(0.5) | int8", "topk(0.5) | int8"),
    "subspace": cut("subspace(6, anchor=tokens, every=2) | int8", "int8(stochastic)"),
    "bottleneck": cut("int4", "int4(stochastic)", boundary=BOTTLENECK),
}

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")


def test_on_the_cpu_a_lane_is_no_detour() -> None:
    lane = Device("cpu").side_stream()
    tensor = torch.ones(3)
    with lane.work(after=Device("cpu").mark()):
        assert not torch.is_grad_enabled()
        assert lane.to_host(tensor) is tensor
        assert lane.to_device(tensor) is tensor
    assert lane.hand_over(tensor) is tensor


@needs_accelerator
@pytest.mark.parametrize("between", CUTS.values(), ids=CUTS)
def test_losses_are_those_of_the_cpu(between: CutCase) -> None:
    plan = blueprint("llama", attention_dropout=0.0)
    steps = batches(plan, 3)
    losses = []
    for device in ("cpu", "auto"):
        with chain(plan, config(2, 3, cuts=(between,)), device=device) as found:
            found.run(Given(steps))
        losses.append([one.loss for one in found.records[0].steps])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@needs_accelerator
@pytest.mark.parametrize("between", CUTS.values(), ids=CUTS)
def test_a_resumed_run_equals_one_that_never_stopped(between: CutCase) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 3)
    with chain(plan, config(2, 3, cuts=(between,)), device="auto") as whole:
        kept = keep_all(whole)
        whole.run(Given(steps))
    with chain(plan, config(2, 3, cuts=(between,)), device="auto") as resumed:
        states = take_up(resumed, kept, 3)
        resumed.run(Given(steps), first_step=3, states=states)
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_pass_never_waits_for_the_device(name: str) -> None:
    """So that the host is ahead, and the device never waits for it."""
    plan = blueprint(name)
    [stage] = build(plan, [range(plan.num_layers)])
    stage.to("cuda")
    batch = make_batch(plan.head, lengths=(9, 9))
    unpadded = Batch(ids=batch.ids, labels=batch.labels, num_targets=batch.num_targets)
    inputs = StageInput(batch=unpadded.to(torch.device("cuda")), rng_key=RNG_KEY)
    stage(inputs).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage(inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
