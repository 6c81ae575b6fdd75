"""Checks that need the whole job: clouds, links and accelerators that do not fit each other.

They read the TOML-shaped tables rather than the models, so that they also speak when some other key is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.job.address import Address, parse_address
from isthmus.job.findings import (
    FieldError,
    Finding,
    Tables,
    entries,
    entry_name,
    link_pair,
    plain_name,
    suggest,
)


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
