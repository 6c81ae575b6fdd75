"""What a model costs, as data: figures of its parts for one micro-batch, stages of parts, and messages.

The figures are measured from the real model (`isthmus.model.costs`) for some sizes of a micro-batch and kept
as JSON, so that planning needs no torch; a table interpolates between sizes. A model is an embedding, layers
of one or more kinds, and a head with the loss.
"""

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from isthmus.errors import UserError
from isthmus.job import Job

WIDE_BYTES: Final = 4
"""The size of an element in float32."""


class Precision(enum.Enum):
    """The precision of the computation; weights are float32 in either."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where a stage computes and how exactly, which decides what its operations keep."""

    precision: Precision = Precision.FLOAT32
    on_accelerator: bool = True
    is_gathered: bool = False
    """Whether weights are gathered from several ranks, in the precision of the computation."""

    @property
    def element_bytes(self) -> int:
        """The size of an element that matrix products read and give."""
        return WIDE_BYTES if self.precision is Precision.FLOAT32 else 2

    @property
    def stream_bytes(self) -> int:
        """The size of an element of the residual stream, and of the weights that are multiplied with."""
        return self.element_bytes if self.is_gathered else WIDE_BYTES

    @property
    def is_mixed(self) -> bool:
        """Whether weights and residual stream are wider than what is multiplied."""
        return self.element_bytes < self.stream_bytes


class Task(enum.Enum):
    """What the model learns to do, which decides its head."""

    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105 no secret
    QUESTION_ANSWERING = "question-answering"
    TRANSLATION = "translation"

    @property
    def is_language_model(self) -> bool:
        """Whether its classes are the vocabulary."""
        return self in (Task.CAUSAL_LM, Task.MASKED_LM, Task.TRANSLATION)


