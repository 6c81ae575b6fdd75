"""The host may go on before a device is done, and still tells when passes ran."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from isthmus.events import Span, steady_s
from isthmus.train.device import Device, Mark, PassClock


class FakeEvent:
    """Reached at a time of the device's clock; waiting for it moves the device there."""

    def __init__(self, device: "FakeDevice", reached_s: float) -> None:
        self.device = device
        self.reached_s = reached_s

    def synchronize(self) -> None:
        self.device.waited_for.append(self.reached_s)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.reached_s - self.reached_s)


@dataclass
class FakeDevice:
    """An accelerator on which work is queued; `now_s` is the end of its queue."""

    is_accelerator: bool = True
    now_s: float = 100.0
    waited_for: list[float] = field(default_factory=list)

    def mark(self, *, is_timed: bool = False) -> Mark:  # noqa: ARG002
        event: Any = FakeEvent(self, self.now_s)
        return Mark(event)

    def work(self, clock: PassClock, *, last_layer_s: float, before_s: float = 1.0) -> str:
        self.now_s += before_s
        clock.near_end()
        self.now_s += last_layer_s
        return "result"


def _clock(device: Any) -> tuple[PassClock, list[Span]]:
    told: list[Span] = []
    clock = PassClock(device, track="east", on_span=told.append)
    clock.begin()
    return clock, told


def test_the_host_goes_on_at_the_last_layers_and_tells_of_the_pass_one_later() -> None:
    device = FakeDevice()
    clock, told = _clock(device)
    result, mark = clock.run("forward", "forward 0.0", lambda: device.work(clock, last_layer_s=0.25))
    assert result == "result"
    assert device.waited_for[-1] == 101.0  # the last layer is left to the device
    assert told == []
    mark.wait()
    assert device.waited_for[-1] == 101.25  # the result is there when the whole pass is done
    clock.run("backward", "backward 0.0", lambda: device.work(clock, last_layer_s=0.5))
    assert [(one.track, one.kind, one.name) for one in told] == [("east", "forward", "forward 0.0")]
    assert told[0].duration_s == pytest.approx(1.25, abs=1e-6)
    clock.settle()
    assert [one.name for one in told] == ["forward 0.0", "backward 0.0"]
    assert told[1].start_s == pytest.approx(told[0].end_s, abs=1e-6)
    assert clock.take_busy_s() == pytest.approx(1.25 + 1.5, abs=1e-6)
    assert clock.take_busy_s() == 0.0
    clock.settle()
    assert len(told) == 2
    clock.run("forward", "forward 0.1", lambda: device.work(clock, last_layer_s=0.25))
    clock.settle()
    clock.begin()
    assert clock.take_busy_s() == 0.0


def test_work_without_layers_is_waited_for() -> None:
    device = FakeDevice()
    clock, told = _clock(device)

    def update() -> None:
        device.now_s += 2.0

    clock.run("optimize", "optimize 0", update)
    assert device.waited_for[-1] == 102.0
    assert [one.kind for one in told] == ["optimize"]


def test_on_the_cpu_a_pass_is_over_when_it_returns() -> None:
    clock, told = _clock(Device("cpu"))
    before_s = steady_s()
    clock.run("forward", "forward 0.0", clock.near_end)
    after_s = steady_s()
    (span,) = told
    assert before_s <= span.start_s <= span.end_s <= after_s + 1e-3
