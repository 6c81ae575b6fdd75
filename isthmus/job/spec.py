"""The job as one frozen model: what is trained, on which clouds, over which links."""

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError

from isthmus.errors import UserError
from isthmus.job.fields import Frozen, matching
from isthmus.job.mistakes import (
    CONFLICT,
    Finding,
    Place,
    Tables,
    describe_place,
    entries,
    entry_name,
    link_pair,
)
from isthmus.job.sections import (
    AcceleratorSpec,
    AutoStrategy,
    CheckpointSpec,
    CloudSpec,
    DataSpec,
    LimitsSpec,
    LinkSpec,
    ModelSpec,
    PipelineStrategy,
    Strategy,
    TrainSpec,
    plain_name,
)
from isthmus.units import suggest


class KeyRole(enum.Enum):
    """The effect on a run of changing a key."""

    MEANING = enum.auto()
    OPERATION = enum.auto()
    SITE = enum.auto()


_ROLES: Final = {
    KeyRole.OPERATION: """
        model.cache_frozen model.trust_remote_code model.lora.merge
        cloud.device cloud.sharding cloud.memory cloud.flops cloud.accelerator cloud.listen
        cloud.usd_per_hour cloud.inside_bandwidth
        link.stripes link.heartbeat_timeout link.usd_per_gib link.codec link.guard_every link.guard_cosine
        train.steps train.recompute train.memory_budget train.offload_optimizer train.compile
        train.evaluate_every train.evaluate_without_codec train.evaluate_texts train.evaluate_beams
        train.keep_best
        strategy.max_queued strategy.on_lost strategy.wait
        strategy.quorum strategy.grace strategy.on_partition
        checkpoint.every checkpoint.overhead checkpoint.keep checkpoint.patience
    """,
    KeyRole.SITE: """
        cloud.profile cloud.gateway cloud.proxy cloud.certificates
        link.bandwidth link.rtt link.jitter link.handling link.connection_bandwidth
        checkpoint.store limits accelerator
    """,
}
KEY_ROLES: Final = MappingProxyType({key: role for role, keys in _ROLES.items() for key in keys.split()})
"""The role of keys and tables by their names in the file. All others are part of the meaning, since a plan is
a part of the run, and so is all that it was made from."""


class Change(NamedTuple):
    """A key whose value differs between two jobs, and both values as they are shown."""

    key: str
    there: str
    here: str


_WHAT_IT_HOLDS: Final = "docs/job.md shows what it holds"
_MAX_TOLD: Final = 3
_MAX_SHOWN: Final = 60
_MAX_AGREEMENT: Final = 4096


def keys_of(tables: Tables, *roles: KeyRole) -> dict[str, object]:
    """Return the values of all keys of some roles, such as `link.east-west.boundary`, in no order but one.

    The order of clouds, which is that of stages, is a key of its own; links have none.
    """
    found: dict[str, object] = {}
    if KeyRole.MEANING in roles:
        found["the order of clouds"] = [entry_name("cloud", one) for one in entries(tables, "cloud")]

    def visit(key: str, name: str, value: object) -> None:
        role = KEY_ROLES.get(key)
        if role is None and isinstance(value, dict):
            for inner, one in value.items():
                visit(f"{key}.{inner}", f"{name}.{inner}", one)
        elif role is None and key in ("cloud", "link"):
            for one in entries(tables, key):
                for inner, part in one.items():
                    visit(f"{key}.{inner}", f"{name}.{entry_name(key, one)}.{inner}", part)
        elif (role or KeyRole.MEANING) in roles:
            found[name] = value

    for section, value in tables.items():
        visit(section, section, value)
    return found


def find_changes(there: Mapping[str, object], here: Mapping[str, object]) -> tuple[Change, ...]:
    """Return every key that differs, with its value there and the one here."""
    keys = (key for key in {**there, **here} if there.get(key) != here.get(key))
    return tuple(Change(key, _shown(there.get(key)), _shown(here.get(key))) for key in keys)


