"""What `isthmus profile` measured on a device, as the file that a cloud's `profile` key names.

A profile has one or more samples, each of one size of micro-batch in one precision. Between two sizes that
were measured a time lies on the line through them. Beyond them it follows the line `fixed + per token` that
fits all samples, so that noise of two neighbouring sizes is not carried far. Nothing in a profile is
recomputed: to recompute adds a forward pass.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.plan.costs import Precision

VERSION: Final = 2
_MAX_FILE_BYTES: Final = 64 * 2**20
# Shorter times, as a share of the longest, weigh no more when a line is fitted: they may be noise.
_LEAST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One micro-batch through some part of a model, forward and backward: computing, and launching it.

    On an accelerator the host launches kernels ahead while the device computes those before them, so the two
    go on side by side and a pass takes the longer of them: small micro-batches take as long as their
    launches, large ones as long as their arithmetic. The two are therefore summed apart over the parts of a
    stage. On a CPU there is nothing to launch ahead of: what calls cost is a part of computing, and the
    launching times are 0.
    """

    forward_s: float
    backward_s: float
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0

    def __add__(self, other: "PassTimes") -> "PassTimes":
        return PassTimes(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            forward_launch_s=self.forward_launch_s + other.forward_launch_s,
            backward_launch_s=self.backward_launch_s + other.backward_launch_s,
        )

    def each(self, change: Callable[[float], float]) -> "PassTimes":
        """All times, changed alike."""
        return PassTimes(
            forward_s=change(self.forward_s),
            backward_s=change(self.backward_s),
            forward_launch_s=change(self.forward_launch_s),
            backward_launch_s=change(self.backward_launch_s),
        )

    @property
    def whole_forward_s(self) -> float:
        """What the forward pass takes."""
        return max(self.forward_s, self.forward_launch_s)

    @property
    def whole_backward_s(self) -> float:
        """What the backward pass takes."""
        return max(self.backward_s, self.backward_launch_s)


NO_TIME: Final = PassTimes(forward_s=0.0, backward_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTimes:
    """What one codec takes for a message of hidden states: a fixed time, and one for each element."""

    codec: str
    encode_fixed_s: float
    encode_s_per_element: float
    decode_fixed_s: float
    decode_s_per_element: float

    def encode_s(self, num_elements: int) -> float:
        """The time to make the bytes of a message."""
        return self.encode_fixed_s + num_elements * self.encode_s_per_element

    def decode_s(self, num_elements: int) -> float:
        """The time to read them back."""
        return self.decode_fixed_s + num_elements * self.decode_s_per_element


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

    def stage(self, layers: range) -> PassTimes:
        """The stage that holds these layers."""
        total = sum((self.layers[layer] for layer in layers), self.beside)
        if layers.start == 0:
            total += self.embedding
        return total + self.head if layers.stop == len(self.layers) else total

    def stretched(self, factor: float) -> "Sample":
        """The same with all times so many times as long."""

        def stretch(time_s: float) -> float:
            return factor * time_s

        return replace(
            self,
            embedding=self.embedding.each(stretch),
            layers=tuple(one.each(stretch) for one in self.layers),
            head=self.head.each(stretch),
            beside=self.beside.each(stretch),
        )


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
    codings: tuple[CodingTimes, ...] = ()
    """Of the codecs that the job may use."""
    num_threads: int | None = None
    """CPU threads that computed; None where nobody has said."""
    num_sharing: int = 1
    """Ranks that were measured on this machine at the same time, this one included."""
    is_compiled: bool = False
    scatter: float = 0.0
    """How far the figures are from certain: the largest relative error of a median."""
    measured: str = ""
    """When it was measured, as ISO 8601 has it."""

    def sample(self, *, num_sequences: int, sequence_length: int, precision: Precision) -> Sample:
        """The parts at that size, as measured, between the nearest two sizes, or on the line through all."""
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
        inside = (
            pair
            for pair in itertools.pairwise(fitting)
            if pair[0].num_sequences <= num_sequences <= pair[1].num_sequences
        )
        pair = next(inside, None)
        return _beyond(fitting, num_sequences) if pair is None else _between(*pair, num_sequences)

    def coding(self, codec: str) -> CodingTimes | None:
        """What a codec takes, None where it was not measured."""
        return next((one for one in self.codings if one.codec == codec), None)

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
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"the profile {path} cannot be read: {error.strerror}", hint=_HOW) from None
    return parse_profile(text, name=str(path))


