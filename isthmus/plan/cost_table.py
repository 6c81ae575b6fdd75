"""What a model costs, as data: figures of its parts for some sizes of a micro-batch, and those between.

The figures are measured from the real model (`isthmus.model.costs`) and kept as JSON, so that planning needs
no torch. A model is an embedding, layers of one or more kinds, and a head with the loss.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from isthmus.plan.costs import Arithmetic, Messages, ModelCosts, PartCosts, Precision, Workload

VERSION: Final = 2
_PEAKS: Final = ("forward_bytes", "backward_bytes")
_MAX_FILE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute a model."""

    arithmetic: Arithmetic
    recompute: bool = False

    @classmethod
    def of(cls, workload: Workload) -> "Variant":
        """The variant of a workload; in float32 what is gathered is as wide as what is not."""
        arithmetic = workload.arithmetic
        is_gathered = arithmetic.is_gathered and arithmetic.precision is not Precision.FLOAT32
        return cls(arithmetic=replace(arithmetic, is_gathered=is_gathered), recompute=workload.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The parameters of a part."""

    num_parameters: int
    num_trained: int
    """Those that are trained, which have gradients and moments."""
    largest_trained: int
    """Elements of the largest tensor that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFigures:
    """What one micro-batch costs in a part.

    Live bytes are counted from what the parts before it keep: `forward_bytes` is the peak of its forward
    above that, `backward_bytes` the peak of its backward above that and what the part itself keeps.
    """

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    float32_forward_flops: float = 0.0
    """Those of them that run in float32 in any precision."""
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
    """One size of a micro-batch under one variant."""

    num_sequences: int
    length: int
    embedding: PartFigures
    kinds: tuple[PartFigures, ...]
    """Of each kind of layer."""
    head: PartFigures
    arrival_bytes: tuple[float, ...]
    """What a stage that is not the first keeps of what arrives, and of masks and positions; by the kind of
    its first layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What of a model does not depend on a micro-batch."""

    model_type: str
    width: int
    vocabulary_size: int
    max_length: int | None
    """Of a sequence; None where there is no bound."""
    embedding: PartSize
    layers: tuple[PartSize, ...]
    """Of each kind."""
    head: PartSize
    kinds: tuple[int, ...]
    """Of each layer."""
    num_tied_parameters: int
    num_embedding_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """A model with all that was measured of it."""

    sizes: ModelSizes
    messages: Messages
    samples: Mapping[Variant, tuple[CostSample, ...]]

    def with_sample(self, variant: Variant, sample: CostSample) -> "CostTable":
        """The same with one more size."""
        known = (*self.samples.get(variant, ()), sample)
        return replace(self, samples={**self.samples, variant: known})

    def costs(self, workload: Workload) -> ModelCosts:
        """The costs of all parts for a micro-batch, on the line through the nearest two sizes."""
        sizes, sample = self.sizes, self._sample(workload)
        layers = [
            _part(size, figures, is_recomputed=workload.recompute)
            for size, figures in zip(sizes.layers, sample.kinds, strict=True)
        ]
        return ModelCosts(
            workload=workload,
            width=sizes.width,
            embedding=_part(sizes.embedding, sample.embedding),
            layers=tuple(layers[kind] for kind in sizes.kinds),
            head=_part(sizes.head, sample.head),
            num_tied_parameters=sizes.num_tied_parameters,
            num_embedding_parameters=sizes.num_embedding_parameters,
            arrival_bytes=tuple(sample.arrival_bytes[kind] for kind in sizes.kinds),
        )

    def _sample(self, workload: Workload) -> CostSample:
        """The sample of a micro-batch, from those of the nearest lengths and numbers of sequences."""
        length, by_length = workload.sequence_length, dict[int, dict[int, CostSample]]()
        for one in self.samples.get(Variant.of(workload), ()):
            by_length.setdefault(one.length, {})[one.num_sequences] = one
        if length in by_length:
            by_length = {length: by_length[length]}
        if not by_length or (len(by_length) == 1 and length not in by_length):
            raise KeyError(workload)
        rows = {known: _between(found, workload.num_sequences) for known, found in by_length.items()}
        return _between(rows, length)


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

    def figures(of: Callable[[CostSample], PartFigures]) -> PartFigures:
        values = {
            one.name: round(
                sum(
                    weight * getattr(of(known[size]), one.name)
                    for size, weight in (line if one.name in _PEAKS else curve).items()
                )
            )
            for one in fields(PartFigures)
        }
        # What a part keeps may be less than the input that it lets go.
        return PartFigures(
            **{name: value if name == "kept_bytes" else max(0.0, value) for name, value in values.items()}
        )

    some = known[sizes[0]]
    return replace(
        some,
        embedding=figures(lambda one: one.embedding),
        kinds=tuple(figures(lambda one, kind=kind: one.kinds[kind]) for kind in range(len(some.kinds))),  # type: ignore[misc]
        head=figures(lambda one: one.head),
        arrival_bytes=tuple(
            round(sum(weight * known[size].arrival_bytes[kind] for size, weight in curve.items()))
            for kind in range(len(some.arrival_bytes))
        ),
    )


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
        num_backward_kernels=figures.backward_kernels,
    )