def _shown(value: object) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def tell_changes(changes: Sequence[Change], told: str = "{key} {there}, now {here}") -> str:
    """Return the first few changes in words."""
    more = [f"and {len(changes) - _MAX_TOLD} more"] if len(changes) > _MAX_TOLD else []
    return "; ".join([*(told.format(**one._asdict()) for one in changes[:_MAX_TOLD]), *more])


def disagreement(there: str, here: str, told: str) -> str:
    """Return in words where two texts of `Job.agreement` differ; empty where they cannot be read."""
    try:
        before, now = json.loads(there), json.loads(here)
    except (ValueError, RecursionError):
        return ""
    return tell_changes(find_changes(before, now), told) if isinstance(before, dict) else ""


def find_conflicts(tables: Tables) -> tuple[Finding, ...]:
    """Return all that is wrong between the clouds, the links and the accelerators of a job."""
    links = {index: pair for index, one in enumerate(entries(tables, "link")) if (pair := link_pair(one))}
    in_links = [found for index in links for found in _in_link(index, links, tables)]
    # An unreadable or mistyped link would make some cloud look unlinked: name the cause only.
    all_readable = isinstance(tables.get("link", []), list) and len(links) == len(entries(tables, "link"))
    unlinked = _unlinked(tables, links) if all_readable and not in_links else ()
    found = (*_twice_there(tables), *in_links, *unlinked)
    return tuple(Finding(place=place, what=what, cure=cure) for place, what, cure in found)


_Conflict = tuple[Place, str, str]
"""A place, what is wrong there, and the cure."""


def _twice_there(tables: Tables) -> Iterator[_Conflict]:
    clouds = entries(tables, "cloud")
    names = [entry_name("cloud", one) for one in clouds]
    for index, first in _repeated(names):
        what = f"an earlier cloud is named {names[first]!r} too"
        yield ("cloud", index, "name"), what, "give each cloud its own name"
    addresses = [one.get("listen") for one in clouds]
    for index, first in _repeated(addresses):
        if names[index] != names[first]:
            what = f"cloud {names[first]!r} listens at {addresses[first]} too"
            yield ("cloud", index, "listen"), what, "give each cloud its own host or port"
    devices = [entry_name("accelerator", one) for one in entries(tables, "accelerator")]
    for index, first in _repeated([plain_name(one) if one else None for one in devices]):
        what = f"means the same device as {devices[first]!r}, case and punctuation aside"
        cure = "keep one of the two, or give them names that differ in letters or digits"
        yield ("accelerator", index, "name"), what, cure


