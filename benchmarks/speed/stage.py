"""A stage between two cuts that computes while both code: what codecs add to its step.

Activations are decoded for the stage before it and encoded behind it, gradients the other way, on threads and
streams of their own, as in a run; bytes come from host memory and go there, so no link disturbs the clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from isthmus.codec.base import Key, Payload
from isthmus.codec.ends import Codecs, ReceivingEnd, SendingEnd
from isthmus.job.codec import parse_codec
from isthmus.model.assembly import build_stage
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.boundary import Batch, StageInput
from isthmus.model.heads import HEADS
from isthmus.model.randomness import Moment
from isthmus.model.stage import Stage
from isthmus.train.device import Device, Lane, Mark

PAIRS: Final = {
    "raw": ("raw", "raw"),
    "rotate | int8": ("rotate | int8", "rotate | int8"),
    "rotate | int4": ("rotate | int4", "rotate | int4"),
    "rotate | int4, stochastic back": ("rotate | int4", "rotate | int4(stochastic)"),
}
_NUM_WARM_UP_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """A stage of a Llama-like model, and what passes through it in a step."""

    width: int
    num_layers: int
    num_tokens: int
    num_microbatches: int
    num_steps: int
    num_rounds: int


FULL: Final = StageSize(
    width=2048, num_layers=6, num_tokens=4096, num_microbatches=8, num_steps=4, num_rounds=5
)
TINY: Final = StageSize(width=64, num_layers=1, num_tokens=64, num_microbatches=2, num_steps=2, num_rounds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """A step of the stage with nothing to code or copy, and with each pair of codecs."""

    num_parameters: int
    alone_s: float
    steps_s: dict[str, float]

    def added_share(self, name: str) -> float:
        """What a pair adds to the step with raw."""
        return self.steps_s[name] / self.steps_s["raw"] - 1


class CutSide:
    """One cut at the stage: a thread with a lane, and both ends, the far one only to make what arrives."""

    def __init__(self, pair: tuple[str, str], width: int, device: Device) -> None:
        codecs = Codecs(
            forward=parse_codec(pair[0]), backward=parse_codec(pair[1]), width=width, dtype=torch.bfloat16
        )
        self.sending = SendingEnd(codecs, device=device.torch_device)
        self.receiving = ReceivingEnd(codecs, device=device.torch_device)
        self.lane = Lane(device)
        self._thread = ThreadPoolExecutor(1)

    def leave(self, work: Callable[[], Payload], after: Mark) -> "Future[None]":
        """Encode, and copy to the host."""

        def run() -> None:
            with self.lane.work(after=after):
                for part in work():
                    self.lane.to_host(part)

        return self._thread.submit(run)

    def arrive(
        self, host: Payload, work: Callable[[Payload], Tensor], dtype: torch.dtype
    ) -> "Future[Tensor]":
        """Copy from the host, and decode."""

        def run() -> Tensor:
            with self.lane.work():
                rows = work(tuple(map(self.lane.to_device, host))).to(dtype)
            return self.lane.hand_over(rows)

        return self._thread.submit(run)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


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

    def alone_s(self) -> float:
        """A step in which everything lies ready."""
        return self._median_s(self._step_alone)

    def coded_s(self, pair: tuple[str, str]) -> float:
        """A step between two cuts."""
        up, down = (CutSide(pair, self._size.width, self._device) for _ in range(2))
        keys = [Key(step=0, microbatch=index) for index in range(self._size.num_microbatches)]
        activations = [self._on_host(up.sending.encode(self._x_ND, key=key)) for key in keys]
        for key in keys:
            self._prime(down, key)
        gradients = [self._on_host(down.receiving.encode_gradient(self._x_ND, key=key)) for key in keys]
        try:
            return self._median_s(lambda: self._step(up, down, keys, activations, gradients))
        finally:
            up.close()
            down.close()

    def _step(
        self,
        up: CutSide,
        down: CutSide,
        keys: Sequence[Key],
        activations: Sequence[Payload],
        gradients: Sequence[Payload],
    ) -> None:
        """Every micro-batch there and back, two in flight, so that coding has a pass to hide behind."""
        num_rows, dtype = len(self._x_ND), self._x_ND.dtype
        leaving: list[Future[None]] = []
        in_flight: list[tuple[Key, Tensor, Tensor, Future[Tensor]]] = []

        def expect(index: int) -> "Future[Tensor]":
            return up.arrive(
                activations[index],
                lambda parts: up.receiving.decode(parts, key=keys[index], num_rows=num_rows),
                dtype,
            )

        def forward(index: int, key: Key, arrived: Tensor) -> None:
            crossing = arrived.unsqueeze(0).requires_grad_()
            given = self._forward(crossing, index)
            rows = given.detach()[0]
            leaving.append(down.leave(lambda: down.sending.encode(rows, key=key), self._device.mark()))
            gradient = down.arrive(
                gradients[index],
                lambda parts: down.sending.decode_gradient(parts, key=key, num_rows=num_rows),
                dtype,
            )
            in_flight.append((key, crossing, given, gradient))

        def backward() -> None:
            key, crossing, given, gradient = in_flight.pop(0)
            torch.autograd.backward(given, gradient.result().unsqueeze(0))
            rows = _gradient_of(crossing)[0]
            leaving.append(up.leave(lambda: up.receiving.encode_gradient(rows, key=key), self._device.mark()))

        coming = expect(0)
        for index, key in enumerate(keys):
            arrived = coming.result()
            if index + 1 < len(keys):
                coming = expect(index + 1)
            forward(index, key, arrived)
            if index > 0:
                backward()
        backward()
        self._update()
        for one in leaving:
            one.result()

    def _step_alone(self) -> None:
        for index in range(self._size.num_microbatches):
            crossing = self._x_ND.unsqueeze(0).detach().requires_grad_()
            torch.autograd.backward(self._forward(crossing, index), self._x_ND.unsqueeze(0))
        self._update()

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

    def _on_host(self, payload: Payload) -> Payload:
        return tuple(part.cpu() for part in payload)

    def _median_s(self, step: Callable[[], None]) -> float:
        durations_s = []
        for _ in range(_NUM_WARM_UP_STEPS + self._size.num_steps):
            self._device.mark().wait()
            started_s = time.perf_counter()
            step()
            self._device.mark().wait()
            durations_s.append(time.perf_counter() - started_s)
        return statistics.median(durations_s[_NUM_WARM_UP_STEPS:])


def time_stage(size: StageSize) -> StageTiming:
    """Medians over rounds in which each pair has its turn."""
    bench = StageBench(size, Device("auto"))
    alone_s: list[float] = []
    steps_s: dict[str, list[float]] = {name: [] for name in PAIRS}
    for _ in range(size.num_rounds):
        alone_s.append(bench.alone_s())
        for name, pair in PAIRS.items():
            steps_s[name].append(bench.coded_s(pair))
    return StageTiming(
        num_parameters=sum(one.numel() for one in bench.stage.parameters()),
        alone_s=statistics.median(alone_s),
        steps_s={name: statistics.median(some) for name, some in steps_s.items()},
    )


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
