"""A stage between two cuts that computes while both code: what codecs add to its step.

Activations are decoded for the stage before it and encoded behind it, gradients the other way, by the ends of
cuts that a run has, on threads and streams of their own; bytes come from host memory and go there, so no link
disturbs the clock. All pairs of codecs take turns step by step, in an order that moves on from round to
round, so that a clock that drifts does so for all; each step is compared with that of raw in its own round.
How long the passes themselves took on the device, and what lay between them, tells what a longer step comes
from: kernels that take the device from the computation, or a host that comes too late.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Self

import torch
from bench import Deadline, tell
from crossing import activation, coded_both_ways, gradient
from member import pipeline_config
from quality.intervals import Difference, paired_difference
from torch import Tensor

from isthmus.codec.base import CoderSite, Memory
from isthmus.codec.chain import build_coder
from isthmus.job.codec import parse_codec
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput
from isthmus.plan.codecs import Crossing, Pair
from isthmus.plan.types import Message
from isthmus.train.coding import Coded, CutEnd
from isthmus.train.device import Device, Mark
from isthmus.train.integers import IDS
from isthmus.train.pipeline_role import cut_end
from isthmus.train.session import SWITCH_INTERVAL_S

ALONE: Final = "nothing"
RAW: Final = "raw"
PAIRS: Final = {
    RAW: ("raw", "raw"),
    "rotate | int8": ("rotate | int8", "rotate | int8"),
    "rotate | int8, stochastic back": ("rotate | int8", "rotate | int8(stochastic)"),
    "rotate | int4": ("rotate | int4", "rotate | int4"),
    "rotate | int4, stochastic back": ("rotate | int4", "rotate | int4(stochastic)"),
}
_NUM_WARM_UP_STEPS: Final = 3
_LEAST_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """A stage of a Llama-like model, and what passes through it in a step."""

    width: int
    num_layers: int
    num_tokens: int
    num_microbatches: int
    num_rounds: int


FULL: Final = StageSize(width=2048, num_layers=6, num_tokens=4096, num_microbatches=8, num_rounds=30)
TINY: Final = StageSize(width=64, num_layers=1, num_tokens=64, num_microbatches=2, num_rounds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step, and how long its passes and its update took on the device, one after the other."""

    step_s: float
    passes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """Steps of the stage round by round: with nothing to code or copy, and with each pair of codecs."""

    num_parameters: int
    coders: dict[str, str]
    """What carries out the forward codec of each pair."""
    rounds: tuple[dict[str, StepTime], ...]
    num_rounds_wanted: int

    def step_s(self, name: str) -> float:
        """The step in the middle."""
        return statistics.median(one[name].step_s for one in self.rounds)

    def passes_s(self, name: str) -> float:
        """What its passes took, in the middle."""
        return statistics.median(one[name].passes_s for one in self.rounds)

    def added_share(self, name: str, *, to: str) -> Difference:
        """What a pair adds to the step with another, with its interval over the rounds."""
        shares = {number: one[name].step_s / one[to].step_s for number, one in enumerate(self.rounds)}
        found = paired_difference(shares, dict.fromkeys(shares, 1.0))
        if found is None:
            raise ValueError("no round was taken")
        return found


