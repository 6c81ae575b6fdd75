"""What the two halves of a bottleneck hold: numbers of parameters, and bytes that the sender observes with.

All of it is float32 and whole on every rank, however the ranks share the rest of their stage.
"""

from dataclasses import dataclass
from typing import Final

from isthmus.job.boundary import Anchor, BottleneckSpec
from isthmus.plan.costs.arithmetic import WIDE_BYTES

# As the model has them; a test holds them to it.
_MAX_ENTRIES: Final = 2**24
_MIN_OBSERVED_IDS: Final = 8192
_ROW_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfCosts:
    """One stage's half of a bottleneck."""

    num_parameters: int
    num_trained: int
    """Those that learn, which have gradients and moments."""
    largest_parameter: int
    """Elements of the largest tensor that learns."""
    buffer_bytes: int

    @property
    def held_bytes(self) -> int:
        """Its values, and where nothing is spared its gradients and moments."""
        return WIDE_BYTES * (self.num_parameters + 3 * self.num_trained) + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The bottleneck of a link; hidden states of full width cross until it begins."""

    num_warmup_steps: int
    hidden_width: int
    down: HalfCosts
    """Of the sending stage."""
    up: HalfCosts
    """Of the receiving stage."""


def bottleneck_costs(spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> Bottleneck:
    """A bottleneck between stages of a model of this width and vocabulary."""
    projection, anchors = spec.rank * width, _anchors(spec, width, vocabulary_size)
    num_anchors = sum(anchors)
    # The factor that scales rows by token id.
    unit_bytes = WIDE_BYTES if spec.anchor is Anchor.TOKENS else 0
    return Bottleneck(
        num_warmup_steps=spec.num_warmup_steps,
        hidden_width=width,
        # The sender's anchors do not learn.
        down=HalfCosts(
            num_parameters=projection + num_anchors,
            num_trained=projection,
            largest_parameter=projection,
            buffer_bytes=unit_bytes + _observed_bytes(spec, width, vocabulary_size),
        ),
        up=HalfCosts(
            num_parameters=projection + num_anchors,
            num_trained=projection + num_anchors,
            largest_parameter=max(projection, *anchors),
            buffer_bytes=unit_bytes,
        ),
    )


def _anchors(spec: BottleneckSpec, width: int, vocabulary_size: int) -> tuple[int, ...]:
    """Elements of each tensor of either end's anchors."""
    if spec.anchor is Anchor.NONE:
        return (width,)
    if vocabulary_size * width <= _MAX_ENTRIES:
        return width, vocabulary_size * width
    code_width = max(1, min(width // 2, max(2 * spec.rank, _MAX_ENTRIES // vocabulary_size)))
    return width, vocabulary_size * code_width, code_width * width


def _observed_bytes(spec: BottleneckSpec, width: int, vocabulary_size: int) -> int:
    """Sums of the warm-up, which stay: of all hidden states, of their scatter, and by token id."""
    whole = WIDE_BYTES * (width * width + width + 3)
    if spec.anchor is Anchor.NONE:
        return whole
    num_rows = min(vocabulary_size, max(_MIN_OBSERVED_IDS, _MAX_ENTRIES // width))
    return whole + WIDE_BYTES * (num_rows + 1) * (width + 2) + _ROW_NUMBER_BYTES * vocabulary_size
