"""The job as one frozen model: what is trained, on which clouds, over which links."""

import enum
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Final, Self, cast

from pydantic import AfterValidator, Field, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from isthmus.errors import FieldError, Problem, UserError
from isthmus.job.fields import Address, Frozen, parse_address
from isthmus.job.network import CloudSpec, LinkSpec
from isthmus.job.sections import (
    AcceleratorSpec,
    AutoStrategy,
    CheckpointSpec,
    DataSpec,
    LimitsSpec,
    ModelSpec,
    PipelineStrategy,
    Strategy,
    TrainSpec,
    plain_name,
)
from isthmus.units import suggest

Tables = Mapping[str, object]
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong at one place of the job's tables."""

    place: Place
    what: str
    cure: str | None = None

    def as_problem(self, tables: Tables) -> Problem:
        """Return it with the place written as a user would."""
        return Problem(key=describe_place(self.place, tables), what=self.what, cure=self.cure)


def describe_place(place: Place, tables: Tables) -> str:
    """Return `cloud "west": ranks` for ("cloud", 1, "ranks"); `cloud[1]: ranks` where it has no name."""
    match place:
        case (str(section), int(index), *keys):
            entry = _describe_entry(section, index, tables)
            return f"{entry}: {_dotted(keys)}" if keys else entry
    return _dotted(place)


def entries(tables: Tables, section: str) -> list[Tables]:
    """Return the tables of `[[section]]`, with an empty one for each entry that is no table."""
    found = tables.get(section)
    if not isinstance(found, list):
        return []
    return [entry if isinstance(entry, dict) else {} for entry in found]


def link_pair(entry: Tables) -> tuple[str, str] | None:
    """Return the two cloud names of a link's table, or None where they cannot be read."""
    match entry.get("between"):
        case [str(first), str(second)]:
            return first, second
    return None


def entry_name(section: str, entry: Tables) -> str | None:
    """Return what users call an entry: a cloud by its name, a link as east-west."""
    if section == "link":
        pair = link_pair(entry)
        return "-".join(pair) if pair else None
    name = entry.get("name")
    return name if isinstance(name, str) else None


def _describe_entry(section: str, index: int, tables: Tables) -> str:
    found = entries(tables, section)
    name = entry_name(section, found[index]) if index < len(found) else None
    return f'{section} "{name}"' if name else f"{section}[{index}]"