def _repeated(keys: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the place of each key that was there before, and its first place; None is no key."""
    for index, key in enumerate(keys):
        if key is not None and (first := keys.index(key)) < index:
            yield index, first


def _in_link(index: int, links: Mapping[int, tuple[str, str]], tables: Tables) -> Iterator[_Conflict]:
    place = ("link", index, "between")
    first, second = links[index]
    clouds = {entry_name("cloud", one): one for one in entries(tables, "cloud")}
    unknown = [name for name in dict.fromkeys(links[index]) if name not in clouds]
    for name in unknown:
        known = [one for one in clouds if one is not None and one not in links[index]]
        yield place, f"there is no cloud {name!r}", suggest(name, known)
    if first == second:
        yield place, f"joins {first!r} to itself", "name two different clouds"
    elif any(set(other) == {first, second} for number, other in links.items() if number < index):
        yield place, "an earlier link joins these two too", "keep one of the links"
    elif not unknown and not any("listen" in clouds[name] for name in (first, second)):
        what = f"neither {first!r} nor {second!r} listens, so none can dial the other"
        yield place, what, f'give one of them an address: listen = "{first}.example.com:7600"'


def _unlinked(tables: Tables, links: Mapping[int, tuple[str, str]]) -> Iterator[_Conflict]:
    linked = {name for pair in links.values() for name in pair}
    names = [entry_name("cloud", one) for one in entries(tables, "cloud")]
    for index, name in enumerate(names):
        other = next((one for one in names if one not in (None, name)), None)
        if name is not None and other is not None and name not in linked:
            cure = f'add a [[link]] with between = ["{other}", "{name}"]'
            yield ("cloud", index), "no link reaches it", cure


class Job(Frozen):
    """One training run: what is trained, on which clouds, over which links."""

    name: Annotated[
        str,
        matching(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
            what="cannot name a folder",
            cure="use up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        ),
    ] = Field(examples=["two-clouds"])
    """Name of the run's folder."""
    seed: int = Field(0, ge=0, le=2**63 - 1, examples=[7])
    """Seed of everything random."""
    model: ModelSpec | None = Field(None, examples=[{"source": "Qwen/Qwen3-0.6B"}])
    """What is trained."""
    data: DataSpec | None = Field(None, examples=[{"source": "corpus/*.jsonl"}])
    """The training data, and how it is read."""
    cloud: tuple[CloudSpec, ...] = Field(
        strict=False, min_length=1, max_length=64, examples=[[{"name": "east"}]]
    )
    """The clusters, at most 64."""
    link: tuple[LinkSpec, ...] = Field((), strict=False, examples=[[{"between": ["east", "west"]}]])
    """The WAN between them."""
    strategy: Strategy = AutoStrategy(kind="auto")
    """How the work is split."""
    train: TrainSpec = TrainSpec()
    """Steps, batch and optimizer."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the state is saved."""
    limits: LimitsSpec = LimitsSpec()
    """Limits of the plan."""
    accelerator: tuple[AcceleratorSpec, ...] = Field((), strict=False, examples=[[{"name": "mine"}]])
    """Devices that the catalogue does not have, or has with other figures."""

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

    @property
    def given_model(self) -> ModelSpec:
        """The model; plans and probes do without, training refuses a job that has none."""
        if self.model is None:
            raise UserError("the job has no [model] section", hint=_WHAT_IT_HOLDS)
        return self.model

    @property
    def given_data(self) -> DataSpec:
        """The data, as `given_model`."""
        if self.data is None:
            raise UserError("the job has no [data] section", hint=_WHAT_IT_HOLDS)
        return self.data

    def reading_at(self, cloud_name: str) -> Self:
        """Return the job with the data that a cloud has of its own, if any."""
        own = self.cloud_named(cloud_name).data
        if own is None or self.data is None:
            return self
        given = own.model_dump(exclude_none=True)
        return self.model_copy(update={"data": self.data.model_copy(update=given)})

    @property
    def is_read_apart(self) -> bool:
        """Whether one cloud reads texts and another their translations, so that no ids of texts cross."""
        return self.data is not None and self.data.id_column is not None

    def links_of(self, cloud_name: str) -> tuple[LinkSpec, ...]:
        """Return the links that end at a cloud."""
        return tuple(link for link in self.link if cloud_name in link.between)

    def used(self) -> Self:
        """Return the job with only the clouds that take part, where the strategy names them."""
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
        return self._digest(KeyRole.MEANING, KeyRole.OPERATION)

    @property
    def meaning_digest(self) -> str:
        """SHA-256 in hex of the keys that must not change while a run continues."""
        return self._digest(KeyRole.MEANING)

    def _digest(self, *roles: KeyRole) -> str:
        keys = keys_of(self.model_dump(mode="json"), *roles)
        return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()

    @property
    def agreement(self) -> str:
        """The keys on which all clouds must agree, without defaults, as ASCII; empty if that is long."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(keys_of(given, KeyRole.MEANING, KeyRole.OPERATION), separators=(",", ":"))
        return text if len(text) <= _MAX_AGREEMENT else ""

    def changes_from(self, before: "Job", role: KeyRole) -> tuple[Change, ...]:
        """Return every key of a role whose value differs from an earlier job's."""
        return find_changes(*(keys_of(one.model_dump(mode="json"), role) for one in (before, self)))


def stage_order(job: Job) -> tuple[str, ...]:
    """Return the clouds in a row, each linked to the next: in the order of the job, else along the links."""
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
    return {"$schema": GenerateJsonSchema.schema_dialect, **Job.toml_schema()}
