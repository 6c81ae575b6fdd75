"""What is tried on each line: the automatic choice, and fixed codecs that could be as fast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from emulated import MBPS, MS, LineShape, Wan
from predicted.cases import RAW, Case
from predicted.stages import WIDTH, SleepingStages
from sleeping import Nap

from isthmus.plan.codecs import Bounds, CodecLevel, Crossing, Figures, Loss, Pair, choose, codec_levels

NAP: Final = Nap(forward_s=0.010, backward_s=0.020)
NUM_TOKENS: Final = 256
NUM_MICROBATCHES: Final = 16
RTT_MS: Final = 40.0
CROSSING: Final = Crossing(num_rows=NUM_TOKENS, width=WIDTH)
LEVELS: Final = codec_levels(WIDTH, shares_ids=True)
_COMPUTE_S: Final = NAP.forward_s + NAP.backward_s

# What is so much longer on the line than the fastest is not the best choice, and not run.
_HOPELESS: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """A line that carries `factor` times less from one step to another, and then as before."""

    factor: float
    first_step: int
    end_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run on a line: with the codecs of a rung, or those that are chosen.

    `mistake` is what the job says of the bandwidth, as a share of what was probed: probes grow old.
    """

    name: str
    rung: CodecLevel | None = None
    loss: Loss = Loss.SOME
    mistake: float = 1.0
    slow_down: SlowDown | None = None

    @property
    def pair(self) -> Pair | None:
        """The codecs that the job names, None where it says "auto"."""
        return None if self.rung is None else Pair(forward=self.rung.forward, backward=self.rung.backward)


AUTO: Final = Trial(name="auto")
DEFAULT: Final = Trial(name="auto, slight loss", loss=Loss.SLIGHT)
TOLD_MORE: Final = Trial(name="auto, told 4 × the bandwidth", mistake=4.0)
TOLD_LESS: Final = Trial(name="auto, told ¼ of the bandwidth", mistake=0.25)

SLOWED: Final = Trial(
    name="auto, ¼ of the line in steps 8–19",
    loss=Loss.SLIGHT,
    slow_down=SlowDown(factor=4.0, first_step=8, end_step=20),
)

Grid = Mapping[tuple[float, float], tuple[Trial, ...]]
"""Lines by what they carry down and up, in Mbit/s, with the automatic trials on them."""

# So that every rung has its turn; then lines whose directions differ.
GRID: Final[Grid] = {
    (1000, 1000): (AUTO,),
    (400, 400): (AUTO,),
    (200, 200): (AUTO,),
    (100, 100): (AUTO, TOLD_MORE, TOLD_LESS, SLOWED),
    (50, 50): (AUTO,),
    (20, 20): (AUTO, DEFAULT),
    (8, 8): (AUTO,),
    (4, 4): (AUTO,),
    (500, 50): (AUTO,),
    (50, 500): (AUTO,),
}
QUICK_GRID: Final[Grid] = {(100, 100): (AUTO, SLOWED), (500, 50): (AUTO,), (50, 500): (AUTO,)}


def cases_of(grid: Grid) -> list[Case]:
    """One for each line; its trials have their own codecs."""
    stages = SleepingStages(naps=(NAP, NAP), num_tokens=NUM_TOKENS)
    return [
        Case(
            number=number,
            wan=Wan(lines=(LineShape(rtt_s=RTT_MS * MS, down_bps=down * MBPS, up_bps=up * MBPS),)),
            stages=stages,
            num_microbatches=NUM_MICROBATCHES,
            codec=RAW,
        )
        for number, (down, up) in enumerate(grid)
    ]


def line_of(case: Case) -> LineShape:
    """Its only line."""
    (line,) = case.wan.lines
    return line


def trials_of(case: Case, autos: Sequence[Trial]) -> list[Trial]:
    """The automatic trials of a line, then all fixed ones that could be best of what loses no more."""
    promising = [rung for auto in autos for rung in _promising(case, expected_loss(case, auto))]
    return [*autos, *(Trial(name=str(rung.forward), rung=rung) for rung in LEVELS if rung in promising)]


def expected_loss(case: Case, auto: Trial) -> Loss:
    """What the figures of the emulated line and of the naps ask for."""
    line = line_of(case)
    figures = Figures(interval_s=_COMPUTE_S, down_bps=line.down_bps, up_bps=line.up_bps)
    return choose(CROSSING, figures, levels=LEVELS, bounds=Bounds(loss=auto.loss)).loss


def _promising(case: Case, loss: Loss) -> list[CodecLevel]:
    allowed = {rung: _on_line_s(rung, case) for rung in LEVELS if rung.loss <= loss}
    fastest_s = max(_COMPUTE_S, min(allowed.values()))
    return [rung for rung, on_line_s in allowed.items() if on_line_s <= _HOPELESS * fastest_s]


def _on_line_s(rung: CodecLevel, case: Case) -> float:
    """The longer of an activation and its gradient."""
    pair, line = Pair(forward=rung.forward, backward=rung.backward), line_of(case)
    return 8 * max(pair.forward_bytes(CROSSING) / line.down_bps, pair.backward_bytes(CROSSING) / line.up_bps)
