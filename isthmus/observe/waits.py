"""What a rank waits for when it does not compute: told by what it does next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from isthmus.events import COMPUTE_KINDS, Span
from isthmus.observe.timeline import cloud_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """One cloud between its first update and its last, as shares of that time, mean over its ranks."""

    cloud: str
    busy: float
    for_data: float
    """Of the first stage: between an update and the next forward."""
    for_activations: float
    for_gradients: float
    for_other_stages: float
    """From the last backward to the update."""

    @property
    def bubble(self) -> float:
        """All of it."""
        return 1 - self.busy


_REASONS = ("busy", "for_data", "for_activations", "for_gradients", "for_other_stages")


def waits_of(
    spans: Iterable[Span], *, cloud: str, is_first: bool, starts_s: Sequence[float] = ()
) -> Waits | None:
    """Where the time of a cloud went; None where it has not updated twice.

    Nobody waits between a stop and the start after it.
    """
    by_track: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda one: one.start_s):
        if span.kind in COMPUTE_KINDS and cloud_of(span.track) == cloud:
            by_track.setdefault(span.track, []).append(span)
    found = [_waits(own, is_first, starts_s) for own in by_track.values()]
    totals = [one for one in found if one is not None]
    if not totals:
        return None
    shares = {reason: sum(one[reason] for one in totals) / len(totals) for reason in _REASONS}
    return Waits(cloud=cloud, **shares)


def _waits(spans: Sequence[Span], is_first: bool, starts_s: Sequence[float]) -> dict[str, float] | None:
    updates = [place for place, span in enumerate(spans) if span.kind == "optimize"]
    if len(updates) < 2:
        return None
    measured = spans[updates[0] : updates[-1] + 1]
    spent_s = dict.fromkeys(_REASONS, 0.0)
    elapsed_s = measured[-1].end_s - measured[0].end_s
    for before, span in pairwise(measured):
        gap_s = max(0.0, span.start_s - before.end_s)
        spent_s["busy"] += span.duration_s
        if any(before.end_s < start_s <= span.start_s for start_s in starts_s):
            elapsed_s -= gap_s
        else:
            spent_s[_reason(before, span, is_first)] += gap_s
    return {reason: amount_s / elapsed_s for reason, amount_s in spent_s.items()} if elapsed_s else None


def _reason(before: Span, span: Span, is_first: bool) -> str:
    match span.kind:
        case "backward":
            return "for_gradients"
        case "optimize":
            return "for_other_stages"
    is_start = before.kind == "optimize" or span.kind != before.kind
    return "for_data" if is_first and is_start else "for_activations"
