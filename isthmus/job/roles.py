"""What a change of each key means to a run that was stopped and is started again.

meaning     another run: what is trained, on what, by which ranks, in which order
operation   the same run, operated otherwise; all clouds must have the same value
site        the same run; each site may have a value of its own, or a measured one
"""

import enum
import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from isthmus.job.findings import Tables, entries, entry_name


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
