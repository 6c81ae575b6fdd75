"""Encode and decode of one activation, beside a plain copy of it and beside other quantisers."""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from isthmus.codec.base import Key
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.job.codec import parse_codec

CODECS: Final = (
    "bf16",
    "fp16",
    "int8(scale=tensor)",
    "int8",
    "rotate | int8",
    "rotate | int4",
    "rotate | int4(stochastic)",
    "rotate | int2",
    "topk(0.1) | int8",
    "svd(0.2) | fp16",
    "subspace(64) | int4",
)
_NUM_WARM_UPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One codec on one tensor, beside a plain copy of the tensor."""

    name: str
    bits_per_element: float
    encode_s: float
    decode_s: float
    copy_s: float


def activations(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Rows in which some dimensions are much larger than the others, as in hidden states."""
    generator = torch.Generator().manual_seed(7)
    x_ND = torch.randn(num_rows, width, generator=generator)
    x_ND[:, :: width // 8] *= 20
    return x_ND.to(device)


def time_all(x_ND: Tensor, *, budget_s: float) -> list[Timing]:
    """Every codec of ours and every rival on one tensor, each with its own share of the time."""
    clock = partial(median_s, device=x_ND.device, budget_s=budget_s)
    target = torch.empty_like(x_ND)

    def time_copy() -> float:
        """Anew for each codec, since other work on the machine comes and goes."""
        return clock(lambda: target.copy_(x_ND))

    found = [_time_codec(text, x_ND, clock, time_copy()) for text in CODECS]
    found += _time_torch(x_ND, clock, time_copy())
    if x_ND.device.type == "cpu" and importlib.util.find_spec("hivemind") is not None:
        found += _time_hivemind(x_ND, clock, time_copy())
    return found


def median_s(work: Callable[[], object], *, device: torch.device, budget_s: float) -> float:
    """The median time of some work, the device's part included."""
    for _ in range(_NUM_WARM_UPS):
        work()
    durations_s: list[float] = []
    ends_s = time.perf_counter() + budget_s
    while time.perf_counter() < ends_s or len(durations_s) < 5:
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        durations_s.append(time.perf_counter() - started_s)
    return statistics.median(durations_s)


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; the CPU has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


Clock = Callable[[Callable[[], object]], float]


def _time_codec(text: str, x_ND: Tensor, clock: Clock, copy_s: float) -> Timing:
    num_rows, width = x_ND.shape
    codecs = Codecs(forward=parse_codec(text), backward=parse_codec("raw"), width=width)
    sender, receiver = CodecEnd(codecs, device=x_ND.device), CodecEnd(codecs, device=x_ND.device)
    for step in range(_NUM_WARM_UPS):
        # A basis rides with the first messages; what is timed is a steady one.
        key = Key(step=step, microbatch=0)
        payload = sender.encode(x_ND, key=key)
        receiver.decode(payload, key=key, num_rows=num_rows)
    # One key for all, so that what awaits its gradient is replaced each time instead of piling up.
    key = Key(step=_NUM_WARM_UPS, microbatch=0)
    payload = sender.encode(x_ND, key=key)
    return Timing(
        name=text,
        bits_per_element=8 * sum(part.numel() for part in payload) / x_ND.numel(),
        encode_s=clock(lambda: sender.encode(x_ND, key=key)),
        decode_s=clock(lambda: receiver.decode(payload, key=key, num_rows=num_rows)),
        copy_s=copy_s,
    )


def _time_torch(x_ND: Tensor, clock: Clock, copy_s: float) -> list[Timing]:
    """Finding the scales is part of the work, as it is of ours."""
    zeros = torch.zeros(len(x_ND), dtype=torch.int64, device=x_ND.device)

    def per_tensor() -> Tensor:
        scale = float(x_ND.abs().amax()) / 127
        return torch.quantize_per_tensor(x_ND, scale, 0, torch.qint8)

    def per_channel() -> Tensor:
        scales = (x_ND.abs().amax(1) / 127).double()
        return torch.quantize_per_channel(x_ND, scales, zeros, 0, torch.qint8)

    return [
        Timing(
            name=name,
            bits_per_element=bits,
            encode_s=clock(quantise),
            decode_s=clock(quantise().dequantize),
            copy_s=copy_s,
        )
        for name, bits, quantise in (
            ("torch.quantize_per_tensor", 8.0, per_tensor),
            ("torch.quantize_per_channel, by row", 8 + 64 / x_ND.shape[1], per_channel),
        )
    ]


def _time_hivemind(x_ND: Tensor, clock: Clock, copy_s: float) -> list[Timing]:
    compression = importlib.import_module("hivemind.compression")
    info = compression.CompressionInfo.from_tensor(x_ND)

    def timing(name: str) -> Timing:
        codec: Any = getattr(compression, name)()
        packed = codec.compress(x_ND, info)
        return Timing(
            name=f"hivemind {name}",
            bits_per_element=8 * len(packed.buffer) / x_ND.numel(),
            encode_s=clock(lambda: codec.compress(x_ND, info)),
            decode_s=clock(lambda: codec.extract(packed)),
            copy_s=copy_s,
        )

    return [timing(name) for name in ("Uniform8BitQuantization", "Quantile8BitQuantization")]
