"""The cases: pipelines over emulated WANs, drawn by a seed so that every kind comes about as often."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Final, TypeVar

from emulated import MBPS, MS, Wan, wan_of
from sleeping import Nap

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import Pair
from isthmus.plan.scenario import Policy
from predicted.stages import WIDTH, ModelStages, SleepingStages, Stages

RAW: Final = ("raw", "raw")
INT4: Final = ("rotate | int4", "rotate | int4(stochastic)")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One real run, and before it one prediction."""

    number: int
    wan: Wan
    stages: Stages
    num_microbatches: int
    codec: tuple[str, str]
    policy: str = Policy.WAN_ONE_F_ONE_B.value

    @property
    def pair(self) -> Pair:
        """The codecs of all its cuts."""
        forward, backward = self.codec
        return Pair(forward=parse_codec(forward), backward=parse_codec(backward))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of cases that it is one of."""
        slowest_bps = min(line.bandwidth_bps for line in self.wan.lines)
        longest_s = max(line.rtt_s for line in self.wan.lines)
        return (
            f"p = {self.stages.num_stages}",
            "raw" if self.codec == RAW else "int4",
            "equal stages" if self.stages.is_equal else "unequal stages",
            f"m = {self.num_microbatches}",
            "round trip ≥ 100 ms" if longest_s >= 100 * MS else "round trip < 100 ms",
            "bandwidth ≤ 100 Mbit/s" if slowest_bps <= 100 * MBPS else "bandwidth > 100 Mbit/s",
        )


# Longest pipelines first: a cloud that is no part of the others is then done, and disturbs nothing.
WANS: Final = (
    wan_of((10, 1000), (40, 200), (100, 100)),
    wan_of((200, 100), (20, 1000), (80, 50)),
    wan_of((20, 500), (100, 100)),
    wan_of((0, 100), (0, 100)),
    wan_of((60, 200), (150, 1000)),
    wan_of((0, 1000)),
    wan_of((5, 20)),
    wan_of((20, 100)),
    wan_of((40, 500)),
    wan_of((60, 50)),
    wan_of((100, 100)),
    wan_of((150, 20)),
    wan_of((200, 1000)),
)
QUICK_WANS: Final = (wan_of((20, 500), (100, 100)), wan_of((5, 20)), wan_of((40, 500)))
NUM_CASES: Final = 42
NUM_QUICK_CASES: Final = 6
NUM_QUICK_MODEL_CASES: Final = 3

# Forward and backward of the slowest stage. With more micro-batches each is shorter, so that steps stay
# between 0.3 and 2 s; with more clouds longer, since every message takes some milliseconds of a processor and
# clouds that share two of them would wait for each other, as real ones do not.
_INTERVAL_S: Final = {4: 0.060, 8: 0.060, 16: 0.045, 32: 0.036, 64: 0.027}
_LEAST_INTERVAL_S: Final = {2: 0.024, 3: 0.042, 4: 0.054}
_MOST_MICROBATCHES: Final = {2: 64, 3: 32, 4: 32}
_UNEQUAL: Final = (1.0, 0.5, 0.75, 0.9)
_NUM_TOKENS: Final = (64, 32, 16)
_MAX_LINE_S: Final = 1.2


def sleeping_cases(wans: Sequence[Wan], num_cases: int, *, seed: int) -> list[Case]:
    """So many cases, about as many on each WAN and of each kind."""
    random = Random(seed)
    kinds = _deck(list(product(_INTERVAL_S, (RAW, INT4), (True, False))), random)
    places = enumerate(_spread(wans, num_cases))
    return [_sleeping_case(number, wan, next(kinds), random) for number, wan in places]


def model_cases(*, device: str, is_quick: bool) -> list[Case]:
    """Real compute: clouds on one device; raw cases have few micro-batches, for each is 16 MiB."""
    near, thin, far = wan_of((10, 1000)), wan_of((50, 400)), wan_of((100, 1000))
    three, four = wan_of((20, 1000), (80, 400)), wan_of((10, 1000), (40, 400), (100, 1000))
    equal, unequal, equal_3, unequal_3, equal_4, unequal_4 = (
        ModelStages(num_layers=one, width=256, num_tokens=64) if is_quick else ModelStages(num_layers=one)
        for one in ((6, 6), (4, 8), (4, 4, 4), (3, 6, 3), (3, 3, 3, 3), (2, 4, 4, 2))
    )
    kinds = [
        (four, equal_4, 32, INT4),
        (four, unequal_4, 16, INT4),
        (three, equal_3, 32, INT4),
        (three, unequal_3, 16, INT4),
        (three, equal_3, 4, RAW),
        (near, equal, 32, INT4),
        (near, unequal, 16, INT4),
        (near, equal, 4, RAW),
        (thin, equal, 16, INT4),
        (thin, unequal, 8, INT4),
        (thin, equal, 4, RAW),
        (far, unequal, 32, INT4),
        (far, equal, 8, INT4),
        (far, equal, 4, RAW),
    ]
    return [
        Case(
            number=number,
            wan=wan,
            stages=replace(stages, device=device),
            num_microbatches=num_microbatches,
            codec=codec,
        )
        for number, (wan, stages, num_microbatches, codec) in enumerate(kinds)
    ]


def _sleeping_case(number: int, wan: Wan, kind: tuple[int, tuple[str, str], bool], random: Random) -> Case:
    wanted, codec, is_equal = kind
    num_clouds = len(wan.clouds)
    num_microbatches = min(wanted, _MOST_MICROBATCHES[num_clouds])
    factors = [1.0] * num_clouds if is_equal else random.sample(_UNEQUAL, num_clouds)
    longest_s = max(_INTERVAL_S[num_microbatches], _LEAST_INTERVAL_S[num_clouds])
    forwards_s = [one / max(factors) * longest_s / 3 for one in factors]
    return Case(
        number=number,
        wan=wan,
        stages=SleepingStages(
            naps=tuple(Nap(forward_s=one, backward_s=2 * one) for one in forwards_s),
            num_tokens=_num_tokens(wan, num_microbatches, codec),
        ),
        num_microbatches=num_microbatches,
        codec=codec,
    )


def _num_tokens(wan: Wan, num_microbatches: int, codec: tuple[str, str]) -> int:
    """As many as keep the slowest line busy for about a second at most."""
    slowest_bps, spec = min(line.bandwidth_bps for line in wan.lines), parse_codec(codec[0])
    fitting = (
        one
        for one in _NUM_TOKENS
        if num_microbatches * 8 * spec.wire_bytes(one, WIDTH) / slowest_bps <= _MAX_LINE_S
    )
    return next(fitting, _NUM_TOKENS[-1])


def _deck(cards: Sequence[T], random: Random) -> Iterator[T]:
    """All cards in random order, over and over."""
    while True:
        yield from random.sample(cards, len(cards))


def _spread(wans: Sequence[Wan], num_cases: int) -> list[Wan]:
    """A place for each case, in the order of the WANs."""
    return [wans[number * len(wans) // num_cases] for number in range(num_cases)]
