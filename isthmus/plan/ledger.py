"""What a cloud knows of rounds: the shards that have arrived, and what is in its outer parameters."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from isthmus.plan.data_spec import RoundCommit
from isthmus.plan.types import ScheduleError

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
