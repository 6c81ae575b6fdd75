"""What the clouds of data parallel agree on, the facts that they exchange, and which clouds take part.

Clouds agree on one view after the other, and only the newest view commits rounds:

    chief ──► Ruling(view, members)     proposes a view: itself and all clouds that it and they reach
          ◄── Report                    a cloud accepts, leaves older views and says how far it is
          ──► Ruling(is_installed)      from the best state: who has it continues, the others get it

The chief is the first cloud that a cloud reaches. A cloud accepts views from its chief alone and in rising
order, so of two views that share a cloud only the later can continue. Where more than half of all clouds must
accept, two views at a time never commit, and one of those who accept knows every round that was committed.
A cloud that has restarted may have forgotten what it accepted, so it counts only when all clouds are there.
"""

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import Field

from isthmus.plan.types import Count, Facts, Member, ScheduleError

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
    """The members of each cloud, as many in each; the first leads, and each exchanges its shards."""
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
    gathers: bool = False
    """Whether each cloud sends its whole delta to all, which sum alike, instead of shards to owners."""
    adapts: bool = True
    """Whether a slower cloud runs fewer steps in a round; else the others wait, and all is reproducible."""
    evaluate_every: int | None = None
    num_validation_microbatches: int = 0
    on_partition: Literal["wait", "continue"] = "wait"
    """With "wait", only clouds that are more than half of all commit rounds."""
    wait_s: float = 3600.0
    """How long a cloud waits for others before it fails."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.clouds) <= MAX_CLOUDS or not all(self.clouds):
            raise ValueError(f"from one to {MAX_CLOUDS} clouds with members are needed")
        if len({len(cloud) for cloud in self.clouds}) > 1:
            raise ValueError("each rank exchanges with the same rank of other clouds, so all have as many")
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

    def mixed_at(self, rounds: int) -> int:
        """The step at which so many rounds are mixed in, the same at all clouds; saves are named after it."""
        return min(self.num_steps, self.due(rounds - 1) + self.delay_steps) if rounds else 0

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
    """What a delta holds: a cloud's own steps from `since` to `until`, with so many tokens to learn from."""

    cloud: Count
    since: Count
    until: Count
    num_tokens: Count
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of the whole delta, where large ones are clipped; else 0."""


def weights_of(shares: Sequence[Share]) -> list[float]:
    """What each share counts in the mean: its tokens, and no more than the median of all norms.

    A cloud whose data is unlike the others' would lead them away. The norms come with the shares, so that
    all clouds reckon with the same bits.
    """
    num_tokens = max(sum(share.num_tokens for share in shares), 1)
    median = statistics.median(share.norm for share in shares)
    return [
        share.num_tokens / num_tokens * (min(1.0, median / share.norm) if share.norm else 1.0)
        for share in shares
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Facts):
    """DELTA: one shard of a cloud's delta, to the member that owns it; the only one where clouds gather."""

    view: Count
    share: Share
    shard: Count
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
    content: str = ""
    """The digest of the outer parameters of the round's fragment; empty where it is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Facts):
    """The end of DELTA: the norm of the whole delta, where large ones are clipped."""

    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Facts):
    """The end of OUTER: the digest of the outer parameters of the fragment."""

    content: str


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


MAX_OPEN_ROUNDS: Final = 1024
MAX_LIVES: Final = 2**20
"""A cloud's restarts count modulo this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Facts):
    """TALLY: how far a cloud is, to the primary of its view, or to the chief when what it sees changes."""

    view: Count
    """The newest view that it has accepted."""
    sees: Clouds
    current_view: Count
    """The newest view in which its state was up to date."""
    complete: Count
    """The number of rounds, from the first on, of which it has all commits."""
    digest: Digest
    is_restarted: bool = False
    is_done: bool = False
    wants_state: bool = False
    wants_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound(Facts):
    """A round that takes no more deltas: those of these clouds are summed."""

    number: Count
    clouds: Clouds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling(Facts):
    """VERDICT: what the primary of a view has decided so far; each one holds all of it."""

    view: Count
    members: Clouds
    is_installed: bool = False
    base: Count = 0
    """The number of rounds that the view starts from, the view in which they were known, their digest."""
    base_view: Count = 0
    digest: Digest = ""
    donor: Count = 0
    """The cloud that sends its state to those that lack rounds."""
    current: Clouds = ()
    """The clouds whose state is up to date."""
    closed: Annotated[tuple[ClosedRound, ...], Field(max_length=MAX_OPEN_ROUNDS)] = ()
    committed: Count = 0
    applied: Count = 0
    content: Digest = ""
    """The number of rounds in the primary's outer parameters, and the digest of what the last one changed."""
    saves: Count = 0
    """The newest number of rounds of which all clouds save the state, and whether they stop then."""
    stops: bool = False
    is_over: bool = False


