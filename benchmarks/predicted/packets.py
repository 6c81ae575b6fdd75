"""Packets of a cut, made and read as the product does it: what they weigh, and how long it takes."""

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from isthmus.codec.ends import receiving_end, sending_end
from isthmus.codec.meter import Meter
from isthmus.plan.types import Arrived, Pass, Send
from isthmus.train.crossing.bench import Bench
from isthmus.train.crossing.cut import Codebook, Cut
from isthmus.train.crossing.ends import DownCut, UpCut
from isthmus.train.crossing.messages import Gradient, Microbatch
from isthmus.train.device import Device
from predicted.cases import Case

_NUM_WARM_UPS: Final = 3
_NUM_ROUNDS: Final = _NUM_WARM_UPS + 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Packets:
    """Packets of one cut at one cloud: bytes on the line, and seconds to make and to read one, each way."""

    forward_bytes: int
    backward_bytes: int
    make_forward_s: float
    read_forward_s: float
    make_backward_s: float
    read_backward_s: float


def weigh_packets(case: Case, width: int) -> Packets:
    """Make and read packets as a cut does, both ends here."""
    device = Device(case.stages.device)
    down, up = _cut_ends(case, width, device)
    batch = case.stages.source(1).batch
    hidden = torch.randn(*batch.ids.shape, width).to(device.torch_device)
    microbatch = Microbatch(batch=batch, num_step_targets=1, crossing=hidden)
    taken = [_there_and_back(down, up, microbatch, number, device) for number in range(_NUM_ROUNDS)]
    times_s = [statistics.median(one) for one in zip(*taken[_NUM_WARM_UPS:], strict=True)]
    return Packets(
        forward_bytes=down.bench.volume.num_bytes // len(taken),
        backward_bytes=up.bench.volume.num_bytes // len(taken),
        make_forward_s=times_s[0],
        read_forward_s=times_s[1],
        make_backward_s=times_s[2],
        read_backward_s=times_s[3],
    )


def _there_and_back(
    down: DownCut, up: UpCut, microbatch: Microbatch, number: int, device: Device
) -> tuple[float, ...]:
    """Seconds to make and to read an activation's packet, and then its gradient's."""
    if microbatch.crossing is None:
        raise ValueError("nothing crosses")
    marks = [time.perf_counter()]
    about = Send(kind=Pass.FORWARD, step=0, microbatch=number)
    there = down.pack(microbatch, about=about, after=device.mark())
    marks.append(time.perf_counter())
    up.unpack(there, Arrived(kind=Pass.FORWARD, step=0, microbatch=number))
    marks.append(time.perf_counter())
    about = Send(kind=Pass.BACKWARD, step=0, microbatch=number)
    gradient = Gradient(values=microbatch.crossing, mask=None)
    back = up.pack(gradient, about=about, after=device.mark())
    marks.append(time.perf_counter())
    down.unpack(back, Arrived(kind=Pass.BACKWARD, step=0, microbatch=number))
    marks.append(time.perf_counter())
    return tuple(end_s - start_s for start_s, end_s in pairwise(marks))


def _cut_ends(case: Case, width: int, device: Device) -> tuple[DownCut, UpCut]:
    cut, place = Cut(codecs=case.pair), device.torch_device

    def bench() -> Bench:
        return Bench(
            lane=device.lane(),
            leaves="",
            arrives="",
            hidden_width=width,
            on_span=lambda _: None,
            on_measured=lambda _: None,
        )

    def meter() -> Meter:
        return Meter(every=0, num_microbatches=1)

    down = DownCut(
        book=Codebook(cut, hidden_width=width, make=lambda one: sending_end(one, device=place), seed=0),
        bench=bench(),
        meter=meter(),
        is_plain=lambda _: False,
        keeps_padding=False,
    )
    up = UpCut(
        book=Codebook(cut, hidden_width=width, make=lambda one: receiving_end(one, device=place), seed=0),
        bench=bench(),
        meter=meter(),
        is_plain=lambda _: False,
        keeps_padding=False,
    )
    return down, up
