"""A sketch of a few steps for plans that are no pipelines: who computes when, what is under way meanwhile."""

from collections.abc import Iterator
from typing import Final

from isthmus.events import Span
from isthmus.plan.plan import Form, Plan

_NUM_STEPS: Final = 4
# Of a step, at the least, so that it can be seen.
_SHOWN_TRAVEL: Final = 0.08


def sketch(plan: Plan) -> tuple[Span, ...]:
    """Spans of a few steps; numbers in boxes are those of steps."""
    return tuple(_copies(plan) if plan.form is Form.DATA else _generators(plan))


def _copies(plan: Plan) -> Iterator[Span]:
    """All clouds compute; what they exchange is under way beside it, or in between where they wait."""
    step_s = plan.estimate.step_s
    waiting_s = plan.estimate.bubble.total * step_s
    for step in range(_NUM_STEPS):
        start_s, end_s = step * step_s, (step + 1) * step_s
        for stage in plan.stages:
            yield _span(stage.cloud, "forward", step, start_s, end_s - waiting_s)
        sent_s = end_s - waiting_s if waiting_s else start_s
        for link in plan.links:
            yield _span("→".join(link.between), "transfer", step, sent_s, end_s)
            yield _span("→".join(link.between[::-1]), "transfer", step, sent_s, end_s)


def _generators(plan: Plan) -> Iterator[Span]:
    """Generators run ahead; the discriminator takes batch after batch as they come."""
    step_s = plan.estimate.step_s
    *generators, judge = plan.stages
    travel_s = _SHOWN_TRAVEL * step_s
    free_s = 0.0
    for step in range(_NUM_STEPS):
        ready_s = step * step_s + generators[0].busy_s
        for stage, link in zip(generators, plan.links, strict=True):
            yield _span(stage.cloud, "forward", step, ready_s - stage.busy_s, ready_s)
            yield _span("→".join(link.between), "transfer", step, ready_s, ready_s + travel_s)
        begin_s = max(free_s, ready_s + travel_s)
        free_s = begin_s + judge.busy_s
        yield _span(judge.cloud, "backward", step, begin_s, free_s)


def _span(track: str, kind: str, step: int, start_s: float, end_s: float) -> Span:
    return Span(track=track, name=f"{kind} 0.{step}", kind=kind, start_s=start_s, end_s=end_s)
