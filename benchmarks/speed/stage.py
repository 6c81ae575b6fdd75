"""A stage between two cuts that computes while both code: what codecs add to its step.

Activations are decoded for the stage before it and encoded behind it, gradients the other way, on threads and
streams of their own, as couriers do in a run; bytes come from host memory and go there, so no link disturbs
the clock. All pairs of codecs take turns step by step, in an order that moves on from round to round, so that
a clock that drifts does so for all; each step is compared with that of raw in its own round. How long the
passes themselves took on the device, and what lay between them, tells what a longer step comes from: kernels
that take the device from the computation, or a host that comes too late.
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
from deadline import Deadline, tell
from quality.intervals import Difference, paired_difference
from torch import Tensor

from isthmus.codec.base import Key, Memory, Payload, Place
from isthmus.codec.build import build_coder
from isthmus.codec.ends import Codecs, ReceivingEnd, SendingEnd
from isthmus.job.codec import parse_codec
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.boundary import Batch, StageInput
from isthmus.model.heads import HEADS
from isthmus.model.randomness import Moment
from isthmus.model.stage import Stage
from isthmus.train.device import Device, Lane, Mark
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


class CutSide:
    """One cut at the stage: a lane, a thread each way, and both ends, the far one to make what arrives."""

    def __init__(self, pair: tuple[str, str], width: int, device: Device) -> None:
        codecs = Codecs(
            forward=parse_codec(pair[0]), backward=parse_codec(pair[1]), width=width, dtype=torch.bfloat16
        )
        self.sending = SendingEnd(codecs, device=device.torch_device)
        self.receiving = ReceivingEnd(codecs, device=device.torch_device)
        self.lane = Lane(device)
        self._outward = ThreadPoolExecutor(1)
        self._inward = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outward.shutdown()
        self._inward.shutdown()

    def leave(self, work: Callable[[], Payload], after: Mark) -> "Future[None]":
        """Encode, and copy to the host."""

        def run() -> None:
            with self.lane.work(after=after):
                for part in work():
                    self.lane.to_host(part)

        return self._outward.submit(run)

    def arrive(
        self, host: Payload, work: Callable[[Payload], Tensor], dtype: torch.dtype
    ) -> "Future[Tensor]":
        """Copy from the host, and decode."""

        def run() -> Tensor:
            with self.lane.work():
                rows = work(tuple(map(self.lane.to_device, host))).to(dtype)
            return self.lane.hand_over(rows)

        return self._inward.submit(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Both cuts of the stage, and what arrives through them in each step, on the host."""

    up: CutSide
    down: CutSide
    keys: tuple[Key, ...]
    activations: tuple[Payload, ...]
    gradients: tuple[Payload, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    key: Key
    crossing: Tensor
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
        x_ND = torch.randn(size.num_tokens, size.width, generator=generator)
        self._x_ND = x_ND.to(device.torch_device, torch.bfloat16)

    def cuts(self, pair: tuple[str, str], stack: ExitStack) -> Cuts:
        """Two cuts with these codecs, open until the stack ends."""
        up, down = (stack.enter_context(CutSide(pair, self._size.width, self._device)) for _ in range(2))
        keys = tuple(Key(step=0, microbatch=index) for index in range(self._size.num_microbatches))
        activations = tuple(_on_host(up.sending.encode(self._x_ND, key=key)) for key in keys)
        for key in keys:
            self._prime(down, key)
        gradients = tuple(_on_host(down.receiving.encode_gradient(self._x_ND, key=key)) for key in keys)
        return Cuts(up=up, down=down, keys=keys, activations=activations, gradients=gradients)

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
        for index in range(self._size.num_microbatches):
            crossing = self._x_ND.unsqueeze(0).detach().requires_grad_()
            given = laps.run(partial(self._forward, crossing, index))
            laps.run(partial(torch.autograd.backward, given, self._x_ND.unsqueeze(0)))
        laps.run(self._update)

    def step(self, cuts: Cuts, laps: Laps) -> None:
        """Every micro-batch there and back, two in flight, so that coding has a pass to hide behind."""
        leaving: list[Future[None]] = []
        in_flight: list[_InFlight] = []
        coming = self._expect(cuts, 0)
        for index in range(len(cuts.keys)):
            arrived = coming.result()
            if index + 1 < len(cuts.keys):
                coming = self._expect(cuts, index + 1)
            in_flight.append(self._there(cuts, index, arrived, leaving, laps))
            if index > 0:
                self._back(cuts, in_flight.pop(0), leaving, laps)
        self._back(cuts, in_flight.pop(0), leaving, laps)
        laps.run(self._update)
        for one in leaving:
            one.result()

    def _expect(self, cuts: Cuts, index: int) -> "Future[Tensor]":
        def decode(parts: Payload) -> Tensor:
            return cuts.up.receiving.decode(parts, key=cuts.keys[index], num_rows=len(self._x_ND))

        return cuts.up.arrive(cuts.activations[index], decode, self._x_ND.dtype)

    def _there(
        self, cuts: Cuts, index: int, arrived: Tensor, leaving: list["Future[None]"], laps: Laps
    ) -> _InFlight:
        key, sending = cuts.keys[index], cuts.down.sending
        crossing = arrived.unsqueeze(0).requires_grad_()
        given: Tensor = laps.run(partial(self._forward, crossing, index))
        rows = given.detach()[0]
        leaving.append(cuts.down.leave(lambda: sending.encode(rows, key=key), self._device.mark()))

        def decode(parts: Payload) -> Tensor:
            return sending.decode_gradient(parts, key=key, num_rows=len(self._x_ND))

        gradient = cuts.down.arrive(cuts.gradients[index], decode, self._x_ND.dtype)
        return _InFlight(key=key, crossing=crossing, given=given, gradient=gradient)

    def _back(self, cuts: Cuts, one: _InFlight, leaving: list["Future[None]"], laps: Laps) -> None:
        gradient = one.gradient.result().unsqueeze(0)
        laps.run(partial(torch.autograd.backward, one.given, gradient))
        rows, receiving = _gradient_of(one.crossing)[0], cuts.up.receiving
        leaving.append(
            cuts.up.leave(lambda: receiving.encode_gradient(rows, key=one.key), self._device.mark())
        )

    def _forward(self, crossing: Tensor, index: int) -> Tensor:
        moment = Moment(seed=0, step=0, microbatch=index)
        given: Tensor | None = self.stage(
            StageInput(batch=self._batch, crossing=crossing, moment=moment)
        ).crossing
        if given is None:
            raise ValueError("a stage in the middle gives hidden states")
        return given

    def _update(self) -> None:
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def _prime(self, down: CutSide, key: Key) -> None:
        """Let an activation pass, without which no gradient can be made."""
        sent = down.sending.encode(self._x_ND, key=key)
        down.receiving.decode(sent, key=key, num_rows=len(self._x_ND))


def time_stage(size: StageSize, deadline: Deadline) -> StageTiming:
    """Rounds in which each pair has its turn, as many as there is time for, behind some that do not count."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device = Device("auto")
    bench = StageBench(size, device)
    with ExitStack() as stack:
        steps: dict[str, Callable[[Laps], None]] = {ALONE: bench.step_alone}
        for name, pair in PAIRS.items():
            steps[name] = partial(bench.step, bench.cuts(pair, stack))
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
    place = Place(width=width, device=device.torch_device, memory=Memory(is_asked=False))
    return type(build_coder(parse_codec(text).steps, place)).__name__


def _on_host(payload: Payload) -> Payload:
    return tuple(part.cpu() for part in payload)


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


def _gradient_of(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise ValueError("no gradient has come to what arrived")
    return leaf.grad
