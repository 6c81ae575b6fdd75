"""From a job back to TOML: the whole of it, or measured figures put into the user's own file."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit

from isthmus.errors import UserError
from isthmus.job.load import parse_job, read_job_text
from isthmus.job.spec import Job
from isthmus.units import format_bandwidth, format_duration

_NEW_FILE_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What was measured on a link, with None for what was not.

    `bandwidth_bps` is from the first cloud to the second, then from the second to the first.
    """

    bandwidth_bps: tuple[float, float] | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None
    handling_s: float | None = None
    connection_bps: float | None = None


def dump_job(job: Job) -> str:
    """Return TOML that loads back to an equal job, with every default written out."""
    return tomlkit.dumps(job.tables())


def update_job_file(path: Path, changes: Mapping[tuple[str, str], LinkFigures]) -> None:
    """Put figures measured on links, each named by its `between`, into a job file and keep its layout."""
    text = read_job_text(path)
    known = [link.between for link in parse_job(text, file=path).link]
    document: Any = tomlkit.parse(text)
    for pair, figures in changes.items():
        if pair not in known:
            raise UserError(f"{path} has no link between {' and '.join(pair)}")
        for key, value in _texts(figures):
            document["link"][known.index(pair)][key] = value
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def update_job_sections(
    path: Path,
    sections: Mapping[str, Mapping[str, object]],
    *,
    clouds: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Put keys into sections and clouds of a job file, such as a plan's choice, and keep its layout."""
    text = read_job_text(path)
    names = [cloud.name for cloud in parse_job(text, file=path).cloud]
    document: Any = tomlkit.parse(text)
    for name, values in (clouds or {}).items():
        document["cloud"][names.index(name)].update(values)
    for section, values in sections.items():
        if section not in document:
            document[section] = tomlkit.table()
        for key, value in values.items():
            document[section][key] = value
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old text or the new one whole."""
    target = path.resolve()
    try:
        _replace(target, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _texts(figures: LinkFigures) -> Iterator[tuple[str, str | list[str]]]:
    if figures.bandwidth_bps is not None:
        there, back = map(format_bandwidth, figures.bandwidth_bps)
        yield "bandwidth", there if there == back else [there, back]
    if figures.rtt_s is not None:
        yield "rtt", format_duration(figures.rtt_s)
    if figures.jitter_s is not None:
        yield "jitter", format_duration(figures.jitter_s)
    if figures.handling_s is not None:
        yield "handling", format_duration(figures.handling_s)
    if figures.connection_bps is not None:
        yield "connection_bandwidth", format_bandwidth(figures.connection_bps)


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else _NEW_FILE_MODE
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as beside:
            beside.write(text.encode())
            beside.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(name).replace(target)
    except OSError:
        Path(name).unlink()
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Make what a file holds, or a rename in a folder, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