def table_text(table: CostTable, about: Mapping[str, object] | None = None) -> str:
    """The text of a table's file, which may say what model it is about."""
    samples = [
        {
            "variant": [variant.arithmetic.precision.value, *_flags(variant)],
            "size": [one.num_sequences, one.length],
            "parts": [_row(part) for part in (one.embedding, *one.kinds, one.head)],
            "arrival": [*map(_short, one.arrival_bytes)],
        }
        for variant, some in table.samples.items()
        for one in some
    ]
    values = {"sizes": asdict(table.sizes), "messages": asdict(table.messages), "samples": samples}
    lines = [
        f'"{key}": {json.dumps(one)}' for key, one in {"version": VERSION, **(about or {}), **values}.items()
    ]
    return "{" + ",\n".join(lines) + "}\n"


def read_table(path: Path) -> CostTable | None:
    """The table in a file; None where there is none of this version, so that it is measured again."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        values = json.loads(path.read_bytes())
        return parsed_table(values) if values["version"] == VERSION else None
    except (OSError, AttributeError, LookupError, TypeError, ValueError):
        return None


def _flags(variant: Variant) -> tuple[bool, bool, bool]:
    return variant.arithmetic.on_accelerator, variant.arithmetic.is_gathered, variant.recompute


def _row(part: PartFigures) -> list[float]:
    return [_short(getattr(part, one.name)) for one in fields(part)]


def _short(figure: float) -> float:
    return int(figure) if figure == int(figure) else figure


def _variant(precision: str, *flags: bool) -> Variant:
    on_accelerator, is_gathered, recompute = flags
    arithmetic = Arithmetic(
        precision=Precision(precision), on_accelerator=on_accelerator, is_gathered=is_gathered
    )
    return Variant(arithmetic=arithmetic, recompute=recompute)


def parsed_table(values: Mapping[str, Any]) -> CostTable:
    """The table that a file holds."""
    about = values["sizes"]
    sizes = ModelSizes(
        **{
            **about,
            "embedding": PartSize(**about["embedding"]),
            "layers": tuple(PartSize(**one) for one in about["layers"]),
            "head": PartSize(**about["head"]),
            "kinds": tuple(about["kinds"]),
        }
    )
    about = values["messages"]
    messages = Messages(
        integer_bytes=int(about["integer_bytes"]),
        narrow_on_cpu=tuple(map(bool, about["narrow_on_cpu"])),
        narrow_on_accelerator=tuple(map(bool, about["narrow_on_accelerator"])),
    )
    table = CostTable(sizes=sizes, messages=messages, samples={})
    names = [one.name for one in fields(PartFigures)]
    for one in values["samples"]:
        embedding, *kinds, head = (
            PartFigures(**dict(zip(names, map(float, row), strict=True))) for row in one["parts"]
        )
        sample = CostSample(
            num_sequences=int(one["size"][0]),
            length=int(one["size"][1]),
            embedding=embedding,
            kinds=tuple(kinds),
            head=head,
            arrival_bytes=tuple(map(float, one["arrival"])),
        )
        table = table.with_sample(_variant(*one["variant"]), sample)
    return table
