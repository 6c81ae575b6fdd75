"""Whatever a peer puts on the line, a wire gives what a message may hold, or refuses it as no valid frame."""

import json
import marshal
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from isthmus.errors import FrameError
from isthmus.job.codec import parse_boundary
from isthmus.plan.end_of_step import Evaluated, Tally, Verdict
from isthmus.plan.scenario import Hop
from isthmus.plan.types import MessageKind
from isthmus.train.build import BuiltStage
from isthmus.train.device import Device
from isthmus.train.pipeline import PipelineActor, PipelineConfig
from isthmus.train.wire import Delivery
from isthmus.wan.packet import Buffer, Packet, pack, unpack
from tests.train.chain import CutCase, config
from tests.train.test_codecs import cut
from tests.train.test_wire import WIDTH, microbatch
from tests.train.wires import End, Joined, with_integers

ACTIVATION, EVALUATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT
NUM_CASES = 2000
NUM_SLOW_CASES = 30_000
MOST_BYTES = 1 << 30
TOKENS = 64
CODECS = {
    "raw": ("raw", "raw"),
    "int8": ("rotate | int8", "rotate | int8(stochastic)"),
    "int2": ("center | int2", "int4"),
    "topk": ("topk(0.5) | int8", "topk(0.5) | int8"),
    "svd": ("svd(0.6) | fp16", "svd(0.6) | fp16"),
    "subspace": ("subspace(4, anchor=tokens) | int8", "int8"),
}


@dataclass(frozen=True)
class Channel:
    """One kind of message: a good one, and a member that awaits it."""

    agreed: PipelineConfig
    kind: MessageKind
    stream: str
    packet: Packet
    make: Callable[[], Joined]

    def receive(self, stream: str, packet: Packet) -> Delivery:
        """What a member takes of a packet, up to where its passes find it."""
        with self.make() as wires:
            end = wires.before if self.kind in (GRADIENT, MessageKind.TALLY) else wires.behind
            found = end.receive(stream, packet)
            actor_of(self.agreed, end).take(found.message, found.tensors)
        return found


def actor_of(agreed: PipelineConfig, end: End) -> PipelineActor:
    nothing: Any = None
    built = BuiltStage(stage=nothing, optimizer=nothing, device=Device("cpu"))
    return PipelineActor(agreed, end.member, built, on_span=end.record.span)


def tensor_channel(agreed: PipelineConfig, kind: MessageKind, codecs: tuple[str, str]) -> Channel:
    """A channel of activations, or of gradients whose activation has left."""
    sent = microbatch((9, 4))
    if agreed.is_cached:
        sent["held"] = torch.zeros(0).long()
    named = (("hidden", codecs[0]), ("gradient", codecs[1]))

    def make() -> Joined:
        wires = Joined(agreed, hidden_width=WIDTH)
        if kind is GRADIENT:
            wires.before.send(ACTIVATION, sent, codecs=named)
        return wires

    with Joined(agreed, hidden_width=WIDTH) as wires:
        if kind is GRADIENT:
            wires.down(ACTIVATION, sent, codecs=named)
            _, stream, packet = wires.behind.send(GRADIENT, {"hidden": sent["hidden"]}, codecs=named[1:])
        else:
            _, stream, packet = wires.before.send(kind, sent, codecs=named)
    return Channel(agreed, kind, stream, packet, make)


def facts_channel(agreed: PipelineConfig, kind: MessageKind, facts: Any, tensors: Any) -> Channel:
    def make() -> Joined:
        return Joined(agreed, hidden_width=WIDTH)

    with make() as wires:
        sender = wires.behind if kind is MessageKind.TALLY else wires.before
        _, stream, packet = sender.send(kind, tensors, facts=facts)
    return Channel(agreed, kind, stream, packet, make)