def _dotted(keys: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


class KeyRole(enum.Enum):
    """What a change of a key means to a run."""

    MEANING = enum.auto()
    OPERATION = enum.auto()
    SITE = enum.auto()


_MEANING: Final = (
    "name",
    "seed",
    "model.source",
    "model.config",
    "model.frozen_layers",
    "model.lora.r",
    "model.lora.alpha",
    "model.lora.targets",
    "data.source",
    "data.sequence_length",
    "data.task",
    "data.tokenizer",
    "data.text_column",
    "data.pair_column",
    "data.label_column",
    "data.validation_source",
    "data.validation_share",
    "cloud.name",
    "cloud.ranks",
    "link.between",
    "link.boundary",
    # The plan is a part of the run, and these are what it was made from.
    "strategy.kind",
    "strategy.microbatches",
    "strategy.max_in_flight",
    "strategy.policy",
    "strategy.clouds",
    "strategy.layers",
    "strategy.windows",
    "strategy.inner_steps",
    "strategy.fragments",
    "strategy.bits",
    "strategy.generator",
    "strategy.discriminator_cloud",
    "train.batch_tokens",
    "train.learning_rate",
    "train.warmup_share",
    "train.decay",
    "train.weight_decay",
    "train.max_norm",
    "train.precision",
    "train.optimizer_bits",
)
_OPERATION: Final = (
    "model.cache_frozen",
    "model.trust_remote_code",
    "model.lora.merge",
    "cloud.device",
    "cloud.sharding",
    "cloud.memory",
    "cloud.flops",
    "cloud.accelerator",
    "cloud.listen",
    "cloud.usd_per_hour",
    "cloud.inside_bandwidth",
    "link.stripes",
    "link.heartbeat_timeout",
    "link.usd_per_gib",
    "link.codec",
    "link.guard_every",
    "link.guard_cosine",
    "train.steps",
    "train.recompute",
    "train.memory_budget",
    "train.offload_optimizer",
    "train.compile",
    "train.evaluate_every",
    "train.evaluate_without_codec",
    "checkpoint.every",
    "checkpoint.keep",
)
_SITE: Final = (
    "cloud.profile",
    "cloud.gateway",
    "cloud.proxy",
    "cloud.certificates",
    "link.bandwidth",
    "link.rtt",
    "link.jitter",
    "link.handling",
    "link.connection_bandwidth",
    "limits",
    "accelerator",
)

KEY_ROLES: Final[Mapping[str, KeyRole]] = MappingProxyType(
    {
        **dict.fromkeys(_MEANING, KeyRole.MEANING),
        **dict.fromkeys(_OPERATION, KeyRole.OPERATION),
        **dict.fromkeys(_SITE, KeyRole.SITE),
    }
)
"""Of every key of a job, by the names of the file; a table whose keys have one role is one entry."""


def select(tables: Tables, *roles: KeyRole) -> dict[str, Any]:
    """The tables with the keys of some roles only; a section that has none of them is left out."""
    return _select(tables, roles, "")


def meaning_of(tables: Tables) -> dict[str, Any]:
    """What makes a run the one it is; links have no order."""
    return _named(tables, KeyRole.MEANING) | {
        "order": [entry_name("cloud", one) for one in entries(tables, "cloud")]
    }


def describe_changes(there: Tables, here: Tables, role: KeyRole) -> tuple[str, ...]:
    """Every key of a role that differs, with its value there and the one here."""
    found = tuple(_differences(_named(there, role), _named(here, role)))
    if not found and role is KeyRole.MEANING and meaning_of(there) != meaning_of(here):
        return ("its clouds come in another order",)
    return found


def _select(tables: Tables, roles: Collection[KeyRole], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        place = f"{prefix}{key}"
        role = KEY_ROLES.get(place)
        if role in roles:
            found[key] = value
        elif role is None and _has_any(place, roles):
            found[key] = _select_below(value, roles, f"{place}.")
    return found


def _select_below(value: object, roles: Collection[KeyRole], prefix: str) -> object:
    match value:
        case dict():
            return _select(value, roles, prefix)
        case list():
            return [_select(one, roles, prefix) for one in value]
    return value


def _has_any(place: str, roles: Collection[KeyRole]) -> bool:
    return any(key.startswith(f"{place}.") and role in roles for key, role in KEY_ROLES.items())


def _named(tables: Tables, role: KeyRole) -> dict[str, Any]:
    """The keys of a role, with clouds and links by their names."""
    found = select(tables, role)
    for section in ("cloud", "link"):
        names = [entry_name(section, entry) for entry in entries(tables, section)]
        found[section] = dict(zip(names, found.get(section, []), strict=False))
    return found


def _differences(there: object, here: object, key: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in there | here:
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}".removeprefix("."))
    elif there != here:
        yield f"{key} {_shown(there)}, now {_shown(here)}"


def _shown(value: object) -> str:
    match value:
        case None:
            return "unset"
        case dict():
            return "there"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedCloud:
    """What the checks need of a cloud whose name can be read."""

    index: int
    name: str
    listens: bool
    address: Address | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedLink:
    """What the checks need of a link whose two ends can be read."""

    index: int
    between: tuple[str, str]


def find_conflicts(tables: Tables) -> tuple[Finding, ...]:
    """Return all that is wrong between the clouds, the links and the accelerators of a job."""
    clouds, links = list(_clouds(tables)), list(_links(tables))
    in_links = [finding for link in links for finding in _in_link(link, clouds, links)]
    # An unreadable or mistyped link would make some cloud look unlinked: name the cause only.
    all_readable = len(links) == len(entries(tables, "link"))
    unlinked = _unlinked(clouds, links) if all_readable and not in_links else ()
    return (
        *_no_cloud(tables),
        *_same_name(clouds),
        *_same_address(clouds),
        *in_links,
        *unlinked,
        *_same_accelerator(tables),
    )


def _clouds(tables: Tables) -> Iterator[_NamedCloud]:
    for index, entry in enumerate(entries(tables, "cloud")):
        name, listen = entry_name("cloud", entry), entry.get("listen")
        if name is not None:
            yield _NamedCloud(
                index=index, name=name, listens=listen is not None, address=_readable_address(listen)
            )


def _links(tables: Tables) -> Iterator[_NamedLink]:
    for index, entry in enumerate(entries(tables, "link")):
        between = link_pair(entry)
        if between is not None:
            yield _NamedLink(index=index, between=between)


def _readable_address(listen: object) -> Address | None:
    try:
        return parse_address(listen) if isinstance(listen, str) else None
    except FieldError:
        return None


def _no_cloud(tables: Tables) -> Iterator[Finding]:
    if tables.get("cloud") == []:
        yield Finding(place=("cloud",), what="is empty", cure="write a [[cloud]] table for each")


def _same_name(clouds: list[_NamedCloud]) -> Iterator[Finding]:
    for position, cloud in enumerate(clouds):
        if any(earlier.name == cloud.name for earlier in clouds[:position]):
            yield Finding(
                place=("cloud", cloud.index, "name"),
                what=f"an earlier cloud is named {cloud.name!r} too",
                cure="give each cloud its own name",
            )


def _same_address(clouds: list[_NamedCloud]) -> Iterator[Finding]:
    owners: dict[Address, str] = {}
    for cloud in clouds:
        if cloud.address is None:
            continue
        owner = owners.setdefault(cloud.address, cloud.name)
        if owner != cloud.name:
            yield Finding(
                place=("cloud", cloud.index, "listen"),
                what=f"cloud {owner!r} listens at {cloud.address} too",
                cure="give each cloud its own host or port",
            )


def _in_link(link: _NamedLink, clouds: list[_NamedCloud], links: list[_NamedLink]) -> Iterator[Finding]:
    place = ("link", link.index, "between")
    first, second = link.between
    names = [cloud.name for cloud in clouds]
    unknown = [name for name in dict.fromkeys(link.between) if name not in names]
    for name in unknown:
        yield Finding(place=place, what=f"there is no cloud {name!r}", cure=suggest(name, names))
    if first == second:
        yield Finding(place=place, what=f"joins {first!r} to itself", cure="name two different clouds")
    elif any(set(other.between) == {first, second} for other in links if other.index < link.index):
        yield Finding(place=place, what="an earlier link joins these two too", cure="keep one of the links")
    elif not unknown and not any(cloud.listens for cloud in clouds if cloud.name in link.between):
        yield Finding(
            place=place,
            what=f"neither {first!r} nor {second!r} listens, so none can dial the other",
            cure=f'give one of them an address: listen = "{first}.example.com:7600"',
        )


def _unlinked(clouds: list[_NamedCloud], links: list[_NamedLink]) -> Iterator[Finding]:
    linked = {name for link in links for name in link.between}
    for cloud in clouds:
        others = [other.name for other in clouds if other.name != cloud.name]
        if others and cloud.name not in linked:
            yield Finding(
                place=("cloud", cloud.index),
                what="no link reaches it",
                cure=f'add a [[link]] with between = ["{others[0]}", "{cloud.name}"]',
            )


def _same_accelerator(tables: Tables) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    for index, entry in enumerate(entries(tables, "accelerator")):
        name = entry_name("accelerator", entry)
        if not name:
            continue
        plain = plain_name(name)
        if plain in owners:
            yield Finding(
                place=("accelerator", index, "name"),
                what=f"means the same device as {owners[plain]!r}, case and punctuation aside",
                cure="keep one of the two, or give them names that differ in letters or digits",
            )
        owners.setdefault(plain, name)


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


def job_schema() -> dict[str, object]:
    """Return the JSON schema of a job file, by the keys that TOML uses."""
    return {"$schema": _TomlSchema.schema_dialect, **Job.model_json_schema(schema_generator=_TomlSchema)}


class _TomlSchema(GenerateJsonSchema):
    """JSON schema in TOML's words: units as text, no null, no titles that repeat the key."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        # Only a model, not a field by itself, writes its defaults with their units.
        model = cast("type[Frozen]", schema["cls"]).model_construct()
        for key, default in model.model_dump(mode="json", exclude_none=True).items():
            json_schema["properties"][key]["default"] = default
        return json_schema

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 pydantic's signature
        return False