class Views:
    """The views as one cloud knows them; `outbox` holds what it has to send to other clouds."""

    def __init__(self, spec: DataParallel, cloud: int, report: Callable[[], Report]) -> None:
        self._cloud = cloud
        self._num_clouds = len(spec.clouds)
        self._needs_majority = spec.on_partition == "wait"
        self._quorum = spec.quorum
        self._grace_s = spec.grace_s
        self._report = report
        self._seen = set(range(self._num_clouds))
        self._sees: dict[int, frozenset[int]] = {}
        self._restarts = 0
        self.number = 0
        self.members = tuple(range(self._num_clouds))
        self.is_installed = True
        self.reports: dict[int, Report] = {}
        """The newest of each cloud in this view, at its primary."""
        self.outbox: list[tuple[tuple[int, ...], Facts]] = []
        self._deadlines_s: dict[int, float] = {}
        self.new_deadlines_s: list[float] = []
        """The times at which a grace period ends that the last ruling has started."""

    @property
    def primary(self) -> int:
        """The cloud that proposed this view and decides in it."""
        return self.number % self._num_clouds

    @property
    def is_primary(self) -> bool:
        """Whether this cloud decides."""
        return self.primary == self._cloud

    @property
    def sees(self) -> tuple[int, ...]:
        """The clouds that this one reaches, itself among them."""
        return tuple(sorted(self._seen))

    @property
    def num_needed(self) -> int:
        """How many clouds must have a round before it is committed."""
        return (self._num_clouds if self._needs_majority else len(self.members)) // 2 + 1

    def install(self) -> None:
        """Begin this view, with all grace periods still to come."""
        self.is_installed = True
        self._deadlines_s = {}

    def restart(self, restarts: int) -> None:
        """Begin again, in no view: this cloud may have forgotten what it has accepted and proposed."""
        self._restarts = restarts % MAX_LIVES
        self.is_installed = False
        self._look(self._cloud)

    def lose(self, cloud: int) -> None:
        """Take in that a cloud is lost."""
        if cloud in self._seen:
            self._seen.discard(cloud)
            self._sees.pop(cloud, None)
            self._look(None)

    def join(self, cloud: int) -> None:
        """Take in that a cloud is there, for the first time or again."""
        self._seen.add(cloud)
        self._sees.pop(cloud, None)
        self._look(cloud)

    def take_report(self, sender: int, report: Report) -> bool:
        """Take in a report; whether it is one of this view."""
        if sender not in self._seen:
            return False
        self._sees[sender] = frozenset(report.sees)
        if report.view > self.number:
            if self._is_chief:
                self._propose(self._clique(), above=report.view)
            return False
        is_of_view = report.view == self.number
        if is_of_view and self.is_primary:
            self.reports[sender] = report
        elif self.is_primary and not self.is_installed and sender in self.members:
            # It had not seen this cloud as its chief when the proposal came.
            self.outbox.append(((sender,), self._proposal()))
        if self._is_chief and self._clique() != self.members:
            self._propose(self._clique())
            return False
        return is_of_view

    def take_ruling(self, sender: int, ruling: Ruling) -> bool:
        """Take in a ruling, and accept a later view; whether it is one of the view accepted before."""
        if ruling.view == self.number:
            return sender == self.primary
        if sender != self._chief or self._cloud not in ruling.members:
            return False
        if ruling.view > self.number:
            self.number, self.members, self.is_installed = ruling.view, ruling.members, False
            self.reports = {}
        # A chief that proposes too low a number learns of a higher one.
        self.outbox.append(((sender,), self._report()))
        return False

    def ruling_to_install(self) -> Ruling | None:
        """The ruling that installs this view, when all its members have accepted and they are enough."""
        if not self.is_primary or self.is_installed or any(one not in self.reports for one in self.members):
            return None
        num_sound = sum(not self.reports[one].is_restarted for one in self.members)
        is_enough = 2 * num_sound > self._num_clouds or len(self.members) == self._num_clouds
        if self._needs_majority and not is_enough:
            return None
        donor = max(self.members, key=self._rank)
        best = self.reports[donor]
        return Ruling(
            view=self.number,
            members=self.members,
            is_installed=True,
            base=best.complete,
            base_view=best.current_view,
            digest=best.digest,
            donor=donor,
            current=tuple(one for one in self.members if self._is_like(one, best)),
            committed=best.complete,
        )

    def _is_like(self, cloud: int, best: Report) -> bool:
        report = self.reports[cloud]
        return (report.complete, report.digest) == (best.complete, best.digest)

    def _rank(self, cloud: int) -> tuple[int, int, bool, int]:
        """How good a cloud's state is to start from.

        Of rounds that are complete but not committed only those of the newest view can have been committed
        elsewhere. Where clouds may continue in parts, those that have come further win.
        """
        report = self.reports[cloud]
        found = report.current_view, report.complete
        first, second = found if self._needs_majority else found[::-1]
        return first, second, not report.is_restarted, -cloud

    @property
    def _chief(self) -> int:
        return min(self._seen)

    @property
    def _is_chief(self) -> bool:
        return self._chief == self._cloud

    def _look(self, joined: int | None) -> None:
        """Propose a view if this cloud is the chief and the view has to change, else tell the chief."""
        if not self._is_chief:
            self.outbox.append(((self._chief,), self._report()))
            return
        clique = self._clique()
        if clique != self.members or joined in clique:
            self._propose(clique)

    def _clique(self) -> tuple[int, ...]:
        """This cloud and, in order, every cloud that reaches all those before it and is reached by them."""
        found = [self._cloud]
        for cloud in sorted(self._seen - {self._cloud}):
            if all(self._reach(cloud, one) and self._reach(one, cloud) for one in found):
                found.append(cloud)
        return tuple(found)

    def _reach(self, one: int, other: int) -> bool:
        sees = self._seen if one == self._cloud else self._sees.get(one)
        return sees is None or other in sees

    def _propose(self, members: tuple[int, ...], *, above: int = 0) -> None:
        # The number holds a count, restarts and cloud, so no other cloud and no earlier life has proposed it.
        count = max(self.number, above) // (MAX_LIVES * self._num_clouds) + 1
        self.number = (count * MAX_LIVES + self._restarts) * self._num_clouds + self._cloud
        self.members = members
        self.is_installed = False
        self.reports = {self._cloud: self._report()}
        others = tuple(one for one in members if one != self._cloud)
        if others:
            self.outbox.append((others, self._proposal()))

    def _proposal(self) -> Ruling:
        return Ruling(view=self.number, members=self.members)

    # What the primary of a view decides.

    def rule(self, ruling: Ruling, sent: Mapping[int, Mapping[int, Share]], now_s: float) -> Ruling:
        """The ruling that follows, given the shares that have been sent for each open round."""
        self.new_deadlines_s = []
        closes = tuple(
            ClosedRound(number=number, clouds=tuple(sorted(shares)))
            for number, shares in sent.items()
            if self._is_closing(ruling, number, shares, now_s)
        )
        known = tuple(one for one in ruling.closed if one.number >= ruling.committed)
        reports = [of for of in self.reports.values() if of.current_view == self.number]
        counts = sorted((of.complete for of in reports), reverse=True)
        committed = counts[self.num_needed - 1] if len(counts) >= self.num_needed else 0
        return replace(
            ruling,
            current=tuple(one for one in self.members if self._is_expected(ruling, one)),
            closed=known + closes if closes else ruling.closed,
            committed=max(ruling.committed, committed),
            is_over=len(reports) == len(self.members) and all(of.is_done for of in reports),
        )

    def _is_closing(self, ruling: Ruling, number: int, shares: Mapping[int, Share], now_s: float) -> bool:
        """Whether all clouds that are expected have sent, or a quorum has and the grace period is over."""
        if len(shares) < self._quorum:
            return False
        if all(cloud in shares or not self._is_expected(ruling, cloud) for cloud in self.members):
            return True
        if not any(share.num_tokens for share in shares.values()):
            return False
        if number not in self._deadlines_s:
            self._deadlines_s[number] = now_s + self._grace_s
            self.new_deadlines_s.append(self._deadlines_s[number])
        return now_s >= self._deadlines_s[number]

    def _is_expected(self, ruling: Ruling, cloud: int) -> bool:
        """Whether a cloud is up to date, or will be when it has heard of this view."""
        report = self.reports.get(cloud)
        if report is None:
            return self.number == 0
        is_like_base = (report.complete, report.digest) == (ruling.base, ruling.digest)
        return report.current_view == self.number or is_like_base


