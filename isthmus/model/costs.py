"""Measures what a model costs by running it on fake tensors: no values, no memory, a second or two.

One pass runs the embedding, one or two layers of each kind and the head of the real model, forward and
backward, as a stage of a run does. A ledger counts what every kernel computes and allocates, part by part, so
nothing here knows a family of models. The figures are those of a real run on the CPU to the byte; what an
accelerator does otherwise is emulated by `Emulation`. Of an encoder–decoder what follows the encoder's layers
counts with the last of them, and what precedes the decoder's with the first of those.

    forward    ── embedding ── layer ── layer ── head ──┐   live bytes at each boundary: what a part keeps
    backward   ── embedding ── layer ── layer ── head ◄─┘   peaks between boundaries: what it needs on top
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint
from isthmus.model.cut import LayerCall, Seam, drop_absent
from isthmus.model.encoder_decoder import drop_stacks
from isthmus.model.families import FIRST, LAST, first_input
from isthmus.model.load import assemble
from isthmus.model.random import RngKey
from isthmus.model.recompute import Fixed
from isthmus.model.stage import Batch, Stage, StageInput, StageOutput
from isthmus.model.torch_calls import (
    CostLedger,
    Emulation,
    FakeTensorMode,
    PartCount,
    on_gradient,
)
from isthmus.model.transformers_calls import expect_no_padding
from isthmus.plan.costs import (
    WIDE_BYTES,
    Arithmetic,
    CostSample,
    CostTable,
    Messages,
    ModelCosts,
    ModelSizes,
    PartFigures,
    PartSize,
    Precision,
    Task,
    Variant,
    Workload,
    integer_bytes,
)

_NUM_PASSES: Final = 2
"""The first pass shows what is made once, the second what every further micro-batch does."""
_EMBEDDING: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of the model is trained."""

    num_frozen_layers: int = 0
    lora: LoraSpec | None = None


@dataclass(slots=True, kw_only=True)
class _PassCounts:
    """One pass of a stage: its parts in order, forward and backward, and what it keeps in all."""

    forward: list[PartCount] = field(default_factory=list)
    backward: list[PartCount] = field(default_factory=list)
    kept_bytes: int = 0
    leaves: torch.dtype = torch.float32
    """The type of the hidden states behind the last layer."""


