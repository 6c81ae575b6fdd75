"""A job's savers on a stage, and in a whole pipeline: what they change is memory, not the result."""

from typing import Any

import pytest

from isthmus.job import Job
from isthmus.model.budget import Budgeted
from isthmus.model.recompute import Fixed
from isthmus.plan.costs.memory import OptimizerState
from isthmus.train.device import Device
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.savers import equip, optimizer_state
from tests.model.cases import blueprint, build, make_batch
from tests.train.chain import SCHEDULE, Given, chain, course
from tests.train.reference import assert_same, parameters_of

CPU = Device("cpu")


def job(**train: Any) -> Job:
    return Job.model_validate(
        {
            "name": "savers",
            "cloud": [{"name": "east", "device": "cpu", "memory": "8 GiB"}],
            "model": {"config": {"model_type": "llama"}},
            "data": {"source": "builtin:names", "sequence_length": 64},
            "train": train,
        }
    )


def test_a_stage_recomputes_as_the_job_says() -> None:
    (stage,) = build(blueprint("llama"), [range(4)])
    assert equip(stage, job(), cloud="east", device=CPU).recompute == Fixed()
    auto = equip(stage, job(recompute="auto"), cloud="east", device=CPU).recompute
    assert isinstance(auto, Budgeted)
    assert auto._budget_bytes == int(0.9 * 8 * 2**30)
    alike = equip(stage, job(recompute="auto"), cloud="east", device=CPU, in_lock_step=True)
    assert alike.recompute == Fixed(frozenset(stage.layers))
    assert "compute alike" in alike.notes[-1]
    given = equip(stage, job(recompute="auto", memory_budget="1 GiB"), cloud="east", device=CPU).recompute
    assert isinstance(given, Budgeted)
    assert given._budget_bytes == 2**30
    weights = sum(one.numel() for one in stage.parameters())
    assert given._standing_bytes() == 16 * weights


def test_what_the_optimizer_remembers_is_as_the_job_says() -> None:
    assert optimizer_state(job()) is OptimizerState.FLOAT32
    assert optimizer_state(job(optimizer_bits=8)) is OptimizerState.EIGHT_BIT


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_pipeline_within_a_budget_and_with_moments_on_the_host_gives_the_same(num_stages: int) -> None:
    plan = blueprint("llama")
    agreed = course(num_stages, 4, num_steps=5)
    steps = [
        [make_batch(plan.head, lengths=(length, 3), seed=10 * step + length) for length in lengths]
        for step, lengths in enumerate([(24, 6, 20, 9), (12, 16, 8, 23), *[(23, 7, 7, 22)] * 3])
    ]
    found = []
    chosen: list[int] = []
    budgets: list[Watched] = []
    for is_saving in (False, True):
        with chain(plan, agreed) as links:
            if is_saving:
                for index, stage in enumerate(links.stages):
                    budget = Watched(
                        budget_bytes=450_000, standing_bytes=lambda: 60_000, device=CPU.torch_device
                    )
                    budget.chosen = chosen
                    budgets.append(budget)
                    stage.recompute = budget
                    links.optimizers[index] = Optimizer(
                        stage.parameters_by_name(),
                        schedule=SCHEDULE,
                        weight_decay=0.1,
                        max_norm=0.5,
                        offload=True,
                    )
            links.run(Given(steps))
            found.append(parameters_of(links.stages))
    assert_same(found[1], found[0])
    assert {0} < set(chosen)
    assert not any(budget._in_flight for budget in budgets)


class Watched(Budgeted):
    chosen: list[int]

    def _choose(self, *args: Any) -> frozenset[int]:
        layers = super()._choose(*args)
        self.chosen.append(len(layers))
        return layers