class Cuts:
    """Both cuts of the stage, with a thread each way at each, and what arrives through them in each step."""

    def __init__(self, pair: Pair, hidden_BTD: Tensor, device: Device) -> None:
        shape = hidden_BTD.shape
        config = pipeline_config(
            ("before", "here", "behind"),
            pair=pair,
            crossing=Crossing(num_rows=shape[0] * shape[1], width=shape[2]),
            num_steps=1,
            num_microbatches=1,
        )
        self._pair = pair
        self._integers = {IDS: torch.zeros(shape[:2], dtype=torch.int64)}
        self._activation, _ = coded_both_ways(config, 0, hidden_BTD, device)
        _, self._gradient = coded_both_ways(config, 1, hidden_BTD, device)
        self._up = cut_end(config, 0, device, shape[2], is_sender=False)
        self._down = cut_end(config, 1, device, shape[2], is_sender=True)
        self._threads = [ThreadPoolExecutor(1) for _ in range(4)]
        self._device = device

    def receive(self, item: int) -> "Future[Tensor]":
        """Decode an activation from the stage before."""
        message = activation(self._pair, item)
        return self._threads[0].submit(_decode, self._up, message, self._activation, self._integers)

    def send(self, item: int, hidden_BTD: Tensor) -> "Future[Coded]":
        """Encode an activation for the stage behind."""
        encode = partial(self._down.encode, after=self._device.mark())
        message = activation(self._pair, item)
        return self._threads[1].submit(encode, message, hidden_BTD, self._integers)

    def receive_gradient(self, item: int, sent: "Future[Coded]") -> "Future[Tensor]":
        """Decode a gradient from the stage behind, which follows what was sent."""

        def decode() -> Tensor:
            sent.result()
            return _decode(self._down, gradient(self._pair, item), self._gradient, {})

        return self._threads[2].submit(decode)

    def send_gradient(self, item: int, hidden_BTD: Tensor) -> "Future[Coded]":
        """Encode a gradient for the stage before."""
        encode = partial(self._up.encode, after=self._device.mark())
        return self._threads[3].submit(encode, gradient(self._pair, item), hidden_BTD, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._threads:
            one.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    item: int
    arrived: Tensor
    given: Tensor
    gradient: "Future[Tensor]"


@dataclass(slots=True)
class Laps:
    """When passes begin and end on the device."""

    device: Device
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)

    def run(self, work: Callable[[], Any]) -> Any:
        """Start a pass, and note it."""
        begun = self.device.mark(is_timed=True)
        result = work()
        self.marks.append((begun, self.device.mark(is_timed=True)))
        return result

    def total_s(self) -> float:
        """All passes together; they have ended."""
        return sum(ended.since_s(begun) for begun, ended in self.marks)


