"""What of a model learns: its weights, or adapters beside its products; in either case from a layer on.

Adapters are those of `model.lora`: two thin products, in and out by way of `rank` numbers, beside each chosen
product of a layer, whose own weights stay as they are.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isthmus.errors import UserError
from isthmus.job.lora import LoraSpec
from isthmus.plan.costs.families import Product
from isthmus.plan.costs.shapes import ModelShape


class Depth(enum.Enum):
    """Where a layer lies, seen from the lowest thing that learns."""

    FROZEN = "frozen"
    """Below it: nothing goes back through the layer."""
    LOWEST = "lowest"
    """Its input comes from what does not learn, and needs no gradient."""
    ABOVE = "above"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside these products of every layer."""

    rank: int
    products: frozenset[Product]

    def num_parameters(self, shape: ModelShape) -> int:
        """Of one layer."""
        widths = product_widths(shape)
        return self.rank * sum(sum(widths[product]) for product in self.products)

    def largest_parameter(self, shape: ModelShape) -> int:
        """Elements of the largest of their tensors."""
        widths = product_widths(shape)
        return self.rank * max(max(widths[product]) for product in self.products)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What is trained of a model; without adapters that is the weights themselves."""

    num_frozen_layers: int = 0
    adapters: Adapters | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights of layers that are not frozen learn."""
        return self.adapters is None

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding learns."""
        return self.has_weights and self.num_frozen_layers == 0

    def num_readers(self, *products: Product) -> int:
        """How many of these products need their input in the backward pass."""
        return len(products) if self.adapters is None else len(self.adapters.products.intersection(products))

    def depth(self, layer: int) -> Depth:
        """Where a layer lies."""
        if layer < self.num_frozen_layers:
            return Depth.FROZEN
        is_lowest = layer == self.num_frozen_layers and not self.has_embedding
        return Depth.LOWEST if is_lowest else Depth.ABOVE


ALL: Learning = Learning()


def product_widths(shape: ModelShape) -> Mapping[Product, tuple[int, int]]:
    """The width of what each product of a layer reads, and of what it gives."""
    width, inner = shape.width, shape.inner_width
    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    return {
        Product.QUERY: (width, queries),
        Product.KEY: (width, keys),
        Product.VALUE: (width, keys),
        Product.QUERY_KEY_VALUE: (width, queries + 2 * keys),
        Product.OUT: (queries, width),
        Product.GATE: (width, inner),
        Product.UP: (width, inner),
        Product.GATE_UP: (width, 2 * inner),
        Product.DOWN: (inner, width),
    }


def read_adapters(spec: LoraSpec, shape: ModelShape) -> Adapters:
    """The adapters that a job asks for; every name that it gives must be that of a product."""
    paths = shape.family.products
    if spec.targets is None:
        return Adapters(rank=spec.r, products=frozenset(paths))
    for target in spec.targets:
        if not _matching(paths, [target]):
            known = sorted({path.rpartition(".")[2] for path in paths.values()})
            raise UserError(
                f"model.lora.targets has {target!r}, which is no linear module of a {shape.model_type} layer",
                hint=f"its layers have {', '.join(known)}",
            )
    return Adapters(rank=spec.r, products=_matching(paths, spec.targets))


def _matching(paths: Mapping[Product, str], targets: Iterable[str]) -> frozenset[Product]:
    ends = tuple(f".{target}" for target in targets)
    return frozenset(product for product, path in paths.items() if f".{path}".endswith(ends))
