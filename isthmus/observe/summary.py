"""What a run came to, read from its events: step time, bubble, hidden share of WAN time, bytes."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.events import (
    CODING_KINDS,
    COMPUTE_KINDS,
    MEASURED_KIND,
    STARTED_KIND,
    WAITING_KIND,
    Event,
    Fact,
    Span,
    read_events,
)
from isthmus.intervals import shared_s, total_s, union
from isthmus.observe.recorded import event_files, step_values

_NUM_WARM_UP_STEPS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSummary:
    """One cloud: the share of time it did not compute, and of incoming transfers that it computed through."""

    cloud: str
    bubble: float
    hidden_share: float | None
    received_bytes: int
    coding_share: float = 0.0
    """Of the time, beside the computation."""
    data_share: float = 0.0
    """Of the time, waiting for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingError:
    """The worst of the messages one way that their sender measured; an error of None lost everything."""

    track: str
    """Such as east→west."""
    relative_error: float | None
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run; the first step, in which everything warms up, does not count for times."""

    num_steps: int
    step_s: float | None
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    clouds: tuple[CloudSummary, ...]
    plain_validation_loss: float | None = None
    """With everything crossing raw."""
    bits_per_element: float | None = None
    """Of what crossed between stages, with all that goes around it on the line."""
    ratio_to_float32: float | None = None
    ratio_to_bfloat16: float | None = None
    coding_errors: tuple[CodingError, ...] = ()

    @property
    def bubble(self) -> float | None:
        """The mean over clouds."""
        return statistics.fmean(one.bubble for one in self.clouds) if self.clouds else None

    @property
    def hidden_share(self) -> float | None:
        """The mean over clouds that receive something."""
        shares = [one.hidden_share for one in self.clouds if one.hidden_share is not None]
        return statistics.fmean(shares) if shares else None

    @property
    def num_bytes(self) -> int:
        """What crossed all links, without headers."""
        return sum(one.received_bytes for one in self.clouds)


def summarize(run: Path) -> Summary:
    """Read the events of all clouds that are here."""
    by_cloud = {file.stem: list(read_events(file)) for file in event_files(run)}
    facts = [event for events in by_cloud.values() for event in events if isinstance(event, Fact)]
    steps = step_values(facts)
    losses = [_number(step["loss"]) for step in steps]
    durations_s = [_number(step["duration_s"]) for step in steps][_NUM_WARM_UP_STEPS:]
    evaluations = [fact.values for fact in facts if fact.kind == "evaluation"]
    validation = [_number(one["loss"]) for one in evaluations if not one.get("is_plain")]
    plain = [_number(one["loss"]) for one in evaluations if one.get("is_plain")]
    bits = bits_per_element(facts)
    return Summary(
        num_steps=len(steps),
        step_s=statistics.median(durations_s) if durations_s else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation_loss=validation[-1] if validation else None,
        clouds=tuple(summarize_cloud(cloud, events) for cloud, events in by_cloud.items()),
        plain_validation_loss=plain[-1] if plain else None,
        bits_per_element=bits,
        ratio_to_float32=32 / bits if bits else None,
        ratio_to_bfloat16=16 / bits if bits else None,
        coding_errors=coding_errors(facts),
    )


def coding_errors(facts: Iterable[Fact]) -> tuple[CodingError, ...]:
    """The worst measured message of each way over a cut."""
    worst: dict[str, CodingError] = {}
    for values in (fact.values for fact in facts if fact.kind == MEASURED_KIND):
        error = values["relative_error"]
        found = CodingError(
            track=str(values["track"]),
            relative_error=None if error is None else _number(error),
            cosine=_number(values["cosine"]),
        )
        known = worst.get(found.track)
        if known is None or found.cosine < known.cosine:
            worst[found.track] = found
    return tuple(worst.values())


def bits_per_element(facts: Iterable[Fact]) -> float | None:
    """What one number that crossed between stages took on the line; None if nothing crossed."""
    sent = [fact.values for fact in facts if fact.kind == "sent"]
    num_elements = sum(_number(one["num_elements"]) for one in sent)
    return 8 * sum(_number(one["num_bytes"]) for one in sent) / num_elements if num_elements else None


def summarize_cloud(cloud: str, events: Iterable[Event]) -> CloudSummary:
    """What one cloud's spans say, from the end of its first step to the end of its last."""
    listed = list(events)
    spans = [event for event in listed if isinstance(event, Span)]
    updates = [span.end_s for span in spans if span.kind == "optimize"]
    measured = _within(spans, updates)
    busy = union((one.start_s, one.end_s) for one in measured if one.kind in COMPUTE_KINDS)
    moving = union((one.start_s, one.end_s) for one in measured if one.kind == "transfer")
    coding_s = sum(one.duration_s for one in measured if one.kind in CODING_KINDS)
    data_s = sum(one.duration_s for one in measured if one.kind == WAITING_KIND)
    elapsed_s = 0.0
    if len(updates) > _NUM_WARM_UP_STEPS:
        elapsed_s = updates[-1] - updates[0] - _stopped_s(listed, since_s=updates[0])
    return CloudSummary(
        cloud=cloud,
        bubble=max(0.0, 1 - total_s(busy) / elapsed_s) if elapsed_s else 0.0,
        hidden_share=shared_s(moving, busy) / total_s(moving) if moving else None,
        received_bytes=sum(span.num_bytes for span in spans if span.kind == "transfer"),
        coding_share=coding_s / elapsed_s if elapsed_s else 0.0,
        data_share=data_s / elapsed_s if elapsed_s else 0.0,
    )


def _stopped_s(events: Iterable[Event], *, since_s: float) -> float:
    """How long no process was there, between a stop since that moment and the start after it."""
    total_s, last_s = 0.0, math.inf
    for event in events:
        if isinstance(event, Span):
            last_s = event.end_s
        elif event.kind == STARTED_KIND and last_s >= since_s:
            total_s += max(0.0, event.at_s - last_s)
    return total_s


def _within(spans: Sequence[Span], updates: Sequence[float]) -> list[Span]:
    if len(updates) <= _NUM_WARM_UP_STEPS:
        return []
    return [span for span in spans if updates[0] <= span.start_s and span.end_s <= updates[-1]]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