class StageBench:
    """A stage and its steps."""

    def __init__(self, size: StageSize, device: Device) -> None:
        self._size = size
        self._device = device
        self.stage = _middle_stage(size).to(device.torch_device)
        self._adamw = torch.optim.AdamW(
            self.stage.parameters(), lr=1e-5, fused=device.torch_device.type != "cpu"
        )
        ids = torch.zeros(1, size.num_tokens, dtype=torch.int64, device=device.torch_device)
        self._batch = Batch(ids=ids, num_targets=size.num_tokens)
        generator = torch.Generator().manual_seed(1)
        hidden_BTD = torch.randn(1, size.num_tokens, size.width, generator=generator)
        self._hidden_BTD = hidden_BTD.to(device.torch_device, torch.bfloat16)

    def cuts(self, texts: tuple[str, str]) -> Cuts:
        """Two cuts with these codecs."""
        pair = Pair(forward=parse_codec(texts[0]), backward=parse_codec(texts[1]))
        return Cuts(pair, self._hidden_BTD, self._device)

    def timed(self, step: Callable[[Laps], None]) -> StepTime:
        """One step, from an idle device to an idle device."""
        laps = Laps(self._device)
        self._device.mark().wait()
        started_s = time.perf_counter()
        step(laps)
        self._device.mark().wait()
        return StepTime(step_s=time.perf_counter() - started_s, passes_s=laps.total_s())

    def step_alone(self, laps: Laps) -> None:
        """A step in which everything lies ready."""
        for item in range(self._size.num_microbatches):
            arrived = self._hidden_BTD.detach().requires_grad_()
            given = laps.run(partial(self._forward, arrived, item))
            laps.run(partial(torch.autograd.backward, given, self._hidden_BTD))
        laps.run(self._update)

    def step(self, cuts: Cuts, laps: Laps) -> None:
        """Every micro-batch there and back, two in flight, so that coding has a pass to overlap with."""
        leaving: list[Future[Coded]] = []
        in_flight: list[_InFlight] = []
        coming = cuts.receive(0)
        for item in range(self._size.num_microbatches):
            arrived = coming.result().requires_grad_()
            if item + 1 < self._size.num_microbatches:
                coming = cuts.receive(item + 1)
            given: Tensor = laps.run(partial(self._forward, arrived, item))
            leaving.append(cuts.send(item, given.detach()))
            gradient = cuts.receive_gradient(item, leaving[-1])
            in_flight.append(_InFlight(item=item, arrived=arrived, given=given, gradient=gradient))
            if item > 0:
                leaving.append(self._back(cuts, in_flight.pop(0), laps))
        leaving.append(self._back(cuts, in_flight.pop(0), laps))
        laps.run(self._update)
        for one in leaving:
            one.result()

    def _back(self, cuts: Cuts, one: _InFlight, laps: Laps) -> "Future[Coded]":
        laps.run(partial(torch.autograd.backward, one.given, one.gradient.result()))
        if one.arrived.grad is None:
            raise ValueError("no gradient has come to what arrived")
        return cuts.send_gradient(one.item, one.arrived.grad)

    def _forward(self, crossing: Tensor, index: int) -> Tensor:
        rng_key = RngKey(seed=0, step=0, microbatch=index)
        given: Tensor | None = self.stage(
            StageInput(batch=self._batch, crossing=crossing, rng_key=rng_key)
        ).crossing
        if given is None:
            raise ValueError("a stage in the middle gives hidden states")
        return given

    def _update(self) -> None:
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def time_stage(size: StageSize, deadline: Deadline) -> StageTiming:
    """Rounds in which each pair has its turn, as many as there is time for, behind some that do not count."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = Device("auto")
    bench = StageBench(size, device)
    with ExitStack() as stack:
        steps: dict[str, Callable[[Laps], None]] = {ALONE: bench.step_alone}
        for name, pair in PAIRS.items():
            steps[name] = partial(bench.step, stack.enter_context(bench.cuts(pair)))
        # Every path has run before the clock does: kernels are compiled, memory of each stream is there.
        for _ in range(_NUM_WARM_UP_STEPS):
            for step in steps.values():
                bench.timed(step)
        rounds = _rounds(bench, steps, size.num_rounds, deadline)
    return StageTiming(
        num_parameters=sum(one.numel() for one in bench.stage.parameters()),
        coders={name: _coder_name(pair[0], size.width, device) for name, pair in PAIRS.items()},
        rounds=tuple(rounds),
        num_rounds_wanted=size.num_rounds,
    )


def _rounds(
    bench: StageBench, steps: Mapping[str, Callable[[Laps], None]], num_rounds: int, deadline: Deadline
) -> list[dict[str, StepTime]]:
    rounds: list[dict[str, StepTime]] = []
    for number in range(num_rounds):
        if len(rounds) >= _LEAST_ROUNDS and not deadline.leaves():
            break
        names = _turned(list(steps), number)
        taken = {name: bench.timed(steps[name]) for name in names}
        rounds.append({name: taken[name] for name in steps})
        tell({"round": number, "steps": {name: asdict(one) for name, one in taken.items()}})
    return rounds


def _turned(names: Sequence[str], number: int) -> list[str]:
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _coder_name(text: str, width: int, device: Device) -> str:
    place = CoderSite(width=width, device=device.torch_device, memory=Memory(is_asked=False))
    return type(build_coder(parse_codec(text).steps, place)).__name__


def _decode(end: CutEnd, message: Message, coded: Coded, integers: Mapping[str, Tensor]) -> Tensor:
    hidden = end.decode(message, coded, integers)
    if hidden is None:
        raise ValueError(f"{message.name} has no hidden states")
    return hidden


def _middle_stage(size: StageSize) -> Stage:
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": size.width,
        "intermediate_size": size.width * 11 // 4,
        "num_hidden_layers": size.num_layers + 2,
        "num_attention_heads": max(1, size.width // 128),
        "num_key_value_heads": max(1, size.width // 128),
        "max_position_embeddings": size.num_tokens,
    }
    blueprint = fresh_blueprint(config, head=HEADS["causal-lm"])
    return build_stage(blueprint, range(1, size.num_layers + 1), seed=0, dtype=torch.bfloat16)
