"""The job as one frozen model: what is trained, on which clouds, over which links."""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from isthmus.errors import UserError
from isthmus.job.conflicts import find_conflicts
from isthmus.job.fields import Frozen
from isthmus.job.findings import FieldError, Tables, describe_place, suggest
from isthmus.job.limits import AcceleratorSpec, LimitsSpec
from isthmus.job.network import CloudSpec, LinkSpec
from isthmus.job.roles import KeyRole, describe_changes, meaning_of, select
from isthmus.job.sections import (
    AutoStrategy,
    CheckpointSpec,
    DataSpec,
    ModelSpec,
    PipelineStrategy,
    Strategy,
    TrainSpec,
)

_JOB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_SEED: Final = 2**63 - 1
_MAX_CLOUDS: Final = 64

CONFLICT: Final = "conflict"
"""Type of the validation error that carries what `find_conflicts` found."""


def _checked_job_name(name: str) -> str:
    if not _JOB_NAME.fullmatch(name):
        raise FieldError(
            f"{name!r} cannot name a folder",
            cure="use up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return name


class Job(Frozen):
    """One training run: what is trained, on which clouds, over which links."""

    name: Annotated[str, AfterValidator(_checked_job_name)] = Field(
        description="name of the run's folder", examples=["two-clouds"]
    )
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="seed of everything random", examples=[7])
    model: ModelSpec | None = Field(
        default=None, description="what is trained", examples=[{"source": "Qwen/Qwen3-0.6B"}]
    )
    data: DataSpec | None = Field(
        default=None, description="what is trained on", examples=[{"source": "corpus/*.jsonl"}]
    )
    cloud: tuple[CloudSpec, ...] = Field(
        max_length=_MAX_CLOUDS,
        strict=False,
        description="the clusters, at most 64",
        examples=[[{"name": "east"}]],
    )
    link: tuple[LinkSpec, ...] = Field(
        default=(),
        strict=False,
        description="the WAN between them",
        examples=[[{"between": ["east", "west"]}]],
    )
    strategy: Strategy = Field(
        default=AutoStrategy(kind="auto"), description="how the work is split", examples=[{"kind": "auto"}]
    )
    train: TrainSpec = Field(
        default=TrainSpec(), description="how long and how fast", examples=[{"steps": 1000}]
    )
    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), description="when the state is saved", examples=[{"every": "5 min"}]
    )

    limits: LimitsSpec = Field(
        default=LimitsSpec(), description="what the planner must keep to", examples=[{"budget_usd": 500.0}]
    )
    accelerator: tuple[AcceleratorSpec, ...] = Field(
        default=(),
        strict=False,
        description="devices that the catalogue does not have, or has with other figures",
        examples=[[{"name": "mine"}]],
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        tables = self.tables()
        found = [f"{describe_place(one.place, tables)}: {one.what}" for one in find_conflicts(tables)]
        if found:
            raise PydanticCustomError(CONFLICT, "{found}", {"found": "; ".join(found)})
        return self

    def tables(self) -> dict[str, object]:
        """Return the job as the TOML file's tables, with units as text."""
        return self.model_dump(mode="json", exclude_none=True)

    def cloud_named(self, name: str) -> CloudSpec:
        """Return the cloud of that name."""
        names = [cloud.name for cloud in self.cloud]
        if name not in names:
            raise UserError(f"the job has no cloud {name!r}", hint=suggest(name, names))
        return self.cloud[names.index(name)]

    def links_of(self, cloud_name: str) -> tuple[LinkSpec, ...]:
        """Return the links that end at a cloud."""
        return tuple(link for link in self.link if cloud_name in link.between)

    def used(self) -> Self:
        """The job with only the clouds that take part, where the strategy names them."""
        named = self.strategy.clouds if isinstance(self.strategy, PipelineStrategy) else None
        if named is None:
            return self
        clouds = tuple(cloud for cloud in self.cloud if cloud.name in named)
        links = tuple(link for link in self.link if set(link.between) <= set(named))
        return self.model_copy(update={"cloud": clouds, "link": links})

    def dialer(self, link: LinkSpec) -> CloudSpec:
        """Return the end that opens the link's connections: the one that does not listen, else the first."""
        first, second = map(self.cloud_named, link.between)
        return first if first.listen is None or second.listen is not None else second

    def listener(self, link: LinkSpec) -> CloudSpec:
        """Return the end that waits for the link's connections."""
        return self.cloud_named(link.peer_of(self.dialer(link).name))

    @property
    def digest(self) -> str:
        """SHA-256 in hex of all that every cloud must agree on."""
        return _digest(select(self._all_keys(), KeyRole.MEANING, KeyRole.OPERATION))

    @property
    def meaning_digest(self) -> str:
        """SHA-256 in hex of all that makes a run the one it is."""
        return _digest(meaning_of(self._all_keys()))

    def changes_from(self, before: "Job", role: KeyRole) -> tuple[str, ...]:
        """Every key of a role whose value is another one than in an earlier job, with both values."""
        return describe_changes(before._all_keys(), self._all_keys(), role)

    def _all_keys(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def _digest(tables: Tables) -> str:
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def stage_order(job: Job) -> tuple[str, ...]:
    """The clouds in a row, each linked to the next: in the job's order, else along the links."""
    names = tuple(cloud.name for cloud in job.cloud)
    linked = {frozenset(link.between) for link in job.link}
    given = job.strategy.clouds if isinstance(job.strategy, PipelineStrategy) else None
    for order in (names, _along_links(names, linked)) if given is None else (given,):
        if len(order) == len(names) and all(frozenset(pair) in linked for pair in pairwise(order)):
            return order
    raise UserError(
        "the links do not join the clouds in a row, which a pipeline needs",
        hint="list the clouds in the order of their stages, and give each a [[link]] to the next",
    )


def _along_links(names: Sequence[str], linked: set[frozenset[str]]) -> tuple[str, ...]:
    """Follow the links from the first cloud that has only one."""
    ends = [name for name in names if sum(name in pair for pair in linked) <= 1]
    order = ends[:1]
    while order:
        following = [name for name in names if name not in order and frozenset((order[-1], name)) in linked]
        if len(following) != 1:
            break
        order.append(following[0])
    return tuple(order)
