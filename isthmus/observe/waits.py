"""What a rank waits for when it does not compute: as its spans say, else told by what it does next."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from isthmus.events import COMPUTE_KINDS, WAITING_KIND, Span
from isthmus.intervals import Interval, shared_s, total_s
from isthmus.observe.timeline import LINE_MARK, cloud_of

_SAVE_KIND: Final = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """One cloud between its first update and its last, as shares of that time, mean over its ranks."""

    cloud: str
    busy: float
    for_data: float
    saving: float
    """While this cloud, or one that it waits for, writes a checkpoint."""
    for_activations: float
    for_gradients: float
    for_other_stages: float
    """From the last backward to the update."""
    other: float
    """Of the first stage before a forward, where it waits neither for data nor for a checkpoint."""

    @property
    def bubble(self) -> float:
        """All of it."""
        return 1 - self.busy


_REASONS: Final = (
    "busy",
    "for_data",
    "saving",
    "for_activations",
    "for_gradients",
    "for_other_stages",
    "other",
)


def waits_of(
    spans: Iterable[Span], *, cloud: str, is_first: bool, starts_s: Sequence[float] = ()
) -> Waits | None:
    """Where the time of a cloud went; None where it has not updated twice.

    Nobody waits between a stop and the start after it.
    """
    computed: defaultdict[str, list[Span]] = defaultdict(list)
    reading: defaultdict[str, list[Interval]] = defaultdict(list)
    saving: list[Interval] = []
    for span in sorted(spans, key=lambda one: one.start_s):
        if span.kind == _SAVE_KIND and LINE_MARK not in span.track:
            # A simulated copy that crosses a line does so beside the computation.
            saving.append((span.start_s, span.end_s))
        elif cloud_of(span.track) != cloud:
            continue
        elif span.kind in COMPUTE_KINDS:
            computed[span.track].append(span)
        elif span.kind == WAITING_KIND:
            reading[span.track].append((span.start_s, span.end_s))
    found = [_shares(own, reading[track], saving, is_first, starts_s) for track, own in computed.items()]
    totals = [one for one in found if one is not None]
    if not totals:
        return None
    shares = {reason: sum(one[reason] for one in totals) / len(totals) for reason in _REASONS}
    return Waits(cloud=cloud, **shares)


def _shares(
    computed: Sequence[Span],
    reading: Sequence[Interval],
    saving: Sequence[Interval],
    is_first: bool,
    starts_s: Sequence[float],
) -> dict[str, float] | None:
    updates = [place for place, span in enumerate(computed) if span.kind == "optimize"]
    if len(updates) < 2:
        return None
    measured = computed[updates[0] : updates[-1] + 1]
    elapsed_s = measured[-1].end_s - measured[0].end_s
    gaps: defaultdict[str, list[Interval]] = defaultdict(list)
    for before, span in pairwise(measured):
        if any(before.end_s < start_s <= span.start_s for start_s in starts_s):
            elapsed_s -= span.start_s - before.end_s
        elif span.start_s > before.end_s:
            gaps[_reason(span, is_first)].append((before.end_s, span.start_s))
    spent_s = dict.fromkeys(_REASONS, 0.0) | {"busy": sum(span.duration_s for span in measured[1:])}
    for reason, own in gaps.items():
        data_s = shared_s(own, reading)
        told_s = shared_s(own, [*reading, *saving])
        spent_s["for_data"] += data_s
        spent_s["saving"] += told_s - data_s
        spent_s[reason] += total_s(own) - told_s
    return {reason: amount_s / elapsed_s for reason, amount_s in spent_s.items()} if elapsed_s else None


def _reason(span: Span, is_first: bool) -> str:
    match span.kind:
        case "backward":
            return "for_gradients"
        case "optimize":
            return "for_other_stages"
    return "other" if is_first else "for_activations"
