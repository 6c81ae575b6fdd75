"""The place of a process among the ranks of its cloud, as its launcher gives it."""

from dataclasses import dataclass
from typing import Final

from isthmus.job.address import Address

EXIT_LOST: Final = 75
"""The exit code of a process that could not end by itself after a sibling was lost: worth another try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of a cloud; `master` is where the ranks of the cloud find each other.

    Where `is_served`, the launcher has something listening at the master's address already; else rank 0 does.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    master: Address | None = None
    is_served: bool = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its cloud."""
        return self.rank == 0
