"""Measures the clouds on this machine for runs and plans, and caches their profiles and model costs.

Profiles are kept in a folder by a digest of all that they depend on, so that a second start measures nothing.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers

from isthmus.errors import UserError
from isthmus.events import __version__
from isthmus.job import CloudSpec, Job, PipelineStrategy
from isthmus.job.load import replace_file
from isthmus.job.sections import AcceleratorSpec, plain_name
from isthmus.model.costs import MeasuredModel, Training
from isthmus.plan.costs import CostTable, PlannedModel, read_table, table_text
from isthmus.plan.job_facts import is_loopback
from isthmus.plan.models import model_config, planned
from isthmus.plan.times import VERSION, Profile, find_accelerator, parse_profile, read_profile, write_profile
from isthmus.train.build import blueprint_of, made_up_ids
from isthmus.train.device import Device
from isthmus.train.profiling import (
    MAX_SCATTER,
    QUICK,
    Effort,
    measure,
    num_made_up_labels,
    sizes_of,
    threads_here,
)
from isthmus.train.rehearsal import measure_together
from isthmus.units import format_duration, shorten

_FOLDER: Final = "profiles"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiler:
    """How clouds on this machine are profiled where the job names no profile of theirs."""

    cache: Path
    """The folder that keeps what was measured."""
    note: Note
    report: Callable[[str], None] = lambda _: None
    """Is called with what is measured at the moment."""
    effort: Effort = QUICK
    is_wanted: bool = True

    def all_here(self, job: Job) -> Job:
        """The job as planned where all its clouds are on this machine, each with its share of it."""
        local = as_local(job)
        lacking = [one.name for one in job.cloud if one.profile is None]
        if not lacking:
            return local
        if not self.is_wanted:
            self.note("times are those of the catalogue, since --no-profile was given")
            return _with_shared_devices(local)
        found = self._kept(job, lambda: measure_together(job, effort=self.effort, report=self.report))
        return _naming(local, {name: found[name] for name in lacking})

    def text_of(self, job: Job, cloud: str) -> str | None:
        """The profile of the cloud that this machine is, as the text that clouds exchange.

        A profile that the job names is sent, too; None where there is none and none is wanted.
        """
        spec = job.cloud_named(cloud)
        if spec.profile is not None:
            return write_profile(read_profile(Path(spec.profile)))
        if not self.is_wanted:
            return None
        alone = job.model_copy(update={"cloud": (spec,), "link": job.links_of(cloud)})

        def take() -> dict[str, Profile]:
            return {cloud: measure(alone, spec, effort=self.effort, report=self.report)}

        kept = self._kept(alone, take, num_threads=torch.get_num_threads())
        return kept[cloud].read_text(encoding="utf-8")

    def _kept(
        self, job: Job, take: Callable[[], Mapping[str, Profile]], *, num_threads: int | None = None
    ) -> Mapping[str, Path]:
        """The files with the profiles of these clouds, measured now unless they are there."""
        digest = digest_of(job, num_threads=num_threads or threads_here(job))
        paths = {one.name: self.cache / _FOLDER / digest / f"{one.name}.json" for one in job.cloud}
        names = " and of ".join(paths)
        if all(path.exists() for path in paths.values()):
            when = read_profile(next(iter(paths.values()))).measured
            self.note(f"times of {names} were measured here on {when}; isthmus profile JOB measures again")
            return paths
        started_s = time.monotonic()
        found = take()
        for name, path in paths.items():
            _keep(path, write_profile(found[name]))
        together = " at the same time" if len(found) > 1 else ""
        took = format_duration(shorten(time.monotonic() - started_s))
        self.note(f"times of {names} were measured here{together}, in {took}")
        scatter = max(one.scatter for one in found.values())
        if scatter > MAX_SCATTER:
            self.note(
                f"these times scatter by {scatter:.0%}, since something else computes on this machine; "
                "predictions are no better"
            )
        return paths

    def with_profiles(self, job: Job, texts: Mapping[str, str]) -> Job:
        """The job with the profiles that its clouds have sent, as files in the cache."""
        paths = {}
        for name, text in texts.items():
            own = write_profile(parse_profile(text, name=f"what cloud {name!r} has sent"))
            paths[name] = (
                self.cache / _FOLDER / "sent" / f"{hashlib.sha256(own.encode()).hexdigest()[:32]}.json"
            )
            _keep(paths[name], own)
        return _naming(job, paths)


def _naming(job: Job, paths: Mapping[str, Path]) -> Job:
    """The job with these files as profiles of its clouds."""
    clouds = (
        one.model_copy(update={"profile": str(paths[one.name])}) if one.name in paths else one
        for one in job.cloud
    )
    return job.model_copy(update={"cloud": tuple(clouds)})


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"what was measured cannot be kept in {path.parent}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder that can be written, or give --no-profile",
        ) from error


def is_open(job: Job) -> bool:
    """Whether a plan has anything to choose, so that it is worth to measure first."""
    strategy = job.strategy
    if not isinstance(strategy, PipelineStrategy):
        return True
    codecs = [one for link in job.link for one in (link.codec.forward, link.codec.backward)]
    return strategy.layers is None or strategy.microbatches is None or "auto" in codecs


def why_not_here(job: Job) -> str | None:
    """Why a plan cannot be made from what is measured on this machine; None where it can."""
    for cloud in job.cloud:
        if cloud.profile is not None:
            continue
        if cloud.listen is not None and not is_loopback(cloud.listen.host):
            return f"cloud {cloud.name} is not on this machine but at {cloud.listen}"
        why_not = _why_no_device(cloud)
        if why_not is not None:
            return why_not
    if job.model is None or job.data is None:
        return "the job has no [model] or no [data] section"
    return None


def _why_no_device(cloud: CloudSpec) -> str | None:
    """Why the device of a cloud is not one of this machine; None where it is."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if found is None else found.type
    if cloud.device not in ("auto", "cpu", kind):
        return f"cloud {cloud.name} has a device of kind {cloud.device}, which this machine has not"
    name = Device(cloud.device).name
    if cloud.accelerator is not None and plain_name(cloud.accelerator) not in plain_name(name):
        return f"cloud {cloud.name} has the accelerator {cloud.accelerator}, and this machine has {name}"
    if cloud.accelerator is None and cloud.flops is not None:
        return f"cloud {cloud.name} says what its devices reach"
    if found is not None and cloud.ranks > max(1, torch.accelerator.device_count()):
        return f"cloud {cloud.name} has more devices than this machine"
    return None