_NO_DIGEST: Final = "none"
_NUM_DIGESTS: Final = 4
"""The digests that are kept, in rounds of all fragments."""


class Shards:
    """The commits that owners have sent, by view and round."""

    def __init__(self) -> None:
        self._known: defaultdict[tuple[int, int], dict[int, RoundCommit]] = defaultdict(dict)

    def add(self, number: int, owner: int, commit: RoundCommit) -> None:
        """Take in one shard."""
        self._known[commit.view, number][owner] = commit

    def keep(self, views: Iterable[int]) -> None:
        """Forget the shards of other views."""
        views = set(views)
        for key in [one for one in self._known if one[0] not in views]:
            del self._known[key]

    def missing(self, view: int, number: int, owners: Iterable[int]) -> set[int]:
        """The owners whose shards of a round are not here."""
        known = self._known.get((view, number), {})
        return {owner for owner in owners if owner not in known}

    def take(self, view: int, number: int) -> RoundCommit:
        """The deltas of a round of which all shards are here."""
        commits = set(self._known.pop((view, number)).values())
        if len(commits) > 1:
            raise ScheduleError(f"the owners of round {number} have summed different deltas")
        return commits.pop()


class Ledger:
    """The rounds that are in a cloud's outer parameters: their digest, and the cursors of all clouds."""

    def __init__(self, *, num_clouds: int, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.applied = 0
        self.cursors = [[0] * num_fragments for _ in range(num_clouds)]
        self._digests = {0: ""}

    @property
    def all_cursors(self) -> tuple[int, ...]:
        """Up to which step each cloud is in each fragment, cloud by cloud."""
        return tuple(cursor for of in self.cursors for cursor in of)

    def digest(self, number: int) -> str:
        """The digest of so many rounds; of the newest ones alone, and of those that are complete."""
        return self._digests.get(number, _NO_DIGEST)

    def knows(self, number: int, digest: str) -> bool:
        """Whether so many rounds are here, and the same ones."""
        return self._digests.get(number) == digest

    def complete(self, number: int, commit: RoundCommit) -> None:
        """Know the digest of a round before it is applied."""
        shares = ",".join(f"{one.cloud}:{one.since}-{one.until}" for one in commit.shares)
        text = f"{self._digests[number]}/{number}/{commit.view}/{shares}"
        self._digests[number + 1] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def apply(self, number: int, commit: RoundCommit) -> None:
        """Count a round that is in the outer parameters now."""
        self.applied = number + 1
        for share in commit.shares:
            self.cursors[share.cloud][number % self._num_fragments] = share.until
        oldest = self.applied - _NUM_DIGESTS * self._num_fragments
        self._digests = {one: of for one, of in self._digests.items() if one >= oldest}

    def replace(self, rounds: int, digest: str, cursors: Sequence[int]) -> None:
        """Continue from other rounds."""
        self.applied, self._digests = rounds, {rounds: digest}
        every = self._num_fragments
        self.cursors = [list(cursors[start : start + every]) for start in range(0, len(cursors), every)]

    def disown(self) -> None:
        """Give up all rounds: no other cloud knows them."""
        self.applied, self._digests = 0, {}


LAYERS_PER_FRAGMENT: Final = 3


def num_fragments_of(num_layers: int, given: int | None, *, sync_every: int) -> int:
    """As many fragments as the job says, or about three layers each beside the embeddings and the head."""
    wanted = given or -(-num_layers // LAYERS_PER_FRAGMENT) + 2
    return max(1, min(wanted, num_layers + 2, sync_every))


def fragment_layers(num_layers: int, num_fragments: int) -> tuple[int, ...]:
    """The fragment of each layer, strided; the first of three has the embeddings, the last the head."""
    first, number = (1, num_fragments - 2) if num_fragments > 2 else (0, num_fragments)
    return tuple(first + layer % number for layer in range(num_layers))
