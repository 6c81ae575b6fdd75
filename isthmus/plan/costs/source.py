"""Where the costs of a model come from: measured where torch is installed, else formulas and estimates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.job import Job
from isthmus.plan.costs.messages import Messages
from isthmus.plan.costs.parts import ModelCosts, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model, as far as planning goes."""

    costs_of: Callable[[Workload], ModelCosts]
    num_layers: int
    width: int
    vocabulary_size: int
    messages: Messages
    cuts: frozenset[int] | None = None
    """Where a cut is possible; None for anywhere."""
    max_length: int | None = None
    """Of a sequence; None where it is not known."""
    note: str | None = None
    """What a user should know of where its costs come from."""


class CostSource(Protocol):
    """Measures the model of a job, or one of another configuration in its place."""

    def __call__(self, job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:
        """The model with its costs; None where it cannot be measured."""


def nothing_measured(job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:  # noqa: ARG001 others do
    """The source where there is no torch."""
    return None