Figures = NDArray[np.float64]
"""A figure for each stage: whole numbers, which are exact up to 9 PB and never overflow."""
Mask = NDArray[np.bool_]
"""Whether something holds, for each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Some stages of a model: those that hold the layers from each of `starts` to before each of `stops`.

    Both broadcast. Figures are given for each part of the model: embedding, layers, head.
    """

    num_layers: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def one(cls, layers: range, *, num_layers: int) -> Self:
        """The stage that holds these layers."""
        return cls(num_layers=num_layers, starts=np.array(layers.start), stops=np.array(layers.stop))

    @classmethod
    def every(cls, num_layers: int) -> Self:
        """Every possible stage, as a table (a, b); where a is not before b the figures mean nothing."""
        ends = np.arange(num_layers + 1)
        return cls(num_layers=num_layers, starts=ends[:, None], stops=ends[None, :])

    @property
    def are_first(self) -> Mask:
        """Which stages have the embedding."""
        return np.asarray(self.starts == 0)

    @property
    def are_last(self) -> Mask:
        """Which stages have the head."""
        return np.asarray(self.stops == self.num_layers)

    @property
    def are_whole(self) -> Mask:
        """Which stages have the whole model."""
        return self.are_first & self.are_last

    def total(self, figures: Sequence[float]) -> Figures:
        """The sum over the parts of each stage."""
        sums = np.cumsum(np.array([0, *figures], dtype=np.float64))
        begin, end = self._bounds
        return np.asarray(sums[end] - sums[begin])

    def summed(self, figures: Sequence[float]) -> Figures:
        """The same, and nothing where a stage has no layers."""
        return np.maximum(self.total(figures), 0.0)

    def largest(self, figures: Sequence[float] | Figures) -> Figures:
        """The largest of the parts of each stage, by asking which of the few kinds of parts it has."""
        known, found = [*map(float, figures)], np.full((), -np.inf)
        for figure in sorted(set(known)):
            found = np.where(self.total([one == figure for one in known]) > 0, figure, found)
        return found

    def peak(self, kept: Sequence[float] | Figures, above: Sequence[float] | Figures) -> Figures:
        """The highest point of each stage: what its parts up to one keep, and what that one has above it."""
        sums = np.cumsum(np.array([0, *kept], dtype=np.float64))
        points = sums[1:] + np.array(above, dtype=np.float64)
        # A row for each part that a stage may begin with: the highest point up to each part from there on.
        places = np.arange(len(points))
        rows = np.where(places[None, :] >= places[:, None], points[None, :], -np.inf)
        highest = np.maximum.accumulate(rows, axis=1)
        begin, end = self._bounds
        return np.asarray(highest[np.minimum(begin, len(points) - 1), end - 1] - sums[begin])

    @property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first part of each stage, and the one behind its last."""
        begin = np.where(self.are_first, 0, self.starts + 1)
        return begin, np.where(self.are_last, self.num_layers + 2, self.stops + 1)


def given(where: Mask, figure: float) -> Figures:
    """This figure at stages where something holds, and 0 elsewhere."""
    return np.where(where, float(figure), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One micro-batch, and how it is computed."""

    num_sequences: int
    sequence_length: int
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    recompute: bool = False

    @property
    def num_tokens(self) -> int:
        """All tokens that are computed, with padding."""
        return self.num_sequences * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The costs of an embedding, a layer or a head.

    Live bytes are those of one micro-batch on its way through a stage, counted from what the parts before it
    keep: `forward_bytes` is the peak of the part's forward above that, `backward_bytes` the peak of its
    backward above that and what the part itself keeps.
    """

    num_parameters: int
    num_trained: int
    """The parameters that are trained, which have gradients and moments."""
    flops: float = 0.0
    """Operations of a forward pass, in the precision of the computation."""
    float32_flops: float = 0.0
    """Operations that stay in float32 in any precision."""
    moved_bytes: float = 0.0
    """Memory that a forward pass reads and writes outside of matrix products, where that takes the time."""
    kept_bytes: float
    """What stays for the backward pass, with the part's output in the place of its input."""
    forward_bytes: float = 0.0
    backward_bytes: float
    largest_parameter: int
    """Elements of the largest tensor that is trained."""
    backward_share: float = 2.0
    """Operations of a backward pass, as a share of the forward's: less where weights are not trained."""
    num_kernels: float = 0.0
    """Kernels of a forward pass; 0 where they are not known."""

    @property
    def has_backward(self) -> bool:
        """Whether a gradient comes to it."""
        return self.backward_share > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """All parts of a model under one workload."""

    workload: Workload
    width: int
    embedding: PartCosts
    layers: tuple[PartCosts, ...]
    head: PartCosts
    num_tied_parameters: int
    """Parameters of the head that are the embedding's where one stage holds both."""
    num_embedding_parameters: int
    """The size of the table of tokens, whose gradient is made whole."""
    arrival_bytes: tuple[float, ...]
    """What a stage that is not the first keeps of what arrives, and of masks and positions; by the number of
    its first layer."""

    @property
    def num_layers(self) -> int:
        """How many layers the stages share."""
        return len(self.layers)

    @property
    def boundary_bytes(self) -> int:
        """The residual stream at a cut, of one micro-batch."""
        return self.workload.arithmetic.stream_bytes * self.width * self.workload.num_tokens

    def parts(self, layers: range) -> tuple[PartCosts, ...]:
        """The parts of the stage that holds these layers, in their order."""
        first = (self.embedding,) if layers.start == 0 else ()
        last = (self.head,) if layers.stop == self.num_layers else ()
        return (*first, *self.layers[layers.start : layers.stop], *last)

    def each(self, figure: Callable[[PartCosts], float]) -> list[float]:
        """A figure of each part, in their order."""
        return [figure(part) for part in self.parts(range(self.num_layers))]

    def num_parameters(self, layers: range) -> int:
        """The parameters of the stage that holds these layers."""
        return int(self.num_owned(Stages.one(layers, num_layers=self.num_layers)))

    def num_trained(self, layers: range) -> int:
        """The parameters of that stage that are trained."""
        return int(self.num_learned(Stages.one(layers, num_layers=self.num_layers)))

    def num_owned(self, stages: Stages) -> Figures:
        """The parameters of stages; a cut unties embedding and head."""
        owned = stages.total(self.each(lambda part: part.num_parameters))
        return owned - given(stages.are_whole, self.num_tied_parameters)

    def num_learned(self, stages: Stages) -> Figures:
        """The trained parameters of stages; weights tied to a frozen embedding are frozen with it."""
        trained = stages.total(self.each(lambda part: part.num_trained))
        return trained - given(stages.are_whole, self.num_tied_parameters if self.head.num_trained else 0)


