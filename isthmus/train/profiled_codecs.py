"""Measures what codecs take at both ends of a cut, copies to and from the host included."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch

from isthmus.job import CodecSpec, Job, LinkSpec
from isthmus.plan.codecs import RAW_PAIR, Crossing, Loss, Pair, codec_levels, texts_of
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN, Pipeline
from isthmus.plan.steering import Cut
from isthmus.plan.times import CodingTimes, fit_line
from isthmus.plan.types import Member, Message, MessageKind
from isthmus.train.device import Device, Mark
from isthmus.train.integers import IDS
from isthmus.train.pipeline import cut_end
from isthmus.train.run_config import RunConfig

_NUM_WARM_UPS: Final = 1
_NUM_ROUNDS: Final = 6
_HERE, _BEYOND = Member("here"), Member("beyond")

_Taken = dict[tuple[str, str, int], list[float]]
"""Times by codec, by whether it encodes or decodes, and by number of rows."""
T = TypeVar("T")


def measure_codings(
    job: Job, *, width: int, num_rows: tuple[int, int], device: Device
) -> tuple[CodingTimes, ...]:
    """What the codecs that a job may use take for messages of the fewest and of the most rows."""
    taken: _Taken = defaultdict(list)
    for pair in dict.fromkeys(_pairs(job, width)):
        for number in sorted(set(num_rows)):
            _cross(pair, number, width, device, taken)
    codecs = dict.fromkeys(codec for codec, _, _ in taken)
    return tuple(_coding(codec, taken, width) for codec in codecs)


def _pairs(job: Job, width: int) -> Iterator[Pair]:
    """Raw, the codecs that links have, and where one is open all levels that can be told without learning."""
    yield RAW_PAIR
    for link in job.link:
        if link.boundary.crossing_width(width) != width:
            continue
        given = given_pair(link)
        if given is not None:
            yield given
        else:
            yield from open_pairs(job, width)


def open_pairs(job: Job, width: int) -> list[Pair]:
    """The codecs that a link whose codec is open may get and that learn nothing, the least lossy first."""
    most = Loss[job.limits.codec_loss.upper()]
    return [
        Pair(forward=level.forward, backward=level.backward)
        for level in codec_levels(width)
        if level.loss <= most and not level.is_joint
    ]


def given_pair(link: LinkSpec) -> Pair | None:
    """The codecs that the job gives a link, raw in place of a subspace; None where one is open."""
    forward, backward = link.codec.forward, link.codec.backward
    if isinstance(forward, CodecSpec) and isinstance(backward, CodecSpec):
        pair = Pair(forward=forward, backward=backward)
        return pair if pair.subspace is None else RAW_PAIR
    return None


def _cross(pair: Pair, num_rows: int, width: int, device: Device, taken: _Taken) -> None:
    """Send activations there and gradients back through both ends of a cut, and time each."""
    cut = Cut(crossing=Crossing(num_rows=num_rows, width=width), codecs=pair)
    pipeline = Pipeline(
        stages=((_HERE,), (_BEYOND,)), num_steps=1, num_microbatches=1, max_in_flight=1, cuts=(cut,)
    )
    config = RunConfig(pipeline=pipeline, seed=0)
    sending, receiving = (cut_end(config, 0, device, width, is_sender=one) for one in (True, False))
    hidden_BTD = torch.randn(1, num_rows, width, device=device.torch_device)
    integers = {IDS: torch.zeros((1, num_rows), dtype=torch.int64)}
    forward, backward = texts_of(pair)
    keys = [(codec, verb, num_rows) for codec in (forward, backward) for verb in ("encode", "decode")]

    def cross(item: int) -> tuple[float, ...]:
        codecs = ((HIDDEN, forward), (GRADIENT, backward))
        there = Message(MessageKind.ACTIVATION, 0, item, _HERE, (_BEYOND,), None, codecs)
        back = Message(MessageKind.GRADIENT, 0, item, _BEYOND, (_HERE,), None, ((HIDDEN, backward),))
        out, encode_s = _timed(lambda: sending.encode(there, hidden_BTD, integers, after=Mark()))
        _, decode_s = _timed(lambda: receiving.decode(there, out, integers))
        home, encode_back_s = _timed(lambda: receiving.encode(back, hidden_BTD, {}, after=Mark()))
        _, decode_back_s = _timed(lambda: sending.decode(back, home, {}))
        return encode_s, decode_s, encode_back_s, decode_back_s

    for item in range(_NUM_WARM_UPS + _NUM_ROUNDS):
        times = cross(item)
        if item >= _NUM_WARM_UPS:
            for key, one in zip(keys, times, strict=True):
                taken[key].append(one)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """A lane waits for its device, so what coding gives is there when it returns."""
    started_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started_s


def _coding(codec: str, taken: _Taken, width: int) -> CodingTimes:
    lines = {
        verb: fit_line(
            [
                (float(rows * width), statistics.median(times))
                for (name, kind, rows), times in taken.items()
                if (name, kind) == (codec, verb)
            ]
        )
        for verb in ("encode", "decode")
    }
    return CodingTimes(
        codec=codec,
        encode_fixed_s=lines["encode"][0],
        encode_s_per_element=lines["encode"][1],
        decode_fixed_s=lines["decode"][0],
        decode_s_per_element=lines["decode"][1],
    )