def channels() -> list[Channel]:
    found = []
    for codecs in CODECS.values():
        agreed = config(2, 2, cuts=(cut(*codecs, num_rows=TOKENS),))
        found += [tensor_channel(agreed, kind, codecs) for kind in (ACTIVATION, EVALUATION, GRADIENT)]
    cached = config(2, 2, cuts=(CutCase(num_rows=TOKENS),), first_trained=1, cache_bytes=1 << 16)
    padded = config(2, 2, cuts=(CutCase(num_rows=TOKENS),), keeps_padding=True)
    found += [tensor_channel(agreed, ACTIVATION, CODECS["raw"]) for agreed in (cached, padded)]
    narrow = config(2, 2, cuts=(CutCase(boundary=parse_boundary("bottleneck(3, warmup=9)")),))
    basis = {"weight": torch.randn(6, 3), "none": torch.ones(0)}
    hop = Hop(forward_s=0.1, backward_s=0.1, latency_s=0.1)
    tally = Tally(step=3, loss_sum=math.nan, squared_norms=(1.0, math.inf), busy_s=(0.1, 0.2), hops=(hop,))
    verdict = Verdict(step=3, norm=1.0, windows=(2, 1), codecs=(("raw", "int8"),))
    evaluated = Evaluated(step=3, loss_sum=1.0, num_correct=1, num_targets=2)
    return [
        *found,
        facts_channel(narrow, MessageKind.BASIS, None, basis),
        facts_channel(narrow, MessageKind.TALLY, tally, {}),
        facts_channel(narrow, MessageKind.VERDICT, verdict, {}),
        facts_channel(narrow, MessageKind.EVALUATED, evaluated, {}),
    ]


def copied(value: Any) -> Any:
    """A deep copy; `copy.deepcopy` gives up on values that were spoilt twice and are nested 800 deep."""
    return marshal.loads(marshal.dumps(value))


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 3, 13, 18, 64, 65, 255, 2**24, 2**24 + 1, 2**31, 2**40, 2**53, 2**63,
    2**64, 10**30, 0.0, -0.5, 1e308, math.inf, -math.inf, math.nan, "", "raw", "int8", "rotate | int8",
    "float32", "float64", "bfloat16", "|u1", "<i8", "|i1", "O", "ids", "mask", "held", "hidden", "forward",
    "backward", "evaluation", "tally", "{}", "\ud800", "x" * 70_000, "subspace(4)", "topk(0.9)", [], [0],
    [1, 2], [2, 9], [2, 2**23], [2**23, 2], [[]], {}, {"ids": {}}, {"a": 1}, nested(60), nested(400),
)  # fmt: skip
NAMES = ("ids", "mask", "lengths", "labels", "held", "targets", "hidden", "gradient", "weight", "fill")


