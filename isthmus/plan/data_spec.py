"""What the members of data parallel between clouds agree on, and the facts that they exchange.

`plan/data.py` has their scheduler, `plan/rounds.py` the exchange, `plan/membership.py` who takes part.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from isthmus.plan.orders import Count
from isthmus.plan.types import Facts, Member

MAX_CLOUDS: Final = 64
MAX_CURSORS: Final = 2048
"""The most cursors, one for each cloud and fragment, that fit into facts."""

Digest = Annotated[str, Field(max_length=64)]
Clouds = Annotated[tuple[Count, ...], Field(max_length=MAX_CLOUDS)]
"""Clouds by their numbers in the specification."""
Fragments = Annotated[tuple[Count, ...], Field(max_length=MAX_CURSORS)]
Cursors = Annotated[tuple[Count, ...], Field(max_length=MAX_CURSORS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What all members agree on.

    Each cloud trains its own copy of the model. A round synchronises one fragment of it: fragment p every
    `sync_every` steps, with an equal distance between fragments. With `sync_every` 1 and no delay the clouds
    synchronise exactly.
    """

    clouds: tuple[tuple[Member, ...], ...]
    """The members of each cloud; the first leads, and exchanges for all."""
    num_steps: int
    num_microbatches: int = 1
    """The micro-batches of a rank in a step."""
    sync_every: int = 30
    num_fragments: int = 1
    delay_steps: int = 0
    """How many steps after its boundary a round is mixed into the local parameters."""
    quorum: int = 1
    """The least number of clouds whose deltas make a round."""
    grace_s: float = 0.0
    """How long a round that has its quorum waits for the other clouds."""
    save_every_s: float | None = None
    on_partition: Literal["wait", "continue"] = "wait"
    """With "wait", only clouds that are more than half of all commit rounds."""
    wait_s: float = 3600.0
    """How long a cloud waits for others before it fails."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.clouds) <= MAX_CLOUDS or not all(self.clouds):
            raise ValueError(f"from one to {MAX_CLOUDS} clouds with members are needed")
        if not 1 <= self.num_fragments <= self.sync_every or not 0 <= self.delay_steps < self.sync_every:
            raise ValueError("num_fragments and delay_steps fit into sync_every")
        if not 1 <= self.quorum <= len(self.clouds) or min(self.num_steps, self.num_microbatches) < 1:
            raise ValueError("a quorum is from one to all clouds, of one step and micro-batch at least")
        if len(self.clouds) * self.num_fragments > MAX_CURSORS:
            raise ValueError(f"clouds times fragments are over {MAX_CURSORS}")

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, cloud by cloud."""
        return tuple(member for cloud in self.clouds for member in cloud)

    @property
    def num_rounds(self) -> int:
        """All rounds: those of every boundary before the end, and a last one of each fragment at the end."""
        return (self.num_steps * self.num_fragments - 1) // self.sync_every + self.num_fragments

    def due(self, number: int) -> int:
        """The step at which a round starts."""
        return min(self.num_steps, (number + 1) * self.sync_every // self.num_fragments)

    def fragment(self, number: int) -> int:
        """The fragment that a round synchronises."""
        return number % self.num_fragments

    def owners(self, clouds: Clouds) -> tuple[Member, ...]:
        """The members that own the shards of a fragment when these clouds take part, shard by shard."""
        return tuple(self.clouds[cloud][0] for cloud in clouds)

    def cloud_of(self, member: Member) -> int:
        """The number of a member's cloud."""
        return next(index for index, cloud in enumerate(self.clouds) if cloud[0].cloud == member.cloud)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Facts):
    """What a delta holds: a cloud's own steps from `since` to `until`, which read so many tokens."""

    cloud: Count
    since: Count
    until: Count
    num_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Facts):
    """DELTA: one shard of a cloud's delta, to the member that owns the shard."""

    view: Count
    share: Share
    num_shards: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommit(Facts):
    """COMMIT: one shard averaged over these clouds, from its owner to all; no tokens change nothing."""

    view: Count
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_CLOUDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Facts):
    """STATE: the outer parameters of one fragment after so many rounds, and all fragments that are sent."""

    view: Count
    rounds: Count
    digest: Digest
    fragments: Fragments
    is_whole: bool
    """Whether the receiver has other rounds than the donor, so that nothing of its own can stay."""
    cursors: Cursors
    """Up to which step each cloud is in each fragment, cloud by cloud."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded(Facts):
    """What a leader tells of a round: the clouds that are live, up to date and averaged, and a digest."""

    number: int
    view: int
    live: tuple[int, ...]
    participating: tuple[int, ...]
    shares: tuple[Share, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEnded(Facts):
    """What a leader tells at the end: all rounds with their digest, and the steps of its cloud."""

    rounds: int
    digest: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState(Facts):
    """What a cloud saves beside its parameters."""

    view: Count
    rounds: Count
    digest: Digest
    cursors: Cursors
    step: Count
    cursor: Count
    mixed: Count
    since: Cursors
    num_tokens: Cursors