# Headers as JSON, with lengths and alignment, give or take some digits; a test holds them to real packets.
_FORWARD_HEADER_BYTES: Final = 430
_BACKWARD_HEADER_BYTES: Final = 220
# A message's prefix in gRPC, and for each record the headers of HTTP/2 and TLS.
_PREFIX_BYTES: Final = 5
_RECORD_BYTES: Final = 16 * 1024
_PER_RECORD_BYTES: Final = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What of a model decides the bytes of its messages, beside the width of what crosses."""

    integer_bytes: int = 0
    """The bytes of one token's id, and of its label where that is another number."""
    narrow_on_cpu: tuple[bool, ...] = (False, False, True, True)
    """Under autocast, whether bfloat16 leaves the first stage, one to which float32 came, one to which
    bfloat16 came, and one whose weights are gathered in bfloat16."""
    narrow_on_accelerator: tuple[bool, ...] = (False, False, True, True)

    def leave_narrow(
        self, arithmetic: Arithmetic, *, is_sharded: bool, arrived_narrow: bool | None = None
    ) -> bool:
        """Whether what leaves a stage is bfloat16, given what came to it; None where it is the first."""
        if not arithmetic.is_mixed:
            return False
        measured = self.narrow_on_accelerator if arithmetic.on_accelerator else self.narrow_on_cpu
        return measured[3 if is_sharded else 0 if arrived_narrow is None else 1 + arrived_narrow]

    def forward_bytes(self, payload_bytes: int, *, num_tokens: int) -> int:
        """An activation on the line: integers and header go with it."""
        return framed_bytes(payload_bytes + num_tokens * self.integer_bytes + _FORWARD_HEADER_BYTES)

    def backward_bytes(self, payload_bytes: int) -> int:
        """The bytes of a gradient on the line."""
        return framed_bytes(payload_bytes + _BACKWARD_HEADER_BYTES)


def stream_bytes(*, is_narrow: bool) -> int:
    """The size of an element of the residual stream."""
    return 2 if is_narrow else WIDE_BYTES