class Mutator:
    """Spoils packets, at random but always in the same ways."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def spoil(self, packet: Packet) -> Packet:
        if self.random.random() < 0.3:
            packet = self._integers(packet)
            if self.random.random() < 0.7:
                return packet
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            ways = (self._header, self._header, self._header, self._buffers, self._buffers, self._bytes)
            packet = self.random.choice(ways)(packet)
        return packet

    def _integers(self, packet: Packet) -> Packet:
        """Other integers, which their header describes as it should, and rows that may fit them."""
        if not packet.header["integers"]:
            return packet
        shape = (self.random.randrange(4), self.random.randrange(12))
        mask = self._mask(*shape)
        found = {
            "ids": self._tensor(shape),
            "mask": mask,
            "labels": self._tensor(shape),
            "targets": self._tensor((2,)),
        }
        found["held"] = torch.arange(self.random.randrange(3))
        for name in self.random.sample(["ids", "labels", "targets", "held"], self.random.randrange(3)):
            found[name] = self._tensor(self.random.choice((shape, shape[:1], (3, 2), (2,))))
        for name in self.random.sample(["mask", "labels", "held"], self.random.randrange(4)):
            del found[name]
        spoilt = with_integers(packet, found, has_hidden=self.random.random() < 0.8)
        about: Any = spoilt.header["hidden"]
        if about is None:
            return spoilt
        num_rows = self.random.choice((int(mask.sum()), mask.numel(), self.random.randrange(20)))
        rows = [about[0], about[1], num_rows, about[3]]
        return Packet({**spoilt.header, "hidden": rows}, spoilt.buffers)

    def _mask(self, num_rows: int, length: int) -> torch.Tensor:
        """Padding is on the right; nothing else can be sent."""
        lengths = [[self.random.randint(0, length)] for _ in range(num_rows)]
        return (torch.arange(length) < torch.tensor(lengths).view(num_rows, 1)).long()

    def _tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        return torch.randint(-90, 91, shape, generator=generator)

    def _header(self, packet: Packet) -> Packet:
        header = copied(dict(packet.header))
        places = list(_places(header))
        where, key = self.random.choice(places)
        match self.random.randrange(5):
            case 0 if isinstance(where, dict):
                del where[key]
            case 1 if isinstance(where, dict):
                where[self.random.choice(NAMES)] = copied(self._value(places))
            case 2 if isinstance(where[key], int) and not isinstance(where[key], bool):
                where[key] += self.random.choice((-1, 1, 7, -where[key], 2**20))
            case _:
                where[key] = copied(self._value(places))
        return Packet(header, packet.buffers)

    def _value(self, places: Sequence[tuple[Any, Any]]) -> Any:
        """One from the list, or what stands elsewhere in the header."""
        if self.random.random() < 0.3:
            where, key = self.random.choice(places)
            return where[key]
        return self.random.choice(VALUES)

    def _buffers(self, packet: Packet) -> Packet:
        buffers: list[Buffer] = [bytearray(one) for one in packet.buffers]
        number = self.random.randrange(len(buffers) + 1)
        own = bytearray(buffers[number]) if number < len(buffers) else bytearray()
        match self.random.randrange(6):
            case 0:
                own = own[: self.random.randrange(len(own) + 1)]
            case 1:
                own += self.random.randbytes(self.random.randrange(40))
            case 2:
                own = bytearray(self.random.randbytes(len(own)))
            case 3 if own:
                for _ in range(3):
                    own[self.random.randrange(len(own))] = self.random.randrange(256)
            case 4:
                self.random.shuffle(buffers)
            case _:
                buffers[number : number + 1] = [own] * self.random.randrange(3)
        if number < len(buffers):
            buffers[number] = own
        return Packet(packet.header, buffers)

    def _bytes(self, packet: Packet) -> Packet:
        body = bytearray(b"".join(pack_any(packet).segments))
        for _ in range(self.random.randrange(1, 3)):
            body[self.random.randrange(len(body))] = self.random.randrange(256)
        return unpack(memoryview(body))


def pack_any(packet: Packet) -> Any:
    """The body of a packet; what no sender could put into one is refused as the receiver would."""
    try:
        return pack(packet)
    except (ValueError, RecursionError) as error:
        raise FrameError("no packet") from error


def _places(tree: Any) -> Any:
    """Every place in a header: what holds it, and its key there."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from _places(tree[key])


def fuzz(num_cases: int, *, seed: int) -> tuple[int, int]:
    """Try so many packets; gives how many were taken, and how many refused."""
    mutator, every = Mutator(seed), channels()
    for channel in every:
        channel.receive(channel.stream, channel.packet)
    num_taken = 0
    for case in range(num_cases):
        channel = every[case % len(every)]
        stream = channel.stream if mutator.random.random() < 0.97 else "forward"
        try:
            packet = mutator.spoil(channel.packet)
        except FrameError:
            continue
        try:
            found = channel.receive(stream, packet)
        except FrameError:
            continue
        except BaseException as error:
            error.add_note(f"case {case} of {channel.kind}: {dict(packet.header)}"[:3000])
            raise
        num_taken += 1
        assert sum(one.numel() for one in found.tensors.values()) <= 2**24 + TOKENS * WIDTH
    return num_taken, num_cases - num_taken


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
def test_spoilt_packets_are_refused_and_nothing_else_happens() -> None:
    before = peak_bytes()
    num_taken, num_refused = fuzz(NUM_CASES, seed=1)
    assert num_taken > NUM_CASES / 20, "bytes of hidden states may be anything"
    assert num_refused > NUM_CASES / 2
    assert peak_bytes() - before < MOST_BYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [2, 3])
def test_many_spoilt_packets_are_refused_and_nothing_else_happens(seed: int) -> None:
    before = peak_bytes()
    fuzz(NUM_SLOW_CASES, seed=seed)
    assert peak_bytes() - before < MOST_BYTES
