"""AdamW's moments in 8 bits and on the host: what they cost in exactness, and that they are saved whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.plan.end_of_step import total_norm
from isthmus.plan.memory import OptimizerState
from isthmus.train import optimizer
from isthmus.train.optimizer import OnDevice, OnHost, Optimizer, Schedule

NUM_STEPS = 12
SCHEDULE = Schedule(peak=0.03, num_steps=NUM_STEPS, num_warmup_steps=2)


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """torchao compiles its update, which takes a C++ compiler and long; uncompiled it does the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Regression:
    """Three matrices and a vector that learn to be those of another."""

    def __init__(self, *, device: str = "cpu", **options: object) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(128, 64, generator=generator).to(device)
        self.targets = self.inputs @ torch.randn(64, 64, generator=generator).to(device)
        shapes = {"first": (64, 128), "second": (128, 64), "third": (64, 64), "bias": (64,)}
        self.parameters = {
            name: nn.Parameter((torch.randn(shape, generator=generator) / 8).to(device))
            for name, shape in shapes.items()
        }
        self.optimizer = Optimizer(
            self.parameters,
            schedule=SCHEDULE,
            weight_decay=0.1,
            max_norm=5.0,
            **options,  # type: ignore[arg-type]
        )

    def loss(self) -> Tensor:
        first, second, third, bias = self.parameters.values()
        return ((self.inputs @ first @ second @ third + bias - self.targets) ** 2).mean()

    def train(self, steps: range) -> float:
        for step in steps:
            torch.autograd.backward(self.loss())
            self.optimizer.update(step, norm=total_norm(self.optimizer.squared_norms()))
        return float(self.loss().detach())

    def values(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.parameters.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"state": OptimizerState.EIGHT_BIT},
    {"offload": True},
]


class NoStream:
    """Stands for a stream of a device that does everything at once."""

    def __init__(self, **_: object) -> None:
        self.num_waits = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        self.num_waits += 1

    def wait_event(self, _: object) -> None:
        self.num_waits += 1

    def synchronize(self) -> None:
        pass

    def record_event(self) -> object:
        return object()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU where there is one, and the CPU with a stand-in for its streams."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    if request.param == "cpu":
        monkeypatch.setattr(torch, "Stream", NoStream)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: NoStream())
        monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
        monkeypatch.setattr(optimizer, "_pinned_like", torch.empty_like)
        monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self.clone())
        monkeypatch.setattr(optimizer, "OnDevice", OnHost)
    return str(request.param)


@pytest.mark.parametrize("slice_parameters", [1, 9_000, 10**9])
def test_moments_on_the_host_change_nothing(
    device: str, slice_parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "OnDevice", OnDevice)
        beside = Regression(device=device)
    monkeypatch.setattr(OnHost.__init__, "__kwdefaults__", {"slice_parameters": slice_parameters})
    away = Regression(device=device, offload=True)
    assert isinstance(away.optimizer._moments, OnHost)
    assert beside.train(range(5)) == away.train(range(5))
    saved = {name: tensor.clone() for name, tensor in away.optimizer.tensors().items()}
    assert not any(one.is_cuda for one in saved.values())
    away.optimizer.load_tensors(saved)
    assert beside.train(range(5, NUM_STEPS)) == away.train(range(5, NUM_STEPS))
    for name, value in beside.values().items():
        assert torch.equal(away.values()[name], value)
    expected = beside.optimizer.tensors()
    found = away.optimizer.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value.cpu()) for name, value in expected.items())


def test_moments_in_8_bits_train_about_as_well_in_a_quarter_of_the_memory() -> None:
    start = float(Regression().loss().detach())
    exact, coarse = Regression(), Regression(state=OptimizerState.EIGHT_BIT)
    exact_loss, coarse_loss = exact.train(range(NUM_STEPS)), coarse.train(range(NUM_STEPS))
    assert exact_loss < 0.6 * start
    assert coarse_loss == pytest.approx(exact_loss, rel=0.05)
    assert coarse_loss != exact_loss
    num_bytes = {
        case: sum(one.nbytes for one in case.optimizer.tensors().values()) for case in (exact, coarse)
    }
    assert num_bytes[coarse] < 0.35 * num_bytes[exact]


def test_rows_of_rare_tokens_do_not_leap() -> None:
    """A second moment that 8 bits round to nothing would divide what is left of the first by nothing."""
    moved = {}
    for is_table in (True, False):
        generator = torch.Generator().manual_seed(2)
        weight = nn.Parameter(torch.zeros(512, 64))
        optimizer = Optimizer(
            {"weight": weight},
            schedule=Schedule(peak=1e-3, num_steps=4),
            state=OptimizerState.EIGHT_BIT,
            tables=[weight] if is_table else [],
        )
        for step in range(3):
            is_there = torch.rand(512, 1, generator=generator) < 0.5
            scale = torch.logspace(-2, -7, 512)[:, None]
            weight.grad = torch.randn(512, 64, generator=generator) * scale * is_there
            optimizer.update(step, norm=0.0)
        moved[is_table] = float(weight.detach().abs().max())
    assert moved[True] < 2 * 3 * 1e-3 < moved[False]


def test_moments_of_either_form_are_taken_up() -> None:
    exact, coarse = Regression(), Regression(state=OptimizerState.EIGHT_BIT)
    exact.train(range(5))
    coarse.optimizer.load_tensors(exact.optimizer.tensors())
    saved = coarse.optimizer.tensors()
    assert saved["exp_avg.codes/first"].any()
    wide = Regression(state=OptimizerState.EIGHT_BIT)
    tables = list(wide.parameters.values())
    wide.optimizer = Optimizer(
        wide.parameters, schedule=SCHEDULE, state=OptimizerState.EIGHT_BIT, tables=tables
    )
    wide.optimizer.load_tensors(saved)
    expected = exact.optimizer.tensors()["exp_avg/first"]
    found = wide.optimizer.tensors()["exp_avg/first"]
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_goes_on_to_the_bit(options: dict[str, Any]) -> None:
    straight, first, second = (Regression(**options) for _ in range(3))
    straight.train(range(NUM_STEPS))
    first.train(range(5))
    for name, value in first.values().items():
        second.parameters[name].detach().copy_(value)
    saved = {name: tensor.clone() for name, tensor in first.optimizer.tensors().items()}
    assert all(type(tensor) is Tensor for tensor in saved.values())
    second.optimizer.load_tensors(saved)
    second.train(range(5, NUM_STEPS))
    for name, value in straight.values().items():
        assert torch.equal(second.values()[name], value)


def test_a_stage_without_anything_to_learn_has_no_moments() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = Optimizer({"frozen": frozen}, schedule=SCHEDULE, offload=True)
    optimizer.update(0, norm=0.0)
    assert optimizer.squared_norms() == ()
    assert optimizer.tensors() == {}


def test_moments_are_in_8_bits_or_on_the_host() -> None:
    with pytest.raises(ValueError, match="stay on the device"):
        Regression(state=OptimizerState.EIGHT_BIT, offload=True)
