"""What the members of generator–discriminator pre-training agree on, and the facts that they exchange.

`plan/feed.py` has their schedulers.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from isthmus.plan.orders import Count, Orders
from isthmus.plan.types import Facts, Member, MessageKind

MAX_KEPT: Final = 4096
"""The most batches that a generator may keep: what it saves of them fits into its facts."""

Kept = Annotated[tuple[Count, ...], Field(max_length=MAX_KEPT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTag(Facts):
    """What IDS says of a batch."""

    generator: Count
    number: Count
    version: Count
    """How many updates the generator's weights had seen."""
    num_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance(Facts):
    """What CREDIT allows: batches below `limit`. After a start or a loss a generator sends from `next` on."""

    next: Count
    limit: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredTo(Facts):
    """The first number that no save of the discriminator covers; `is_final` when the run has ended."""

    number: Count
    is_final: bool = False


FACTS: Final[dict[MessageKind, type[Facts]]] = {
    MessageKind.IDS: BatchTag,
    MessageKind.CREDIT: Allowance,
    MessageKind.COVERED: CoveredTo,
    MessageKind.ORDER: Orders,
}
"""The facts that the messages of this strategy carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated(Facts):
    """What GENERATE gives at one rank."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStep(Facts):
    """What the discriminator tells of its queues at the end of a step; one value for each generator."""

    step: int
    num_batches: tuple[int, ...]
    """The batches of the step."""
    num_queued: tuple[int, ...]
    staleness: tuple[int, ...]
    """By how many versions of the weights a batch was behind the newest that has arrived, at most."""
    waited_s: float
    """How long the discriminator had no batch to work on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLost(Facts):
    """A generator does not take part until it returns; the discriminator has no batch from this number on."""

    generator: int
    next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorState(Facts):
    """What the discriminator saves: the next number of each generator, and the state of the merge."""

    next: tuple[Count, ...]
    turns: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorState(Facts):
    """What a generator saves: its next number, and the tokens of each batch that it keeps below it."""

    next: Count
    kept_tokens: Kept = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStream:
    """One generator: the ranks of its cloud, how many batches it makes, and its share of the stream."""

    members: tuple[Member, ...]
    quota: int
    weight: float = 1.0
    batches_per_step: int = 1
    """The batches after which the generator updates its own weights."""

    def __post_init__(self) -> None:
        if not self.members or min(self.quota, self.batches_per_step) < 1 or self.weight <= 0:
            raise ValueError("a generator needs members, a quota, batches in a step and a weight above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorDiscriminator:
    """What all members agree on."""

    discriminator: tuple[Member, ...]
    generators: tuple[GeneratorStream, ...]
    batches_per_step: int = 1
    max_queued: int = 8
    """The most batches of one generator that wait at the discriminator."""
    max_kept: int = MAX_KEPT
    """The most batches that a generator keeps; a save becomes due when half as many have been taken."""
    save_every_s: float | None = None
    on_lost: Literal["wait", "continue"] = "wait"
    wait_s: float = 3600.0
    """How long a lost member is waited for: then the run fails or, with "continue", ends without it."""

    def __post_init__(self) -> None:
        if not self.discriminator or not self.generators:
            raise ValueError("a discriminator and at least one generator are needed")
        if min(self.batches_per_step, self.max_queued) < 1:
            raise ValueError("a step and a queue hold one batch at least")
        if not max(2 * self.batches_per_step, self.max_queued) <= self.max_kept <= MAX_KEPT:
            raise ValueError(f"max_kept is from two steps and a full queue to {MAX_KEPT}")

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, the discriminator's first."""
        return self.discriminator + tuple(member for one in self.generators for member in one.members)

    def generator_of(self, cloud: str) -> int | None:
        """The number of the generator in a cloud."""
        found = (index for index, one in enumerate(self.generators) if one.members[0].cloud == cloud)
        return next(found, None)
