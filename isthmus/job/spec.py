"""The job as one frozen model: what is trained, on which clouds, over which links."""

import hashlib
import json
import re
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from isthmus.errors import UserError
from isthmus.job.conflicts import find_conflicts
from isthmus.job.fields import Frozen
from isthmus.job.findings import FieldError, describe_place, suggest
from isthmus.job.limits import AcceleratorSpec, LimitsSpec
from isthmus.job.network import CloudSpec, LinkSpec
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

# What a site may set for itself, what is measured, and what a plan must keep to do not make it another job.
_NOT_IN_DIGEST: Final[dict[str, Any]] = {
    "accelerator": True,
    "limits": True,
    "cloud": {"__all__": {"certificates", "proxy", "gateway", "profile"}},
    "link": {"__all__": {"bandwidth_bps", "rtt_s", "jitter_s", "handling_s", "connection_bps"}},
}


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
        return hashlib.sha256(json.dumps(self.agreed(), sort_keys=True).encode()).hexdigest()

    def agreed(self) -> dict[str, Any]:
        """All that every cloud must agree on, as tables."""
        return self.model_dump(mode="json", exclude=_NOT_IN_DIGEST)
