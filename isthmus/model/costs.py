"""Measures what a model costs by running it on fake tensors: no values, no memory, a second or two.

One pass runs the embedding, one or two layers of each kind and the head of the real model, forward and
backward, as a stage of a run does. A ledger counts what every kernel computes and allocates, part by part, so
nothing here knows a family of models. The figures are those of a real run on the CPU to the byte; what an
accelerator does otherwise is emulated by `AsAccelerator`.

    forward    ── embedding ── layer ── layer ── head ──┐   live bytes at each boundary: what a part keeps
    backward   ── embedding ── layer ── layer ── head ◄─┘   peaks between boundaries: what it needs on top
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel, initialization

from isthmus.job.lora import LoraSpec
from isthmus.model.blueprint import Blueprint
from isthmus.model.cut import Absent, LayerCall, Moment, Seam, drop_absent, first_input
from isthmus.model.load import assemble, new_adapters
from isthmus.model.lora import Adapters
from isthmus.model.stage import Batch, Stage, StageInput, StageOutput
from isthmus.model.transformers_calls import expect_no_padding
from isthmus.plan.costs.arithmetic import WIDE_BYTES, Arithmetic, Precision
from isthmus.plan.costs.messages import Messages, integer_bytes
from isthmus.plan.costs.parts import ModelCosts, Workload
from isthmus.plan.costs.shapes import Task
from isthmus.plan.costs.table import CostSample, CostTable, ModelSizes, PartFigures, PartSize, Variant

_NUM_PASSES: Final = 2
"""The first pass shows what is made once, the second what every further micro-batch does."""
_EMBEDDING: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of the model is trained."""

    num_frozen_layers: int = 0
    lora: LoraSpec | None = None


@dataclass(slots=True)
class _Count:
    """What one part does in one direction; bytes are live bytes of the whole pass."""

    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    flops: float = 0.0
    float32_flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes, operations and kernels, by the part and the direction that run."""

    def __init__(self, *, on_accelerator: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self._on_accelerator = on_accelerator
        self._storages: dict[int, int] = {}
        self._count = _Count()

    def enter(self, count: _Count) -> None:
        """Count for another part from now on."""
        self._count.end_bytes = self.live_bytes
        count.start_bytes = count.peak_bytes = self.live_bytes
        self._count = count

    def add_flops(self, flops: float, *, is_wide: bool) -> None:
        """Count operations that no kernel of torch shows."""
        if is_wide:
            self._count.float32_flops += flops
        else:
            self._count.flops += flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return output
        made = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        for tensor in made:
            self._note(tensor)
        if self._on_accelerator and func.overloadpacket is torch.ops.aten._softmax_backward_data:
            # There it multiplies gradient and result into a tensor of its own.
            extra_bytes = self.live_bytes + sum(tensor.nbytes for tensor in made)
            self._count.peak_bytes = max(self._count.peak_bytes, extra_bytes)
        if not _is_view(func):
            self._count_kernel(func, args, kwargs or {}, output, made)
        return output

    def _count_kernel(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, made: list[Tensor]
    ) -> None:
        self._count.num_kernels += 1
        read = [one for one in tree_leaves([args, kwargs]) if isinstance(one, Tensor)]
        count_flops = flop_registry.get(func.overloadpacket)
        if count_flops is None:
            self._count.moved_bytes += sum(one.nbytes for one in (*read, *made))
        else:
            is_wide = any(one.dtype == torch.float32 for one in read)
            self.add_flops(count_flops(*args, **kwargs, out_val=output), is_wide=is_wide)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._storages:
            return
        self._storages[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self._count.peak_bytes = max(self._count.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


# They allocate, or change only how a tensor is seen, and start no kernel.
_NO_KERNELS: Final = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"})


def _on_gradient(tensor: Tensor, tell: Callable[[], None]) -> None:
    """Call something when the gradient of a tensor is there, if it will have one."""
    if tensor.requires_grad:
        tensor.register_hook(lambda _: tell())  # type: ignore[no-untyped-call]


def _is_view(func: Any) -> bool:
    if func.overloadpacket.__name__ in _NO_KERNELS:
        return True
    returned = [one.alias_info for one in func._schema.returns]
    return any(one is not None and not one.is_write for one in returned)


class _Attention(torch.autograd.Function):
    """Fused attention as accelerators have it: it keeps its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, width = query.shape
        # It lies in memory as the queries do.
        output = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        if value.shape[-1] != width:
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


