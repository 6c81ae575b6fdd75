"""A benchmark that must end in time: what it has found by then counts, and it says what is missing."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock behind which nothing new is begun; None where there is time enough."""

    end_s: float | None = None

    @classmethod
    def after(cls, limit_s: float | None) -> "Deadline":
        """So many seconds from now."""
        return cls(None if limit_s is None else time.monotonic() + limit_s)

    def leaves(self, work_s: float = 0.0) -> bool:
        """Whether work that takes so long, begun now, ends in time."""
        return self.end_s is None or time.monotonic() + work_s < self.end_s


def tell(record: Mapping[str, Any]) -> None:
    """Print one finished case as a JSON line at once, so that it is there whatever becomes of the others."""
    print(json.dumps(record), flush=True)
