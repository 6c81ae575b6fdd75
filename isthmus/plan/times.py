"""How long each part of a model takes on a device: estimated from its costs, or as a profile measured it.

Every pass of every part costs `fixed + per token`. The part that grows with the tokens is arithmetic and
memory traffic; the fixed part is what it costs to call and to launch some tens of kernels, whatever their
size. On an accelerator the host launches ahead of the device, so a stage takes the longer of launching all
its parts and computing them. On a CPU the thread that calls is the one that computes, so the two add up.

Speeds in the catalogue of accelerators are peaks of dense arithmetic from the makers' data sheets;
`achievable` is the share of it that whole layers of a transformer reach in training, as published runs report
it. Prices are round on-demand figures of public clouds and markets; `usd_per_hour` of a cloud or an
`[[accelerator]]` table replaces them.

A profile is what `isthmus profile` measured on a device, in the file that a cloud's `profile` key names.
A profile has one or more samples, each of one size of micro-batch in one precision. Between two sizes that
were measured a time lies on the line through them. Beyond them it follows the line `fixed + per token` that
fits all samples, so that noise of two neighbouring sizes is not carried far. Nothing in a profile is
recomputed: to recompute adds a forward pass.
"""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from isthmus.errors import UserError
from isthmus.job.codec import CodecSpec
from isthmus.job.sections import AcceleratorSpec, plain_name
from isthmus.plan.costs import WIDE_BYTES, Figures, ModelCosts, PartCosts, Precision, Stages
from isthmus.plan.memory import Sharding, StageOptions
from isthmus.units import closest

_TERA: Final = 1e12
_GIGA: Final = 1e9
_GIB: Final = 2**30

DEFAULT_ACHIEVABLE: Final = 0.4
"""The share that counts for an accelerator whose own is not given."""
DEFAULT_FLOAT32_SHARE: Final = 1 / 16
"""The peak in float32 beside that in bfloat16, where none is given, as in data-centre GPUs since 2020."""
DEFAULT_MEMORY_BANDWIDTH: Final = 1555 * _GIGA
"""Bytes per second, where none is given: those of an A100."""
LAYER_LAUNCH_S: Final = 8e-4
"""What the host takes to launch the forward pass of one layer, eagerly."""
_COMPILED_SHARE: Final = 0.25
# Calls of a layer's forward on one core, beside its arithmetic.
_CPU_LAYER_S: Final = 4e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device as torch sees it; speeds in operations and bytes per second."""

    name: str
    flops: float
    """Peak in bfloat16; as in float32 where there are no units for it."""
    flops_float32: float
    achievable: float
    achievable_float32: float = 0.7
    """Plain arithmetic comes nearer to its peak than matrix units do."""
    memory_bytes: int
    memory_bandwidth: float
    usd_per_hour: float | None
    is_cpu: bool = False
    eager_launch_s: float = LAYER_LAUNCH_S
    """What it takes to call or to launch the forward pass of one layer that is not compiled."""

    def layer_launch_s(self, *, is_compiled: bool) -> float:
        """What it takes to launch the forward pass of one layer."""
        return self.eager_launch_s * (_COMPILED_SHARE if is_compiled else 1.0)

    def shared_by(self, num_ranks: int) -> "Accelerator":
        """What one of several ranks has that compute on the same device at the same time."""
        if num_ranks == 1:
            return self
        price = self.usd_per_hour
        return replace(
            self,
            flops=self.flops / num_ranks,
            flops_float32=self.flops_float32 / num_ranks,
            memory_bytes=self.memory_bytes // num_ranks,
            memory_bandwidth=self.memory_bandwidth / num_ranks,
            usd_per_hour=None if price is None else price / num_ranks,
        )

    def effective_flops(self, precision: Precision) -> float:
        """What training reaches."""
        if precision is Precision.FLOAT32:
            return self.flops_float32 * self.achievable_float32
        # Without units for bfloat16 its products run as float32's do.
        share = self.achievable if self.flops > self.flops_float32 else self.achievable_float32
        return self.flops * share


def new_accelerator(
    name: str,
    *,
    flops: float,
    memory_bytes: int,
    flops_float32: float | None = None,
    achievable: float | None = None,
    memory_bandwidth: float | None = None,
    usd_per_hour: float | None = None,
) -> Accelerator:
    """An accelerator of the user's own, with the usual for what is left out."""
    return Accelerator(
        name=name,
        flops=flops,
        flops_float32=flops * DEFAULT_FLOAT32_SHARE if flops_float32 is None else flops_float32,
        achievable=DEFAULT_ACHIEVABLE if achievable is None else achievable,
        memory_bytes=memory_bytes,
        memory_bandwidth=DEFAULT_MEMORY_BANDWIDTH if memory_bandwidth is None else memory_bandwidth,
        usd_per_hour=usd_per_hour,
    )