# What autocast computes in float32 on CUDA devices, by torch's documentation, as far as models use it.
_WIDE_OPERATIONS: Final = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.normalize,
        functional.softmax,
        functional.log_softmax,
        functional.softplus,
        functional.cross_entropy,
        functional.mse_loss,
        torch.layer_norm,
        torch.softmax,
        torch.log_softmax,
        torch.pow,
        torch.exp,
        torch.log,
        torch.rsqrt,
        torch.cumsum,
        torch.sum,
        torch.norm,
        Tensor.softmax,
        Tensor.log_softmax,
        Tensor.pow,
        Tensor.__pow__,
        Tensor.exp,
        Tensor.log,
        Tensor.rsqrt,
        Tensor.cumsum,
        Tensor.sum,
        Tensor.norm,
    }
)


class _GroupedProduct(torch.autograd.Function):
    """The product of each expert with its own rows: fake tensors have it in bfloat16 alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.rows_like, ctx.weight_like = rows.shape, weight.shape
        needs_rows, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        return rows.new_empty(rows.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needs_rows, needs_weight = ctx.needs_input_grad
        return (
            gradients[0].new_empty(ctx.rows_like) if needs_rows else None,
            gradients[0].new_empty(ctx.weight_like) if needs_weight else None,
        )


class Experts(TorchFunctionMode):
    """Multiplies the rows of experts in any precision."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in (functional.grouped_mm, torch._grouped_mm):
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        flops, is_wide = 2.0 * rows.numel() * weight.shape[-1], rows.dtype == torch.float32
        self._ledger.add_flops(flops, is_wide=is_wide)
        output: Tensor = _GroupedProduct.apply(rows, weight)  # type: ignore[no-untyped-call]
        _on_gradient(output, lambda: self._ledger.add_flops(2 * flops, is_wide=is_wide))
        return output


class AsAccelerator(TorchFunctionMode):
    """Lets fake tensors of the CPU do what those of a CUDA device would.

    Attention is fused, also with dropout; dropout keeps a mask of one byte per element; under autocast norms,
    softmax and powers are computed in float32.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _WIDE_OPERATIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(one) for one in args)
            kwargs = {name: _widened(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (one.to(torch.get_autocast_dtype("cpu")) for one in (query, key, value))
        is_wide = query.dtype == torch.float32
        if is_wide and enable_gqa and query.shape[1] != key.shape[1]:
            # No fused kernel takes groups of heads in float32.
            spelled_out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
            )
            return spelled_out[0]
        # A causal mask halves the products; a backward pass recomputes one and has four more.
        share = 0.5 if is_causal and attn_mask is None else 1.0
        flops = 4.0 * share * query.numel() * key.shape[-2]
        self._ledger.add_flops(flops, is_wide=is_wide)
        output: Tensor = _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        _on_gradient(output, lambda: self._ledger.add_flops(2.5 * flops, is_wide=is_wide))
        return output


def _dropout(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    return torch.native_dropout(hidden, p, True)[0] if training and p > 0 else hidden


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


@dataclass(slots=True, kw_only=True)
class _PassCounts:
    """One pass of a stage: its parts in order, forward and backward, and what it keeps in all."""

    forward: list[_Count] = field(default_factory=list)
    backward: list[_Count] = field(default_factory=list)
    kept_bytes: int = 0
    leaves: torch.dtype = torch.float32
    """The type of the hidden states behind the last layer."""


class _Runner:
    """Runs a stage of fake tensors and enters each part into the ledger."""

    def __init__(self, stage: Stage, indices: Sequence[int], variant: Variant) -> None:
        self._stage = stage
        self._variant = variant
        self._ledger = Ledger(on_accelerator=variant.arithmetic.on_accelerator)
        self._counts = _PassCounts()
        layers = stage.model.base_model.get_submodule(stage.family.layers)
        modules = [layers.get_submodule(str(index)) for index in indices]
        self._last = modules[-1]
        for module in modules:
            _emulate_in(module, self._ledger, on_accelerator=variant.arithmetic.on_accelerator)
        for number, module in enumerate(modules, start=1):
            module.register_forward_pre_hook(self._enter_layer(number), with_kwargs=True)
        modules[-1].register_forward_hook(self._enter_head)
        self._num_layers = len(modules)
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
                forward=[_Count() for _ in range(self._num_layers + 2)],
                backward=[_Count() for _ in range(self._num_layers + 2)],
            )
            with ExitStack() as modes:
                modes.enter_context(self._ledger)
                if self._variant.arithmetic.on_accelerator:
                    modes.enter_context(AsAccelerator(self._ledger))
                self._pass(num_sequences, length, arrives)
            if self._has_wide_sums:
                self._drop_gradients()

    def _pass(self, num_sequences: int, length: int, arrives: torch.dtype | None) -> None:
        ids = torch.zeros(num_sequences, length, dtype=torch.int64)
        start_bytes = self._ledger.live_bytes
        hidden = None
        if arrives is not None:
            width = self._stage.model.config.hidden_size
            hidden = torch.zeros(num_sequences, length, width, dtype=arrives)
            hidden.requires_grad_(self._stage.sends_gradient)
        self._ledger.enter(self._counts.forward[_EMBEDDING])
        output = self._forward(_batch(self._stage, ids), hidden)
        self._counts.kept_bytes = self._ledger.live_bytes - start_bytes
        self._ledger.enter(self._counts.backward[-1])
        output.backward()
        self._ledger.enter(_Count())

    def _forward(self, batch: Batch, hidden: Tensor | None) -> StageOutput:
        inputs = StageInput(batch=batch, crossing=hidden, moment=Moment(seed=0, step=0, microbatch=0))
        with torch.set_grad_enabled(self._stage.is_trained), _autocast(self._variant):
            output: StageOutput = self._stage(inputs)
        return output

    def _enter_layer(self, number: int) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._ledger.enter(self._counts.forward[number])
            self._watch_gradient(first_input(args, kwargs), number - 1)

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

        _on_gradient(hidden, enter)

    def _drop_gradients(self) -> None:
        for parameter in self._stage.parameters():
            parameter.grad = None


def _emulate_in(layer: nn.Module, ledger: Ledger, *, on_accelerator: bool) -> None:
    """Emulate kernels in a layer's own forward, also where a backward runs it again."""
    call = layer.forward
    if not isinstance(call, LayerCall):
        raise TypeError("the layer is not part of a stage")
    call.wrap(lambda forward: _emulated(forward, ledger, on_accelerator=on_accelerator))