class _Runner:
    """Runs a stage of fake tensors and enters each part into the ledger."""

    def __init__(self, stage: Stage, indices: Sequence[int], variant: Variant) -> None:
        self._stage = stage
        self._variant = variant
        on_accelerator = variant.arithmetic.on_accelerator
        self._ledger = CostLedger(on_accelerator=on_accelerator)
        self._emulation = Emulation(self._ledger, on_accelerator=on_accelerator)
        self._counts = _PassCounts()
        base, family = stage.model.base_model, stage.family
        modules = [base.get_submodule(family.layer_path(index)) for index in indices]
        for number, (index, module) in enumerate(zip(indices, modules, strict=True), start=1):
            _call_of(module).wrap(self._emulation.around)
            if family.decoder is not None and index == family.decoder.start:
                # Its embedding counts with its first layer, and behind that lies the encoder.
                enter = self._enter(number, lambda _, kwargs: kwargs["encoder_hidden_states"])
                base.get_submodule("decoder").register_forward_pre_hook(enter, with_kwargs=True)
            else:
                module.register_forward_pre_hook(self._enter(number, first_input), with_kwargs=True)
        modules[-1].register_forward_hook(self._enter_head)
        self._num_layers = len(modules)
        self.always_autocasts = False
        # Narrow gradients are added to wide sums of their own as soon as a layer has them all.
        self._has_wide_sums = variant.arithmetic.stream_bytes < WIDE_BYTES

    def run(self, num_sequences: int, length: int, *, arrives: torch.dtype | None = None) -> _PassCounts:
        """Two micro-batches, one after the other; what the second one costs."""
        with _faking():
            self._stage.to_empty(device="cpu")
            if not self._has_wide_sums:
                for parameter in self._stage.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            self._run(num_sequences, length, arrives)
        return self._counts

    def _run(self, num_sequences: int, length: int, arrives: torch.dtype | None) -> None:
        for _ in range(_NUM_PASSES):
            self._counts = _PassCounts(
                forward=[PartCount() for _ in range(self._num_layers + 2)],
                backward=[PartCount() for _ in range(self._num_layers + 2)],
            )
            with self._ledger, self._emulation:
                self._pass(num_sequences, length, arrives)
            if self._has_wide_sums:
                self._drop_gradients()

    def _pass(self, num_sequences: int, length: int, arrives: torch.dtype | None) -> None:
        ids = torch.zeros(num_sequences, length, dtype=torch.int64)
        start_bytes = self._ledger.live_bytes
        shape = (num_sequences, length, self._stage.model.config.hidden_size)
        num_arriving = 0 if arrives is None else 1 + self._stage.has_memory
        arrived = [torch.zeros(shape, dtype=arrives) for _ in range(num_arriving)]
        for one in arrived:
            one.requires_grad_(self._stage.sends_gradient)
        self._ledger.enter(self._counts.forward[_EMBEDDING])
        output = self._forward(_batch(self._stage, ids), *arrived)
        self._counts.kept_bytes = self._ledger.live_bytes - start_bytes
        self._ledger.enter(self._counts.backward[-1])
        output.backward()
        self._ledger.enter(PartCount())

    def _forward(
        self, batch: Batch, hidden: Tensor | None = None, memory: Tensor | None = None
    ) -> StageOutput:
        key = RngKey(seed=0, step=0, microbatch=0)
        inputs = StageInput(batch=batch, crossing=hidden, memory=memory, rng_key=key)
        is_mixed = self._variant.arithmetic.is_mixed or self.always_autocasts
        with (
            torch.set_grad_enabled(self._stage.is_trained),
            # Without its cache, as a run has it.
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed, cache_enabled=False),
        ):
            output: StageOutput = self._stage(inputs)
        return output

    def _enter(self, number: int, hidden: Callable[..., Tensor]) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._ledger.enter(self._counts.forward[number])
            self._watch_gradient(hidden(args, kwargs), number - 1)

        return enter

    def _enter_head(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self._counts.leaves = hidden.dtype
        self._ledger.enter(self._counts.forward[-1])
        self._watch_gradient(hidden, self._num_layers)

    def _watch_gradient(self, hidden: Tensor, number: int) -> None:
        """The gradient of what a part gave is there: its own backward starts."""

        def enter() -> None:
            if self._has_wide_sums:
                self._drop_gradients()
            self._ledger.enter(self._counts.backward[number])

        on_gradient(hidden, enter)

    def _drop_gradients(self) -> None:
        for parameter in self._stage.parameters():
            parameter.grad = None


def _call_of(layer: nn.Module) -> LayerCall:
    if not isinstance(layer.forward, LayerCall):
        raise TypeError("the layer is not part of a stage")
    return layer.forward


def _batch(stage: Stage, ids: Tensor) -> Batch:
    labels = {
        "sequence-classification": ids[:, 0],
        "question-answering": ids[:, :2],
    }.get(stage.head.name, ids)
    return Batch(ids=ids, labels=labels, num_targets=1)


class MeasuredModel:
    """A model whose costs are measured when they are asked for, and remembered."""

    def __init__(
        self,
        blueprint: Blueprint,
        training: Training,
        *,
        has_bfloat16: bool = True,
        known: CostTable | None = None,
        remember: Callable[[CostTable], None] = lambda _: None,
    ) -> None:
        self._blueprint = blueprint
        self._training = training
        self._remember = remember
        kinds = layer_kinds(blueprint, training)
        decoder = blueprint.family.decoder
        # T5 hands biases from layer to layer, so none can be left out.
        is_joined = decoder is not None and decoder.is_joined
        self._indices = [*range(len(kinds))] if is_joined else representatives(kinds)
        names = list(dict.fromkeys(kinds))
        self._kinds = tuple(names.index(kind) for kind in kinds)
        self.table = known or CostTable(
            sizes=self._sizes(), messages=self._messages(has_bfloat16=has_bfloat16)
        )

    def costs(self, workload: Workload) -> ModelCosts:
        """The costs for a micro-batch, from the next smaller and larger numbers of sequences measured."""
        variant = Variant.of(workload.arithmetic, recompute=workload.recompute)
        for number in _measured_numbers(workload.num_sequences):
            size = number, workload.sequence_length
            if all((one.variant, one.size) != (variant, size) for one in self.table.samples):
                samples = (*self.table.samples, self._sample(variant, *size))
                self.table = replace(self.table, samples=samples)
                self._remember(self.table)
        return self.table.costs(workload)

    def _sample(self, variant: Variant, num_sequences: int, length: int) -> CostSample:
        last_layer = self._blueprint.num_layers - 1
        stage = self._stage(range(last_layer + 1), self._indices, variant)
        whole = _Runner(stage, self._indices, variant).run(num_sequences, length)
        embedding, *layers, head = _figures(whole)
        kinds = self._by_kind(layers)
        start = self._blueprint.num_encoder_layers
        for index, one in zip(self._indices, layers, strict=True):
            if index < start:
                # What an encoder holds until it ends is let go in its last layer, and was the embedding's.
                off_bytes = one.kept_bytes - kinds[self._kinds[index]].kept_bytes
                embedding = embedding._replace(kept_bytes=embedding.kept_bytes + off_bytes)
        layers_bytes = sum(kinds[self._kinds[index]].kept_bytes for index in self._indices)
        head = head._replace(kept_bytes=whole.kept_bytes - embedding.kept_bytes - layers_bytes)
        arrivals = [
            self._arrival_bytes(variant, kind, kinds, head, (num_sequences, length))
            for kind in range(len(kinds))
        ]
        return CostSample(
            variant=variant,
            size=(num_sequences, length),
            parts=(embedding, *kinds, head),
            arrival=tuple(arrivals),
        )

    def _by_kind(self, layers: Sequence[PartFigures]) -> tuple[PartFigures, ...]:
        """A layer of each kind, between two others if there is one: at the ends inputs live longer."""
        found: dict[int, PartFigures] = {}
        ends = {0, self._blueprint.num_encoder_layers - 1, self._blueprint.num_layers - 1}
        order = sorted(range(len(layers)), key=lambda place: self._indices[place] not in ends and place > 0)
        for place in order:
            found[self._kinds[self._indices[place]]] = layers[place]
        return tuple(found[kind] for kind in sorted(found))

    def _arrival_bytes(
        self,
        variant: Variant,
        kind: int,
        kinds: Sequence[PartFigures],
        head: PartFigures,
        size: tuple[int, int],
    ) -> float:
        """What a stage that starts with a layer of this kind keeps beside its parts; 0 where none can."""
        last, decoder = self._blueprint.num_layers - 1, self._blueprint.family.decoder
        first = next(index for index in reversed(self._indices) if self._kinds[index] == kind)
        if last == 0 or (decoder is not None and decoder.is_joined and first != decoder.start):
            return 0.0
        indices = sorted({first, last})
        if decoder is not None and first <= decoder.start:
            ends = {*indices, decoder.start - 1, decoder.start}
            indices = [one for one in self._indices if one >= first and (decoder.is_joined or one in ends)]
        stage = self._stage(range(max(1, first), last + 1), indices, variant)
        arrives = _stream_dtype(variant.arithmetic)
        found = _Runner(stage, indices, variant).run(*size, arrives=arrives)
        return found.kept_bytes - head.kept_bytes - sum(kinds[self._kinds[one]].kept_bytes for one in indices)

    def _sizes(self) -> ModelSizes:
        blueprint = self._blueprint
        stage = self._stage(range(blueprint.num_layers), self._indices, Variant.of(Arithmetic()))
        places: dict[int | None, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in stage.model.named_parameters():
            places[stage.family.place_of(name, stage.model)].append(parameter)
        layers = {self._kinds[index]: places[index] for index in self._indices}
        decoder = stage.family.decoder
        table = (stage.model if decoder is None else stage.model.get_encoder()).get_input_embeddings()
        # Of an encoder–decoder the decoder's embedding is a tied one, too.
        sizes = {
            name: size
            for part in (*blueprint.layout.layers, blueprint.layout.last)
            for name, size in part.items()
        }
        return ModelSizes(
            model_type=str(blueprint.config.model_type),
            width=int(blueprint.config.hidden_size),
            vocabulary_size=int(blueprint.config.vocab_size),
            max_length=_max_length(stage.model),
            embedding=_size(places[FIRST]),
            layers=tuple(_size(layers[kind]) for kind in sorted(layers)),
            head=_size(places[LAST]),
            kinds=self._kinds,
            num_tied_parameters=sum(sizes.get(taker, 0) for taker in blueprint.ties),
            num_embedding_parameters=sum(one.numel() for one in table.parameters()),
            num_encoder_layers=blueprint.num_encoder_layers,
            is_joined=decoder is not None and decoder.is_joined,
        )

    def _messages(self, *, has_bfloat16: bool) -> Messages:
        integers = integer_bytes(self._blueprint.config.vocab_size, Task(self._blueprint.head.name))
        if not has_bfloat16:
            return Messages(integer_bytes=integers)
        return Messages(
            integer_bytes=integers,
            narrow_on_cpu=self._narrow(on_accelerator=False),
            narrow_on_accelerator=self._narrow(on_accelerator=True),
        )

    def _narrow(self, *, on_accelerator: bool) -> tuple[bool, ...]:
        """Whether bfloat16 leaves a stage under autocast, by what came to it and how wide its weights are."""
        mixed = Arithmetic(precision=Precision.BFLOAT16, on_accelerator=on_accelerator)
        last, decoder = self._blueprint.num_layers - 1, self._blueprint.family.decoder
        start = decoder.start if decoder is not None and decoder.is_joined else last
        stage = self._stage(range(last + 1), self._indices, Variant.of(mixed))
        found = [_Runner(stage, self._indices, Variant.of(mixed)).run(*_SMALL).leaves]
        gathered = replace(mixed, is_gathered=True)
        cases = ((mixed, torch.float32), (mixed, torch.bfloat16), (gathered, torch.bfloat16))
        for arithmetic, arrives in cases if last else ():
            variant = Variant.of(arithmetic)
            indices = [*range(start, last + 1)]
            runner = _Runner(self._stage(range(start, last + 1), indices, variant), indices, variant)
            runner.always_autocasts = True
            found.append(runner.run(*_SMALL, arrives=arrives).leaves)
        first, *others = (one == torch.bfloat16 for one in found)
        return (first, *(others or (first, first, True)))

    def _stage(self, layers: range, indices: Sequence[int], variant: Variant) -> Stage:
        blueprint, training = self._blueprint, self._training
        seam = Seam(
            model_class=blueprint.model_class.__name__, learns_aside=blueprint.family.decoder is not None
        )
        config = copy.deepcopy(blueprint.config)
        config.tie_word_embeddings = False
        dtype = _stream_dtype(variant.arithmetic)
        with torch.device("meta"), _default_dtype(dtype), initialization.no_init_weights():
            model = blueprint.model_class(config)
        if blueprint.family.decoder is None:
            drop_absent(model, blueprint.family, layers, seam, present=indices)
        else:
            drop_stacks(model, blueprint.family, layers, seam, keeps_shared=False, present=indices)
        expect_no_padding(model)
        # A head for classes is in no checkpoint, so it is trained beside adapters too.
        is_fresh = not Task(blueprint.head.name).is_language_model
        stage = assemble(
            blueprint,
            model,
            layers,
            seam,
            present=indices,
            num_frozen_layers=training.num_frozen_layers,
            lora=training.lora,
            new_names=[*blueprint.layout.last] if is_fresh else [],
        )
        stage.recompute = Fixed(frozenset(layers if variant.recompute else ()))
        stage.stream_dtype = dtype if dtype == torch.bfloat16 else None
        return stage


_SMALL: Final = (1, 8)
_NUM_REPRESENTATIVES: Final = 3
_GROWTH: Final = 4


def _measured_numbers(num_sequences: int) -> tuple[int, ...]:
    """Powers of four around a number: between them all but peaks grow as a line, and peaks no faster."""
    low = 1
    while low * _GROWTH <= num_sequences:
        low *= _GROWTH
    return (low,) if low == num_sequences else (low, low * _GROWTH)


@contextmanager
def _faking() -> Iterator[None]:
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # Stages ask where their input lies; a fake tensor lies nowhere, and says so.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def _stream_dtype(arithmetic: Arithmetic) -> torch.dtype:
    return torch.bfloat16 if arithmetic.stream_bytes == 2 else torch.float32


def _size(parameters: Iterable[nn.Parameter]) -> PartSize:
    own = list(parameters)
    trained = [one.numel() for one in own if one.requires_grad]
    return PartSize(
        num_parameters=sum(one.numel() for one in own),
        num_trained=sum(trained),
        largest_trained=max(trained, default=0),
    )


def _max_length(model: PreTrainedModel) -> int | None:
    """The longest sequence that has positions; where these count from behind padding there is one less."""
    longest: int | None = getattr(model.config, "max_position_embeddings", None)
    tables = (one for name, one in model.named_modules() if "position" in name)
    starts_late = any(isinstance(one, nn.Embedding) and one.padding_idx is not None for one in tables)
    return longest - 1 if longest is not None and starts_late else longest


def _figures(counts: _PassCounts) -> list[PartFigures]:
    return [
        PartFigures(
            forward_flops=there.flops,
            backward_flops=back.flops,
            float32_forward_flops=there.float32_flops,
            float32_backward_flops=back.float32_flops,
            moved_bytes=there.moved_bytes,
            kept_bytes=there.end_bytes - there.start_bytes,
            forward_bytes=there.peak_bytes - there.start_bytes,
            backward_bytes=back.peak_bytes - there.end_bytes if back.num_kernels else 0,
            forward_kernels=there.num_kernels,
            backward_kernels=back.num_kernels,
        )
        for there, back in zip(counts.forward, counts.backward, strict=True)
    ]


def layer_kinds(blueprint: Blueprint, training: Training) -> list[object]:
    """Layers of one kind cost the same: as many parameters, the same attention, as much of them trained."""
    types: Sequence[str] | None = getattr(blueprint.config, "layer_types", None)
    return [
        (tuple(sizes.values()), types[index] if types else None, _depth(index, training))
        for index, sizes in enumerate(blueprint.layout.layers)
    ]


def _depth(index: int, training: Training) -> str:
    if index < training.num_frozen_layers:
        return "frozen"
    is_lowest = index == training.num_frozen_layers and (training.num_frozen_layers or training.lora)
    return "lowest" if is_lowest else "above"


def representatives(kinds: Sequence[object]) -> list[int]:
    """Up to three layers of each kind, the last ones, in their order; the last layer is one of them."""
    chosen: list[int] = []
    for kind in dict.fromkeys(kinds):
        chosen += [index for index, one in enumerate(kinds) if one == kind][-_NUM_REPRESENTATIVES:]
    return sorted(chosen)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
