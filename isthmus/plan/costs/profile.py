"""What `isthmus profile` measured on a device, as the file that a cloud's `profile` key names.

A profile has one or more samples, each of one size of micro-batch in one precision; times of other sizes lie
on the line through the nearest two. Nothing in it is recomputed: to recompute adds a forward pass.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.plan.costs.activations import Precision

VERSION: Final = 1
_MAX_FILE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One micro-batch through some part of a model, forward and backward."""

    forward_s: float
    backward_s: float

    def __add__(self, other: "PassTimes") -> "PassTimes":
        return PassTimes(
            forward_s=self.forward_s + other.forward_s, backward_s=self.backward_s + other.backward_s
        )


NO_TIME: Final = PassTimes(forward_s=0.0, backward_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The parts of a model at one size of micro-batch; one entry in `layers` per layer.

    `beside` is what each pass of a stage takes beside its parts: masks, rotary tables, calls. `peak_bytes` is
    the most that the allocator held for the largest stage that was measured, where it can tell.
    """

    num_sequences: int
    sequence_length: int
    precision: Precision
    embedding: PassTimes
    layers: tuple[PassTimes, ...]
    head: PassTimes
    beside: PassTimes = NO_TIME
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device under one model."""

    device: str
    model_type: str
    samples: tuple[Sample, ...]
    update_s_per_parameter: float = 0.0
    to_host_bytes_per_s: float | None = None
    from_host_bytes_per_s: float | None = None
    """None where device and host share their memory."""

    def sample(self, *, num_sequences: int, sequence_length: int, precision: Precision) -> Sample:
        """The parts at that size, as measured or on the line through the nearest two sizes."""
        fitting = sorted(
            (
                one
                for one in self.samples
                if one.sequence_length == sequence_length and one.precision is precision
            ),
            key=lambda one: one.num_sequences,
        )
        if not fitting:
            raise self._unmeasured(sequence_length, precision)
        if len(fitting) == 1:
            return _scaled(fitting[0], num_sequences)
        pairs = itertools.pairwise(fitting)
        low, high = next(
            (pair for pair in pairs if num_sequences <= pair[1].num_sequences), (fitting[-2], fitting[-1])
        )
        return _between(low, high, num_sequences)

    def _unmeasured(self, sequence_length: int, precision: Precision) -> UserError:
        found = {f"{one.sequence_length} tokens in {one.precision.value}" for one in self.samples}
        return UserError(
            f"the profile of {self.device} has no sequences of {sequence_length} tokens in "
            f"{precision.value}, only of {' and '.join(sorted(found))}",
            hint="measure again: isthmus profile JOB --cloud NAME",
        )


def write_profile(profile: Profile) -> str:
    """The text of a profile's file."""
    samples = [{**asdict(one), "precision": one.precision.value} for one in profile.samples]
    return json.dumps({"version": VERSION, **asdict(profile), "samples": samples}, indent=2) + "\n"


def read_profile(path: Path) -> Profile:
    """The profile in a file, or one sentence on why there is none."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path} is too large for a profile")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"the profile {path} cannot be read: {error.strerror}", hint=_HOW) from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read as a profile: {error}", hint=_HOW) from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise UserError(f"{path} is no profile of version {VERSION}", hint=_HOW)
    try:
        return _profile(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no valid profile: {error}", hint=_HOW) from None


_HOW: Final = "measure it: isthmus profile JOB --cloud NAME --out FILE"


def _profile(values: Mapping[str, Any]) -> Profile:
    samples = tuple(map(_sample, values["samples"]))
    if not samples:
        raise ValueError("it has no samples")
    speeds = {key: _speed(values.get(key)) for key in ("to_host_bytes_per_s", "from_host_bytes_per_s")}
    return Profile(
        device=str(values["device"]),
        model_type=str(values["model_type"]),
        samples=samples,
        update_s_per_parameter=_seconds(values.get("update_s_per_parameter", 0.0)),
        **speeds,
    )


def _sample(values: Mapping[str, Any]) -> Sample:
    peak = values.get("peak_bytes")
    return Sample(
        num_sequences=_count(values["num_sequences"]),
        sequence_length=_count(values["sequence_length"]),
        precision=Precision(values["precision"]),
        embedding=_times(values["embedding"]),
        layers=tuple(map(_times, values["layers"])),
        head=_times(values["head"]),
        beside=_times(values["beside"]) if "beside" in values else NO_TIME,
        peak_bytes=None if peak is None else _count(peak),
    )


def _times(values: Mapping[str, Any]) -> PassTimes:
    return PassTimes(forward_s=_seconds(values["forward_s"]), backward_s=_seconds(values["backward_s"]))


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)


def _speed(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of at least 1")
    return value


def _scaled(sample: Sample, num_sequences: int) -> Sample:
    """Times in proportion to the size: all that one sample can tell."""
    share = num_sequences / sample.num_sequences
    return _mixed(sample, [NO_TIME] * len(_parts(sample)), 1 - share, num_sequences)


def _between(low: Sample, high: Sample, num_sequences: int) -> Sample:
    share = (num_sequences - low.num_sequences) / (high.num_sequences - low.num_sequences)
    return _mixed(low, _parts(high), share, num_sequences)


def _mixed(sample: Sample, others: Sequence[PassTimes], share: float, num_sequences: int) -> Sample:
    """A sample with this share of other times in the place of its own."""
    embedding, head, beside, *layers = (
        PassTimes(
            forward_s=max(0.0, (1 - share) * one.forward_s + share * other.forward_s),
            backward_s=max(0.0, (1 - share) * one.backward_s + share * other.backward_s),
        )
        for one, other in zip(_parts(sample), others, strict=True)
    )
    return replace(
        sample,
        num_sequences=num_sequences,
        embedding=embedding,
        layers=tuple(layers),
        head=head,
        beside=beside,
        peak_bytes=None,
    )


def _parts(sample: Sample) -> list[PassTimes]:
    return [sample.embedding, sample.head, sample.beside, *sample.layers]