def as_local(job: Job) -> Job:
    """The job with all clouds on this machine: at no address, and with a part of its memory each."""
    num_ranks = sum(one.ranks for one in job.cloud)
    clouds = tuple(
        one.model_copy(
            update={
                "listen": None,
                "gateway": None,
                "memory_bytes": one.memory_bytes or _memory_bytes(one, num_ranks=num_ranks),
            }
        )
        for one in job.cloud
    )
    return job.model_copy(update={"cloud": clouds})


def _memory_bytes(cloud: CloudSpec, *, num_ranks: int) -> int:
    """The memory that each of so many ranks has on the devices of this machine."""
    device = Device(cloud.device)
    num_devices = torch.accelerator.device_count() if device.is_accelerator else 1
    return device.memory_bytes() // -(-num_ranks // num_devices)


def _with_shared_devices(job: Job) -> Job:
    """The job with accelerators of the catalogue divided by the clouds that share each here."""
    named = [one.accelerator for one in job.cloud if one.accelerator is not None]
    sharing = len(named)
    if sharing < 2 or (torch.accelerator.is_available() and torch.accelerator.device_count() >= sharing):
        return job
    own = {one.name for one in job.accelerator}
    shared = {name: _divided(name, sharing) for name in dict.fromkeys(named) if name not in own}
    clouds = tuple(
        one.model_copy(update={"accelerator": shared[one.accelerator].name})
        if one.accelerator in shared
        else one
        for one in job.cloud
    )
    return job.model_copy(update={"cloud": clouds, "accelerator": (*job.accelerator, *shared.values())})


def _divided(name: str, sharing: int) -> AcceleratorSpec:
    one = find_accelerator(name).shared_by(sharing)
    return AcceleratorSpec.model_construct(
        name=f"{name}, shared by {sharing}",
        flops=one.flops,
        flops_float32=one.flops_float32,
        achievable=one.achievable,
        memory_bytes=one.memory_bytes,
        memory_bandwidth_bytes_per_s=one.memory_bandwidth,
        usd_per_hour=one.usd_per_hour,
    )


def digest_of(job: Job, *, num_threads: int) -> str:
    """A digest of all that the figures of a profile depend on."""
    return _digest_of(
        profile=VERSION,
        machine=[platform.machine(), platform.node(), os.cpu_count()],
        model=dict(model_config(job)),
        task=None if job.data is None else job.data.task,
        sequence_length=None if job.data is None else job.data.sequence_length,
        sizes=sizes_of(job),
        precision=job.train.precision,
        compile=job.train.compile,
        codec_loss=job.limits.codec_loss,
        links=[[*link.between, str(link.codec.forward), str(link.codec.backward)] for link in job.link],
        clouds=[[one.name, Device(one.device).name, one.ranks] for one in job.cloud],
        threads=num_threads,
    )


log = logging.getLogger(__name__)

# What torch and transformers raise where a model asks for the values of tensors that have none.
_UNMEASURABLE: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class Measuring:
    """Measures the costs of models; with a folder, what was measured is read from there next time."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, PlannedModel | None] = {}

    def __call__(self, job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:
        """The job's model, or one of another configuration; None where it cannot be measured."""
        if job.model is None or job.data is None:
            return None
        if config is not None:
            model = job.model.model_copy(update={"source": None, "config": dict(config)})
            job = job.model_copy(update={"model": model})
        key = _digest_of(
            config=dict(model_config(job)),
            task=job.given_data.task,
            precision=job.train.precision,
            **job.given_model.model_dump(mode="json", include={"source", "frozen_layers", "lora", "abnet"}),
        )
        if key not in self._known:
            self._known[key] = self._measured(job, key)
        return self._known[key]

    def _measured(self, job: Job, key: str) -> PlannedModel | None:
        training = Training(num_frozen_layers=job.given_model.frozen_layers, lora=job.given_model.lora)
        blueprint = blueprint_of(job, config=made_up_ids(job), num_labels=num_made_up_labels(job))
        path = None if self._folder is None else self._folder / f"{key}.json"

        def remember(table: CostTable) -> None:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, table_text(table))

        try:
            measured = MeasuredModel(
                blueprint,
                training,
                has_bfloat16=job.train.precision == "bfloat16",
                known=None if path is None else read_table(path),
                remember=remember,
            )
        except _UNMEASURABLE as error:
            log.warning("the costs of %s cannot be measured: %s", blueprint.config.model_type, error)
            return None
        return planned(measured.table, measured.costs)


def _digest_of(**about: object) -> str:
    """A digest of some values and of the versions that figures depend on."""
    versions = [__version__, torch.__version__, transformers.__version__]
    text = json.dumps({**about, "versions": versions}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