def parse_profile(text: bytes | str, *, name: str) -> Profile:
    """The profile in a text that `write_profile` gave, or one sentence on what is wrong with it."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name} cannot be read as a profile: {error}", hint=_HOW) from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise UserError(f"{name} is no profile of version {VERSION}{_older(values)}", hint=_HOW)
    try:
        return _profile(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name} is no valid profile: {error}", hint=_HOW) from None


_HOW: Final = "measure it: isthmus profile JOB --cloud NAME --out FILE"


def _older(values: object) -> str:
    version = values.get("version") if isinstance(values, dict) else None
    is_older = isinstance(version, int) and version < VERSION
    return f" but of version {version}, which an older release measured in another way" if is_older else ""


def _profile(values: Mapping[str, Any]) -> Profile:
    samples = tuple(map(_sample, values["samples"]))
    if not samples:
        raise ValueError("it has no samples")
    speeds = {key: _speed(values.get(key)) for key in ("to_host_bytes_per_s", "from_host_bytes_per_s")}
    num_threads = values.get("num_threads")
    return Profile(
        device=str(values["device"]),
        model_type=str(values["model_type"]),
        samples=samples,
        update_s_per_parameter=_seconds(values.get("update_s_per_parameter", 0.0)),
        codings=tuple(map(_coding, values.get("codings", ()))),
        num_threads=None if num_threads is None else _count(num_threads),
        num_sharing=_count(values.get("num_sharing", 1)),
        is_compiled=bool(values.get("is_compiled", False)),
        scatter=_seconds(values.get("scatter", 0.0)),
        measured=str(values.get("measured", "")),
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
    return PassTimes(
        forward_s=_seconds(values["forward_s"]),
        backward_s=_seconds(values["backward_s"]),
        forward_launch_s=_seconds(values.get("forward_launch_s", 0.0)),
        backward_launch_s=_seconds(values.get("backward_launch_s", 0.0)),
    )


def _coding(values: Mapping[str, Any]) -> CodingTimes:
    return CodingTimes(
        codec=str(values["codec"]),
        encode_fixed_s=_seconds(values["encode_fixed_s"]),
        encode_s_per_element=_seconds(values["encode_s_per_element"]),
        decode_fixed_s=_seconds(values["decode_fixed_s"]),
        decode_s_per_element=_seconds(values["decode_s_per_element"]),
    )


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


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line `fixed + size × slope` nearest to (size, time) points by relative error, neither below 0.

    Relative errors count, so that small sizes are fitted as well as large ones; one point is in proportion.
    """
    least = max(1e-12, _LEAST_SHARE * max(time for _, time in points))
    weighted = [(1 / max(time, least) ** 2, size, time) for size, time in points]
    total = sum(weight for weight, _, _ in weighted)
    mean_size = sum(weight * size for weight, size, _ in weighted) / total
    mean_time = sum(weight * time for weight, _, time in weighted) / total
    spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in weighted)
    if spread == 0:
        return 0.0, mean_time / mean_size
    slope = sum(weight * (size - mean_size) * (time - mean_time) for weight, size, time in weighted) / spread
    if slope < 0:
        return mean_time, 0.0
    fixed = mean_time - slope * mean_size
    if fixed >= 0:
        return fixed, slope
    squares = sum(weight * size * size for weight, size, _ in weighted)
    return 0.0, sum(weight * size * time for weight, size, time in weighted) / squares


def mean_sample(samples: Sequence[Sample]) -> Sample:
    """The mean of samples of one size."""
    share = 1 / len(samples)
    parts = zip(*(_parts(one) for one in samples), strict=True)
    means = [sum((one.each(lambda time_s: share * time_s) for one in part), NO_TIME) for part in parts]
    return replace(_with_parts(samples[0], means, samples[0].num_sequences), peak_bytes=samples[0].peak_bytes)


def _beyond(samples: Sequence[Sample], num_sequences: int) -> Sample:
    """A size outside of those measured: as the nearest one, scaled along the line through all."""
    nearest = samples[0] if num_sequences < samples[0].num_sequences else samples[-1]
    sizes = [float(one.num_sequences) for one in samples]
    parts = zip(*(_parts(one) for one in samples), strict=True)
    return _with_parts(
        nearest,
        [_extended(list(part), sizes, nearest.num_sequences, num_sequences) for part in parts],
        num_sequences,
    )


def _extended(times: Sequence[PassTimes], sizes: Sequence[float], nearest: int, wanted: int) -> PassTimes:
    def extend(figure: Callable[[PassTimes], float]) -> float:
        points = [(size, figure(one)) for size, one in zip(sizes, times, strict=True)]
        fixed_s, slope_s = fit_line(points)
        at_nearest_s = dict(points)[float(nearest)]
        # Further out by the fitted slope, from where the nearest was measured; never below what is fixed.
        return max(fixed_s, at_nearest_s + slope_s * (wanted - nearest), 0.0)

    return PassTimes(
        forward_s=extend(lambda one: one.forward_s),
        backward_s=extend(lambda one: one.backward_s),
        forward_launch_s=extend(lambda one: one.forward_launch_s),
        backward_launch_s=extend(lambda one: one.backward_launch_s),
    )


def _between(low: Sample, high: Sample, num_sequences: int) -> Sample:
    """On the line through two samples."""
    share = (num_sequences - low.num_sequences) / (high.num_sequences - low.num_sequences)
    mixed = [
        one.each(lambda time_s: (1 - share) * time_s) + other.each(lambda time_s: share * time_s)
        for one, other in zip(_parts(low), _parts(high), strict=True)
    ]
    if num_sequences in (low.num_sequences, high.num_sequences):
        mixed = _parts(low if num_sequences == low.num_sequences else high)
    return _with_parts(low, mixed, num_sequences)


def _with_parts(sample: Sample, parts: Sequence[PassTimes], num_sequences: int) -> Sample:
    embedding, head, beside, *layers = parts
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