def framed_bytes(num_bytes: int) -> int:
    """A message with what gRPC, HTTP/2 and TLS put around it."""
    num_records = -(-num_bytes // _RECORD_BYTES)
    return _PREFIX_BYTES + num_bytes + num_records * _PER_RECORD_BYTES


def _id_bytes(num_ids: int) -> int:
    """The size of the smallest type that has so many values."""
    return next(size for size in (1, 2, 4) if num_ids <= 256**size)


def integer_bytes(vocabulary_size: int, task: Task) -> int:
    """The bytes of one token's id, and of its label where that is another number."""
    return _id_bytes(vocabulary_size) + _label_bytes(vocabulary_size, task)


def _label_bytes(vocabulary_size: int, task: Task) -> int:
    """Labels of a causal model are its ids and do not cross again; those of whole sequences are few."""
    match task:
        case Task.MASKED_LM | Task.TRANSLATION:
            # One bit is for the sign, since tokens that do not count have a negative label.
            return _id_bytes(2 * vocabulary_size)
        case Task.TOKEN_CLASSIFICATION:
            return 1
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model, as far as planning goes."""

    costs_of: Callable[[Workload], ModelCosts]
    num_layers: int
    width: int
    vocabulary_size: int
    messages: Messages
    cuts: frozenset[int] | None = None
    """The layers before which the model can be cut; None for all."""
    num_encoder_layers: int = 0
    """Of an encoder–decoder: the output of so many layers crosses beside hidden states behind them."""
    is_joined: bool = False
    """Whether no cut may part the layers of its encoder, or those of its decoder."""
    max_length: int | None = None
    """The longest sequence; None where it is not known."""
    note: str | None = None
    """What a user should know of where its costs come from."""


class CostSource(Protocol):
    """Measures the model of a job, or one of another configuration in its place."""

    def __call__(self, job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:
        """The model with its costs; None where it cannot be measured."""


def nothing_measured(job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:  # noqa: ARG001 others do
    """The source where there is no torch."""
    return None


def check_length(sequence_length: int, most: int | None) -> None:
    """Refuse sequences for which a model has too few positions; None where it has any number."""
    if most is not None and sequence_length > most:
        raise UserError(
            f"sequences of {sequence_length} tokens are longer than the model's {most} positions",
            hint=f"set data.sequence_length to {most} or less, "
            "or raise max_position_embeddings of a fresh model",
        )


VERSION: Final = 2
_MAX_FILE_BYTES: Final = 64 * 2**20


class Variant(NamedTuple):
    """One way to compute a model."""

    precision: Precision
    on_accelerator: bool
    is_gathered: bool
    recompute: bool

    @classmethod
    def of(cls, arithmetic: Arithmetic, *, recompute: bool = False) -> "Variant":
        """The variant of an arithmetic; in float32 what is gathered is as wide as what is not."""
        is_gathered = arithmetic.is_gathered and arithmetic.precision is not Precision.FLOAT32
        return cls(arithmetic.precision, arithmetic.on_accelerator, is_gathered, recompute)

    @property
    def arithmetic(self) -> Arithmetic:
        """Where and how exactly it computes."""
        precision, on_accelerator, is_gathered, _ = self
        return Arithmetic(precision=precision, on_accelerator=on_accelerator, is_gathered=is_gathered)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The parameters of a part of a model, or of one stage's half of a bottleneck."""

    num_parameters: int
    num_trained: int
    """Trained parameters have gradients and moments."""
    largest_trained: int
    """Elements of the largest tensor that is trained."""
    buffer_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of its values, gradients and moments, without any memory option."""
        return WIDE_BYTES * (self.num_parameters + 3 * self.num_trained) + self.buffer_bytes


class PartFigures(NamedTuple):
    """What one micro-batch costs in a part: a row of a table.

    Live bytes are counted from what the parts before it keep: `forward_bytes` is the peak of its forward
    above that, `backward_bytes` the peak of its backward above that and what the part itself keeps.
    """

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    float32_forward_flops: float = 0.0
    """Operations that run in float32 in any precision."""
    float32_backward_flops: float = 0.0
    moved_bytes: float = 0.0
    """Memory that kernels other than products read and write in a forward pass."""
    kept_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSample:
    """One size of a micro-batch, computed in one way."""

    variant: Variant
    size: tuple[int, int]
    """Its sequences, and their length."""
    parts: tuple[PartFigures, ...]
    """The embedding, each kind of layer, and the head."""
    arrival: tuple[float, ...]
    """What a stage that is not the first keeps of what arrives, and of masks and positions; by the kind of
    its first layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What of a model does not depend on a micro-batch."""

    model_type: str
    width: int
    vocabulary_size: int
    max_length: int | None
    """The longest sequence; None where there is no bound."""
    embedding: PartSize
    layers: tuple[PartSize, ...]
    """The parameters of each kind of layer."""
    head: PartSize
    kinds: tuple[int, ...]
    """The kind of each layer."""
    num_tied_parameters: int
    num_embedding_parameters: int
    num_encoder_layers: int = 0
    """Of an encoder–decoder; 0 for other models."""
    is_joined: bool = False
    """Whether no cut may part the layers of its encoder, or those of its decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """A model with all that was measured of it."""

    sizes: ModelSizes
    messages: Messages
    samples: tuple[CostSample, ...] = ()

    def costs(self, workload: Workload) -> ModelCosts:
        """The costs of all parts for a micro-batch, on the line through the nearest two sizes."""
        sizes, sample = self.sizes, self._sample(workload)
        embedding, *kinds, head = sample.parts
        layers = [
            _part(size, figures, is_recomputed=workload.recompute)
            for size, figures in zip(sizes.layers, kinds, strict=True)
        ]
        return ModelCosts(
            workload=workload,
            width=sizes.width,
            embedding=_part(sizes.embedding, embedding),
            layers=tuple(layers[kind] for kind in sizes.kinds),
            head=_part(sizes.head, head),
            num_tied_parameters=sizes.num_tied_parameters,
            num_embedding_parameters=sizes.num_embedding_parameters,
            arrival_bytes=tuple(sample.arrival[kind] for kind in sizes.kinds),
        )

    def _sample(self, workload: Workload) -> CostSample:
        """The sample of a micro-batch, from those of the nearest lengths and numbers of sequences."""
        variant = Variant.of(workload.arithmetic, recompute=workload.recompute)
        length, by_length = workload.sequence_length, dict[int, dict[int, CostSample]]()
        for one in self.samples:
            if one.variant == variant:
                by_length.setdefault(one.size[1], {})[one.size[0]] = one
        if length in by_length:
            by_length = {length: by_length[length]}
        if not by_length or (len(by_length) == 1 and length not in by_length):
            raise KeyError(workload)
        rows = {known: _between(found, workload.num_sequences) for known, found in by_length.items()}
        return _between(rows, length)


_KEPT: Final = PartFigures._fields.index("kept_bytes")
_PEAKS: Final = [PartFigures._fields.index(name) for name in ("forward_bytes", "backward_bytes")]


def _between(known: Mapping[int, CostSample], wanted: int) -> CostSample:
    """The sample of a size between others.

    Costs grow with the sequences as a line and with their length as a parabola, which three sizes fix. Peaks
    are the highest of several such curves, so the line through the nearest two sizes lies above each of them
    that is convex; where the highest one changes in between, a peak can be 1 to 3 % too low.
    """
    if wanted in known:
        return known[wanted]
    if len(known) == 1:
        raise KeyError(wanted)
    sizes = sorted(known)
    place = next((index for index, size in enumerate(sizes) if size >= wanted), len(sizes) - 1)
    pair = sizes[max(0, place - 1) :][:2]
    start = max(0, min(place - 1, len(sizes) - 3))
    line, curve = (_weights(some, wanted) for some in (pair, sizes[start : start + 3]))
    if not sizes[0] < wanted < sizes[-1]:
        # Outside of all sizes peaks grow no faster than in proportion, and shrink no further.
        line = {sizes[-1]: wanted / sizes[-1]} if wanted > sizes[-1] else {sizes[0]: 1.0}

    def mixed(weights: Mapping[int, float], name: Literal["parts", "arrival"]) -> NDArray[np.float64]:
        rows = (weight * np.array(getattr(known[size], name)) for size, weight in weights.items())
        return np.rint(sum(rows))

    rows = mixed(curve, "parts")
    rows[:, _PEAKS] = mixed(line, "parts")[:, _PEAKS]
    # What a part keeps may be less than the input that it lets go.
    rows = np.where(np.arange(rows.shape[1]) == _KEPT, rows, np.maximum(0.0, rows))
    parts = tuple(PartFigures(*row) for row in rows.tolist())
    return replace(known[sizes[0]], parts=parts, arrival=tuple(mixed(curve, "arrival").tolist()))


def _weights(sizes: Sequence[int], wanted: int) -> dict[int, float]:
    """How much each size counts for the polynomial through all of them, at another size."""
    return {
        one: math.prod((wanted - other) / (one - other) for other in sizes if other != one) for one in sizes
    }


def _part(size: PartSize, figures: PartFigures, *, is_recomputed: bool = False) -> PartCosts:
    forward = figures.forward_flops + figures.float32_forward_flops
    backward = figures.backward_flops + figures.float32_backward_flops
    if is_recomputed and figures.backward_kernels:
        # The forward that runs again is counted where times are made.
        backward = max(0.0, backward - forward)
    share = backward / forward if forward else 2.0
    return PartCosts(
        num_parameters=size.num_parameters,
        num_trained=size.num_trained,
        largest_parameter=size.largest_trained,
        flops=figures.forward_flops,
        float32_flops=figures.float32_forward_flops,
        moved_bytes=figures.moved_bytes,
        kept_bytes=figures.kept_bytes,
        forward_bytes=figures.forward_bytes,
        backward_bytes=figures.backward_bytes,
        backward_share=share if figures.backward_kernels else 0.0,
        num_kernels=figures.forward_kernels,
    )


_TABLE: Final = TypeAdapter(CostTable)


def table_text(table: CostTable, about: Mapping[str, object] | None = None) -> str:
    """The text of a table's file, which may say what model it is about."""
    values = {"version": VERSION, **(about or {}), **_TABLE.dump_python(table, mode="json")}
    lines = [f'"{key}": {json.dumps(one)}' for key, one in values.items()]
    return "{" + ",\n".join(lines) + "}\n"


def parsed_table(values: Mapping[str, Any]) -> CostTable:
    """The table that a file holds."""
    return _TABLE.validate_python({key: values[key] for key in ("sizes", "messages", "samples")})


def read_table(path: Path) -> CostTable | None:
    """The table in a file; None where there is none of this version, so that it is measured again."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        values = json.loads(path.read_bytes())
        return parsed_table(values) if values["version"] == VERSION else None
    except (OSError, AttributeError, LookupError, TypeError, ValueError):
        return None
