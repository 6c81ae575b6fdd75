"""What a model costs, as data: figures of its parts for some sizes of a micro-batch, and those between.

The figures are measured from the real model (`isthmus.model.costs`) and kept as JSON, so that planning needs
no torch. A model is an embedding, layers of one or more kinds, and a head with the loss.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from isthmus.plan.costs.arithmetic import Arithmetic, Precision
from isthmus.plan.costs.messages import Messages
from isthmus.plan.costs.parts import ModelCosts, PartCosts, Workload

VERSION: Final = 1
_MAX_FILE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute a model."""

    arithmetic: Arithmetic
    recompute: bool = False

    @classmethod
    def of(cls, workload: Workload) -> "Variant":
        """The variant of a workload."""
        return cls(arithmetic=workload.arithmetic, recompute=workload.recompute)


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

    def mixed(self, other: Self, share: float) -> Self:
        """The figures on the line through two sizes; beyond them, too, but never below zero."""
        values = {
            one.name: (1 - share) * getattr(self, one.name) + share * getattr(other, one.name)
            for one in fields(self)
        }
        # What a part keeps may be less than the input that it lets go.
        return type(self)(
            **{name: value if name == "kept_bytes" else max(0.0, value) for name, value in values.items()}
        )


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

    def mixed(self, other: Self, share: float, *, num_sequences: int) -> "CostSample":
        """The sample on the line through two sizes."""
        return CostSample(
            num_sequences=num_sequences,
            length=self.length,
            embedding=self.embedding.mixed(other.embedding, share),
            kinds=tuple(
                one.mixed(another, share) for one, another in zip(self.kinds, other.kinds, strict=True)
            ),
            head=self.head.mixed(other.head, share),
            arrival_bytes=tuple(
                (1 - share) * one + share * another
                for one, another in zip(self.arrival_bytes, other.arrival_bytes, strict=True)
            ),
        )


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
        fitting = sorted(
            (
                one
                for one in self.samples.get(Variant.of(workload), ())
                if one.length == workload.sequence_length
            ),
            key=lambda one: one.num_sequences,
        )
        if not fitting:
            raise KeyError(workload)
        number = workload.num_sequences
        if len(fitting) == 1 and fitting[0].num_sequences != number:
            raise KeyError(workload)
        if len(fitting) == 1:
            return fitting[0]
        pairs = list(itertools.pairwise(fitting))
        low, high = next((pair for pair in pairs if number <= pair[1].num_sequences), pairs[-1])
        share = (number - low.num_sequences) / (high.num_sequences - low.num_sequences)
        return low.mixed(high, share, num_sequences=number)


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


def write_table(table: CostTable) -> str:
    """The text of a table's file."""
    samples = [
        {"variant": _variant_to_dict(variant), **asdict(one)}
        for variant, some in table.samples.items()
        for one in some
    ]
    values = {"sizes": asdict(table.sizes), "messages": asdict(table.messages), "samples": samples}
    return json.dumps({"version": VERSION, **values}) + "\n"


def read_table(path: Path) -> CostTable | None:
    """The table in a file; None where there is none of this version, so that it is measured again."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        values = json.loads(path.read_bytes())
        return _table(values) if values["version"] == VERSION else None
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _variant_to_dict(variant: Variant) -> dict[str, Any]:
    arithmetic = variant.arithmetic
    return {
        "precision": arithmetic.precision.value,
        "on_accelerator": arithmetic.on_accelerator,
        "is_gathered": arithmetic.is_gathered,
        "recompute": variant.recompute,
    }


def _variant(values: Mapping[str, Any]) -> Variant:
    return Variant(
        arithmetic=Arithmetic(
            precision=Precision(values["precision"]),
            on_accelerator=bool(values["on_accelerator"]),
            is_gathered=bool(values["is_gathered"]),
        ),
        recompute=bool(values["recompute"]),
    )


def _table(values: Mapping[str, Any]) -> CostTable:
    about = dict(values["sizes"])
    sizes = ModelSizes(
        **{
            **about,
            "embedding": PartSize(**about["embedding"]),
            "layers": tuple(PartSize(**one) for one in about["layers"]),
            "head": PartSize(**about["head"]),
            "kinds": tuple(about["kinds"]),
        }
    )
    table = CostTable(sizes=sizes, messages=Messages(**values["messages"]), samples={})
    for one in values["samples"]:
        sample = CostSample(
            num_sequences=int(one["num_sequences"]),
            length=int(one["length"]),
            embedding=PartFigures(**one["embedding"]),
            kinds=tuple(PartFigures(**figures) for figures in one["kinds"]),
            head=PartFigures(**one["head"]),
            arrival_bytes=tuple(map(float, one["arrival_bytes"])),
        )
        table = table.with_sample(_variant(one["variant"]), sample)
    return table