def accelerator_of(spec: AcceleratorSpec) -> Accelerator:
    """The device that a table [[accelerator]] tells of."""
    return new_accelerator(
        spec.name,
        flops=spec.flops,
        flops_float32=spec.flops_float32,
        achievable=spec.achievable,
        memory_bytes=spec.memory_bytes,
        memory_bandwidth=spec.memory_bandwidth_bytes_per_s,
        usd_per_hour=spec.usd_per_hour,
    )


def find_accelerator(name: str, *, own: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The accelerator of that name: the job's own, else the catalogue's; case and punctuation aside.

    Of several that are spelled alike, the one of exactly that name.
    """
    for some in (own or {}, CATALOGUE):
        by_plain = {plain_name(key): one for key, one in some.items()}
        found = some.get(name) or by_plain.get(plain_name(name))
        if found is not None:
            return found
    known = {**CATALOGUE, **(own or {})}
    meant = closest(name, known)
    guess = f"did you mean {meant!r}? If not, " if meant else ""
    raise UserError(
        f"accelerator {name!r} is not in the catalogue",
        hint=f"{guess}add it to the job: [[accelerator]] with name = {name!r}, flops and memory"
        + ("" if meant else f"; known are {', '.join(known)}"),
    )


# Two cores with AVX-512 at 2.8 GHz, as a rank on a small machine has. One such core (Xeon, Ice Lake, torch
# 2.13) gave 48 to 125 GFLOP/s in forward and backward of Llama layers 128 to 2048 wide in float32, of a peak
# of 179, and 18 to 32 in bfloat16, which it has no units for: a third of the peak is the middle of that.
_CPU: Final = Accelerator(
    name="cpu",
    flops=0.11 * _TERA,
    flops_float32=0.36 * _TERA,
    achievable=0.35,
    achievable_float32=0.35,
    memory_bytes=64 * _GIB,
    memory_bandwidth=25 * _GIGA,
    usd_per_hour=0.1,
    is_cpu=True,
    eager_launch_s=_CPU_LAYER_S,
)


def _catalogue() -> Iterator[Accelerator]:
    """The devices that ship with the package, in the words of a job file."""
    text = (files("isthmus.plan") / "accelerators.toml").read_text()
    yield from (
        accelerator_of(AcceleratorSpec.model_validate(one)) for one in tomllib.loads(text)["accelerator"]
    )
    yield _CPU


CATALOGUE: Final[Mapping[str, Accelerator]] = MappingProxyType({one.name: one for one in _catalogue()})


VERSION: Final = 2
_MAX_FILE_BYTES: Final = 64 * 2**20
# Shorter times, as a share of the longest, weigh no more when a line is fitted: they may be noise.
_LEAST_SHARE: Final = 0.01
_MEASURE: Final = "measure it: isthmus profile JOB --cloud NAME --out FILE"

# The bounds of what a profile's file may say.
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Count = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One micro-batch through some part of a model, forward and backward: computing, and launching it.

    On an accelerator the host launches kernels ahead while the device computes those before them, so the two
    go on side by side and a pass takes the longer of them: small micro-batches take as long as their
    launches, large ones as long as their arithmetic. The two are therefore summed apart over the parts of a
    stage. On a CPU there is nothing to launch ahead of: what calls cost is a part of computing, and the
    launching times are 0.
    """

    forward_s: _Seconds
    backward_s: _Seconds
    forward_launch_s: _Seconds = 0.0
    backward_launch_s: _Seconds = 0.0

    def __add__(self, other: "PassTimes") -> "PassTimes":
        return PassTimes(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            forward_launch_s=self.forward_launch_s + other.forward_launch_s,
            backward_launch_s=self.backward_launch_s + other.backward_launch_s,
        )

    def each(self, change: Callable[[float], float]) -> "PassTimes":
        """Changes all times alike."""
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
    encode_fixed_s: _Seconds
    encode_s_per_element: _Seconds
    decode_fixed_s: _Seconds
    decode_s_per_element: _Seconds

    def encode_s(self, num_elements: int) -> float:
        """The time to make the bytes of a message."""
        return self.encode_fixed_s + num_elements * self.encode_s_per_element

    def decode_s(self, num_elements: int) -> float:
        """The time to read them back."""
        return self.decode_fixed_s + num_elements * self.decode_s_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """One micro-batch through each part of a model on one rank; one entry in `layers` per layer."""

    embedding: PassTimes
    layers: tuple[PassTimes, ...]
    head: PassTimes
    beside: PassTimes = NO_TIME
    """What each pass of a stage takes beside its parts: masks, rotary tables, calls."""

    def stage(self, layers: range) -> PassTimes:
        """The stage that holds these layers."""
        total = sum((self.layers[layer] for layer in layers), self.beside)
        if layers.start == 0:
            total += self.embedding
        return total + self.head if layers.stop == len(self.layers) else total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes(PartTimes):
    """The parts of a model, and the update of its weights."""

    update_s_per_parameter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(PartTimes):
    """The parts of a model as they were measured at one size of micro-batch."""

    num_sequences: _Count
    sequence_length: _Count
    precision: Precision
    peak_bytes: _Count | None = None
    """The most that the allocator held for the largest stage that was measured, where it can tell."""

    def stretched(self, factor: float) -> "Sample":
        """A sample whose times are so many times as long."""
        return replace(_with_times(self, factor * _times(self)), peak_bytes=self.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device under one model."""

    device: str
    model_type: str
    samples: Annotated[tuple[Sample, ...], Field(min_length=1)]
    update_s_per_parameter: _Seconds = 0.0
    to_host_bytes_per_s: _Seconds | None = None
    from_host_bytes_per_s: _Seconds | None = None
    """None where device and host share their memory."""
    codings: tuple[CodingTimes, ...] = ()
    """The times of the codecs that the job may use."""
    num_threads: _Count | None = None
    """CPU threads that computed; None where it was not said."""
    num_sharing: _Count = 1
    """Ranks that were measured on this machine at the same time, this one included."""
    is_compiled: bool = False
    scatter: _Seconds = 0.0
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
        sizes, every_s = [float(one.num_sequences) for one in fitting], np.stack([*map(_times, fitting)])

        def at_size_s(times_s: NDArray[np.float64]) -> float:
            if sizes[0] <= num_sequences <= sizes[-1]:
                return float(np.interp(num_sequences, sizes, times_s))
            nearest = 0 if num_sequences < sizes[0] else -1
            fixed_s, slope_s = fit_line([*zip(sizes, times_s.tolist(), strict=True)])
            # Further out by the fitted slope, from where the nearest was measured; never below what is fixed.
            return max(fixed_s, float(times_s[nearest]) + slope_s * (num_sequences - sizes[nearest]), 0.0)

        found = _with_times(fitting[0], np.apply_along_axis(at_size_s, 0, every_s))
        return replace(found, num_sequences=num_sequences)

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


_PROFILE: Final = TypeAdapter(Profile)


def write_profile(profile: Profile) -> str:
    """The text of a profile's file."""
    return json.dumps({"version": VERSION, **_PROFILE.dump_python(profile, mode="json")}, indent=2) + "\n"


def read_profile(path: Path) -> Profile:
    """The profile in a file, or one sentence on why there is none."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path} is too large for a profile")
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"the profile {path} cannot be read: {error.strerror}", hint=_MEASURE) from None
    return parse_profile(text, name=str(path))


def parse_profile(text: bytes | str, *, name: str) -> Profile:
    """The profile in a text that `write_profile` gave, or one sentence on what is wrong with it."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name} cannot be read as a profile: {error}", hint=_MEASURE) from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        is_older = isinstance(version, int) and version < VERSION
        older = f" but of version {version}, which an older release measured in another way"
        told = f"{name} is no profile of version {VERSION}{older if is_older else ''}"
        raise UserError(told, hint=_MEASURE)
    try:
        return _PROFILE.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{name} is no valid profile: {place}: {first['msg']}", hint=_MEASURE) from None


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


_PASS_FIELDS: Final = tuple(one.name for one in fields(PassTimes))


def _times(sample: Sample) -> NDArray[np.float64]:
    """The times of all parts as a table: embedding, head, what is beside them, and the layers."""
    parts = sample.embedding, sample.head, sample.beside, *sample.layers
    return np.array([[getattr(part, name) for name in _PASS_FIELDS] for part in parts])


def _with_times(sample: Sample, times_s: NDArray[np.float64]) -> Sample:
    """A sample with the times of such a table."""
    parts = (PassTimes(**dict(zip(_PASS_FIELDS, row, strict=True))) for row in times_s.tolist())
    embedding, head, beside, *layers = parts
    return replace(
        sample, embedding=embedding, layers=tuple(layers), head=head, beside=beside, peak_bytes=None
    )


# AdamW as torch runs it over lists of tensors, one kernel after the other, and the norm before it.
_UPDATE_BYTES_PER_PARAMETER: Final = 21 * WIDE_BYTES
# A gradient of the whole table is zeroed, filled and added to the one there is.
_TABLE_PASSES: Final = 4
# Products of a backward pass for each of the forward pass, where all is trained.
_MEASURED_SHARE: Final = 2.0
# A backward pass launches about twice the kernels of a forward pass.
_BACKWARD_LAUNCHES: Final = 2.0
# Embedding, head and what stands beside the layers of a stage (masks, rotary tables, the loss), in layers.
_END_LAUNCHES: Final = 0.5


def estimated_times(costs: ModelCosts, accelerator: Accelerator, *, is_compiled: bool = False) -> ModelTimes:
    """Estimates times from operations and bytes, at the speeds of an accelerator, and from launches."""
    bandwidth, precision = accelerator.memory_bandwidth, costs.workload.arithmetic.precision
    table_bytes = WIDE_BYTES * costs.num_embedding_parameters if costs.embedding.has_backward else 0

    def estimated(part: PartCosts, launch_s: float, more_s: float = 0.0) -> PassTimes:
        products_s = part.flops / accelerator.effective_flops(precision)
        products_s += part.float32_flops / accelerator.effective_flops(Precision.FLOAT32)
        moved_s, has_backward = part.moved_bytes / bandwidth, part.has_backward
        backward_s = part.backward_share * products_s + 2 * moved_s * has_backward + more_s
        launches_s = launch_s, _BACKWARD_LAUNCHES * launch_s * has_backward
        own = PassTimes(forward_s=products_s + moved_s, backward_s=backward_s)
        if accelerator.is_cpu:
            return own + PassTimes(forward_s=launches_s[0], backward_s=launches_s[1])
        return replace(own, forward_launch_s=launches_s[0], backward_launch_s=launches_s[1])

    layer_s = accelerator.layer_launch_s(is_compiled=is_compiled)
    end_s = _END_LAUNCHES * accelerator.layer_launch_s(is_compiled=False)
    times = ModelTimes(
        embedding=estimated(costs.embedding, end_s, _TABLE_PASSES * table_bytes / bandwidth),
        layers=tuple(estimated(part, layer_s) for part in costs.layers),
        head=estimated(costs.head, end_s),
        update_s_per_parameter=_UPDATE_BYTES_PER_PARAMETER / bandwidth,
    )
    return _recomputed(times, costs)


def measured_times(profile: Profile, costs: ModelCosts) -> ModelTimes:
    """The times of a profile, in which all is trained, for a micro-batch of a model of which less may be."""
    workload = costs.workload
    sample = profile.sample(
        num_sequences=workload.num_sequences,
        sequence_length=workload.sequence_length,
        precision=workload.arithmetic.precision,
    )
    if len(sample.layers) != costs.num_layers:
        raise UserError(
            f"the profile of {profile.device} is of a model with {len(sample.layers)} layers, "
            f"not {costs.num_layers}",
            hint="measure again: isthmus profile JOB",
        )

    def trained(times: PassTimes, part: PartCosts) -> PassTimes:
        share = part.backward_share / _MEASURED_SHARE
        backward_s, launch_s = share * times.backward_s, share * times.backward_launch_s
        return replace(times, backward_s=backward_s, backward_launch_s=launch_s)

    times = ModelTimes(
        embedding=trained(sample.embedding, costs.embedding),
        layers=tuple(map(trained, sample.layers, costs.layers)),
        head=trained(sample.head, costs.head),
        beside=sample.beside,
        update_s_per_parameter=profile.update_s_per_parameter,
    )
    return _recomputed(times, costs)


def _recomputed(times: ModelTimes, costs: ModelCosts) -> ModelTimes:
    """Adds the forward pass of a layer that runs again before its backward pass, if there is one."""
    if not costs.workload.recompute:
        return times
    again = (
        PassTimes(
            forward_s=0.0,
            backward_s=one.forward_s if one.backward_s else 0.0,
            backward_launch_s=one.forward_launch_s if one.backward_s else 0.0,
        )
        for one in times.layers
    )
    return replace(times, layers=tuple(map(PassTimes.__add__, times.layers, again)))


# Python, the scheduler and the wires for every pass, whatever its size; a profile has it in its figures.
_PASS_OVERHEAD_S: Final = 2e-4
# Between a device and its host: about what PCIe 4 gives.
_HOST_BYTES_PER_S: Final = 20e9
# Reading and writing that a codec does for each byte that it is given.
_CODING_PASSES: Final = 16
# Two moments of four bytes, there and back.
_OFFLOADED_BYTES_PER_PARAMETER: Final = 16
_UNKNOWN_BYTES: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFacts:
    """A cloud: what one rank of it is, and what the whole of it costs."""

    name: str
    num_ranks: int
    accelerator: Accelerator
    profile: Profile | None
    capacity_bytes: int | None
    """The memory of one rank, None where it is unknown."""
    usd_per_hour: float | None
    sharding: Sharding | None = None
    """What its ranks shard, None where the plan chooses."""
    inside_bytes_per_s: float = 25e9
    """Between its devices, of each."""

    def room_bytes(self, share: float) -> int:
        """What a plan may fill of a rank's memory."""
        return int(min(_UNKNOWN_BYTES, share * (self.capacity_bytes or math.inf)))

    def times(self, costs: ModelCosts, *, is_compiled: bool) -> ModelTimes:
        """The times of its profile, or else those of the catalogue."""
        if self.profile is None:
            return estimated_times(costs, self.accelerator, is_compiled=is_compiled)
        return measured_times(self.profile, costs)


class StageTable(NamedTuple):
    """The times of a rank at one cloud for every stage: tables (a, b) over the layers from a to before b."""

    forward_s: Figures
    backward_s: Figures
    update_s: Figures


def stage_table(costs: ModelCosts, times: ModelTimes, options: StageOptions, cloud: CloudFacts) -> StageTable:
    """Time every stage at a cloud.

    The host launches ahead of the device, so a pass takes the longer of launching its parts and computing.
    """
    every, parts = Stages.every(costs.num_layers), (times.embedding, *times.layers, times.head)
    exchanges_s = [exchange_s(one, costs, options, cloud) for one in costs.parts(range(costs.num_layers))]

    def pass_s(kind: Literal["forward", "backward"]) -> Figures:
        own_s = [float(getattr(one, f"{kind}_s")) for one in parts]
        moved_s = [pair[kind == "backward"] for pair in exchanges_s]
        # Beside what moves for a layer another one is computed; for the ends of a model there is none.
        whole_s = [max(one, wait) if one else 0.0 for one, wait in zip(own_s, moved_s, strict=True)]
        whole_s[0], whole_s[-1] = own_s[0] + moved_s[0], own_s[-1] + moved_s[-1]
        launched_s = [float(getattr(one, f"{kind}_launch_s")) for one in parts]
        beside_s, launch_s = (float(getattr(times.beside, f"{kind}{one}_s")) for one in ("", "_launch"))
        found = np.maximum(every.summed(whole_s) + beside_s, every.summed(launched_s) + launch_s)
        return found + (_PASS_OVERHEAD_S if cloud.profile is None else 0.0)

    num_owned = every.summed(costs.each(lambda part: part.num_trained)) / options.num_shards
    update_s = num_owned * times.update_s_per_parameter
    if options.offload_optimizer:
        update_s = update_s + num_owned * _OFFLOADED_BYTES_PER_PARAMETER / _HOST_BYTES_PER_S
    exchanged_bytes = every.summed(costs.each(lambda part: _exchanged_bytes(part, costs, options)))
    share = (cloud.num_ranks - 1) / cloud.num_ranks
    update_s = update_s + share * exchanged_bytes / cloud.inside_bytes_per_s
    return StageTable(pass_s("forward"), pass_s("backward"), update_s)


def _exchanged_bytes(part: PartCosts, costs: ModelCosts, options: StageOptions) -> int:
    """At the end of a step: gradients are summed, then the sums or all weights gathered."""
    match options.sharding:
        case Sharding.NONE:
            return 2 * WIDE_BYTES * part.num_trained
        case Sharding.OPTIMIZER:
            gathered = costs.workload.arithmetic.element_bytes * part.num_parameters
            return WIDE_BYTES * part.num_trained + gathered
        case Sharding.FULL:
            return 0


def exchange_s(
    part: PartCosts, costs: ModelCosts, options: StageOptions, cloud: CloudFacts
) -> tuple[float, float]:
    """Time what moves in a forward and in a backward of a part whose weights are sharded.

    Weights are gathered in both as they are computed with, and gradients reduced in float32.
    """
    if options.sharding is not Sharding.FULL:
        return 0.0, 0.0
    share_s = (options.num_shards - 1) / options.num_shards / cloud.inside_bytes_per_s
    gathered_s = share_s * part.num_parameters * costs.workload.arithmetic.element_bytes
    return gathered_s, gathered_s + share_s * part.num_trained * WIDE_BYTES


def coding_s(
    codec: CodecSpec, num_elements: int, num_bytes: int, *, sender: CloudFacts, receiver: CloudFacts
) -> float:
    """Time the coding of a message at both ends, copies between devices and hosts included."""
    total_s = 0.0
    for cloud, is_sender in ((sender, True), (receiver, False)):
        profile, speed = cloud.profile, None
        if profile is not None:
            if (coding := profile.coding(str(codec))) is not None:
                total_s += coding.encode_s(num_elements) if is_sender else coding.decode_s(num_elements)
                continue
            speed = profile.to_host_bytes_per_s if is_sender else profile.from_host_bytes_per_s
        if not codec.is_raw:
            # Codecs compute in float32 whatever they are given.
            total_s += _CODING_PASSES * WIDE_BYTES * num_elements / cloud.accelerator.memory_bandwidth
        if not cloud.accelerator.is_cpu:
            total_s += num_bytes / (speed or _HOST_BYTES_PER_S)
    return total_s