def _emulated(forward: Callable[..., Any], ledger: Ledger, *, on_accelerator: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as modes:
            modes.enter_context(Experts(ledger))
            if on_accelerator:
                modes.enter_context(AsAccelerator(ledger))
            return forward(*args, **kwargs)

    return run


@contextmanager
def _autocast(variant: Variant) -> Iterator[None]:
    arithmetic = variant.arithmetic
    if not arithmetic.is_mixed:
        yield
        return
    # Without its cache, as a run has it.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        yield


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
        self._indices = representatives(kinds)
        names = list(dict.fromkeys(kinds))
        self._kinds = tuple(names.index(kind) for kind in kinds)
        self.table = known or CostTable(
            sizes=self._sizes(), messages=self._messages(has_bfloat16=has_bfloat16), samples={}
        )

    def costs(self, workload: Workload) -> ModelCosts:
        """The costs for a micro-batch, from the next smaller and larger numbers of sequences measured."""
        variant = Variant.of(workload)
        for number in _measured_numbers(workload.num_sequences):
            known = self.table.samples.get(variant, ())
            if all((one.num_sequences, one.length) != (number, workload.sequence_length) for one in known):
                sample = self._sample(variant, number, workload.sequence_length)
                self.table = self.table.with_sample(variant, sample)
                self._remember(self.table)
        return self.table.costs(workload)

    def _sample(self, variant: Variant, num_sequences: int, length: int) -> CostSample:
        last_layer = self._blueprint.num_layers - 1
        stage = self._stage(range(last_layer + 1), self._indices, variant)
        whole = _Runner(stage, self._indices, variant).run(num_sequences, length)
        embedding, *layers, head = _figures(whole)
        kinds = self._by_kind(layers)
        layers_bytes = sum(kinds[self._kinds[index]].kept_bytes for index in self._indices)
        head = replace(head, kept_bytes=whole.kept_bytes - embedding.kept_bytes - layers_bytes)
        arrivals = [
            self._arrival_bytes(variant, kind, kinds, head, (num_sequences, length))
            for kind in range(len(kinds))
        ]
        return CostSample(
            num_sequences=num_sequences,
            length=length,
            embedding=embedding,
            kinds=kinds,
            head=head,
            arrival_bytes=tuple(arrivals),
        )

    def _by_kind(self, layers: Sequence[PartFigures]) -> tuple[PartFigures, ...]:
        """A layer of each kind, between two others if there is one: at the ends inputs live longer."""
        found: dict[int, PartFigures] = {}
        order = sorted(range(len(layers)), key=lambda place: 0 < place < len(layers) - 1)
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
        """What a stage that starts with a layer of this kind keeps beside its parts."""
        last = self._blueprint.num_layers - 1
        first = next(index for index in reversed(self._indices) if self._kinds[index] == kind)
        if last == 0:
            return 0.0
        indices = sorted({first, last})
        stage = self._stage(range(max(1, first), last + 1), indices, variant)
        arrives = _stream_dtype(variant.arithmetic)
        found = _Runner(stage, indices, variant).run(*size, arrives=arrives)
        return found.kept_bytes - head.kept_bytes - sum(kinds[self._kinds[one]].kept_bytes for one in indices)

    def _sizes(self) -> ModelSizes:
        blueprint = self._blueprint
        stage = self._stage(range(blueprint.num_layers), self._indices, Variant(arithmetic=Arithmetic()))
        base = stage.model.base_model
        present = dict(base.named_modules())
        layers = [present[f"{stage.family.layers}.{index}"] for index in self._indices]
        first = [present[path] for path in stage.family.first if path in present]
        inner = {parameter for module in (*first, *layers) for parameter in module.parameters()}
        head = [one for one in stage.model.parameters() if one not in inner]
        by_kind = {self._kinds[index]: one for index, one in zip(self._indices, layers, strict=True)}
        table = stage.model.get_input_embeddings()
        ties = [taker for taker in blueprint.ties if taker in blueprint.anatomy.last]
        return ModelSizes(
            model_type=str(blueprint.config.model_type),
            width=int(blueprint.config.hidden_size),
            vocabulary_size=int(blueprint.config.vocab_size),
            max_length=_max_length(stage.model),
            embedding=_size(one for module in first for one in module.parameters()),
            layers=tuple(_size(by_kind[kind].parameters()) for kind in sorted(by_kind)),
            head=_size(head),
            kinds=self._kinds,
            num_tied_parameters=sum(blueprint.anatomy.last[name] for name in ties),
            num_embedding_parameters=sum(one.numel() for one in table.parameters()),
        )

    def _messages(self, *, has_bfloat16: bool) -> Messages:
        on_cpu, on_accelerator = (
            self._narrow(on_accelerator=one) if has_bfloat16 else None for one in (False, True)
        )
        return Messages(
            integer_bytes=integer_bytes(self._blueprint.config.vocab_size, Task(self._blueprint.head.name)),
            narrow_on_cpu=on_cpu,
            narrow_on_accelerator=on_accelerator,
        )

    def _narrow(self, *, on_accelerator: bool) -> tuple[bool, bool, bool]:
        """Whether bfloat16 leaves a stage under autocast: the first, and behind float32 or bfloat16."""
        arithmetic = Arithmetic(precision=Precision.BFLOAT16, on_accelerator=on_accelerator)
        variant, last_layer = Variant(arithmetic=arithmetic), self._blueprint.num_layers - 1
        stage = self._stage(range(last_layer + 1), self._indices, variant)
        found = [_Runner(stage, self._indices, variant).run(*_SMALL).leaves]
        for arrives in (torch.float32, torch.bfloat16) if last_layer else ():
            last = self._stage(range(last_layer, last_layer + 1), [last_layer], variant)
            found.append(_Runner(last, [last_layer], variant).run(*_SMALL, arrives=arrives).leaves)
        first, *others = (one == torch.bfloat16 for one in found)
        from_wide, from_narrow = others or (first, first)
        return first, from_wide, from_narrow

    def _stage(self, layers: range, indices: Sequence[int], variant: Variant) -> Stage:
        blueprint, training = self._blueprint, self._training
        seam = Seam(model_class=blueprint.model_class.__name__)
        config = copy.deepcopy(blueprint.config)
        config.tie_word_embeddings = False
        dtype = _stream_dtype(variant.arithmetic)
        with torch.device("meta"), _default_dtype(dtype), initialization.no_init_weights():
            model = blueprint.model_class(config)
        drop_absent(model, blueprint.family, layers, seam)
        expect_no_padding(model)
        for index in set(layers) - set(indices):
            path = f"{blueprint.family.layers}.{index}"
            model.base_model.set_submodule(path, Absent(model.base_model.get_submodule(path)))
        stage = assemble(
            blueprint,
            model,
            layers,
            seam,
            present=indices,
            recompute=variant.recompute,
            num_frozen_layers=training.num_frozen_layers,
            add_lora=None if training.lora is None else lambda modules: self._adapters(model, modules),
        )
        stage.stream_dtype = dtype if dtype == torch.bfloat16 else None
        return stage

    def _adapters(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> Adapters:
        """A head for classes is in no checkpoint, so it is trained beside adapters too."""
        is_fresh = not self._blueprint.head.name.endswith("lm")
        fresh = [name for name in self._blueprint.anatomy.last if is_fresh]
        if self._training.lora is None:
            raise ValueError("there are no adapters")
        return new_adapters(self._blueprint, model, modules, self._training.lora, fresh, seed=0)


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
        for index, sizes in enumerate(blueprint.anatomy.layers)
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
