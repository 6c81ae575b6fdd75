"""What a message between stages takes on the line: the type of its numbers, and all that goes around them.

Under `precision = "bfloat16"` the residual stream is as wide as the embedding made it. Ranks that hold their
stage whole have a float32 embedding, and autocast narrows only what products read; ranks that share a stage
out gather its weights in bfloat16, and make or take the stream in it. What is added to it never narrows it.
"""

from dataclasses import dataclass
from typing import Final

from isthmus.plan.costs.arithmetic import WIDE_BYTES, Arithmetic
from isthmus.plan.costs.shapes import ModelShape, Task

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
    """Of one token: its id, and its label where that is another number."""
    ends_in_norm: bool = False
    """Whether every layer does, as an encoder's: on an accelerator autocast keeps norms in float32."""
    has_projection: bool = False
    """Whether the embedding ends in a product, whose result autocast has narrowed."""
    has_experts: bool = False
    """Experts are multiplied in float32 unless their weights are gathered in bfloat16."""
    narrow_on_cpu: tuple[bool, bool, bool] | None = None
    """As measured under autocast: whether bfloat16 leaves the first stage, and one to which float32 or
    bfloat16 came; None where it was not measured."""
    narrow_on_accelerator: tuple[bool, bool, bool] | None = None

    def leave_narrow(
        self, arithmetic: Arithmetic, *, is_sharded: bool, arrived_narrow: bool | None = None
    ) -> bool:
        """Whether what leaves a stage is bfloat16, given what came to it; None where it is the first."""
        measured = self.narrow_on_accelerator if arithmetic.on_accelerator else self.narrow_on_cpu
        if measured is not None and arithmetic.is_mixed:
            return is_sharded or measured[0 if arrived_narrow is None else 1 + arrived_narrow]
        if not arithmetic.is_mixed or (self.ends_in_norm and arithmetic.on_accelerator):
            return False
        if arrived_narrow is None:
            arrived_narrow = self.has_projection
        return is_sharded or (arrived_narrow and not self.has_experts)

    def forward_bytes(self, payload_bytes: int, *, num_tokens: int) -> int:
        """An activation on the line: integers and header go with it."""
        return framed_bytes(payload_bytes + num_tokens * self.integer_bytes + _FORWARD_HEADER_BYTES)

    def backward_bytes(self, payload_bytes: int) -> int:
        """Its gradient on the line."""
        return framed_bytes(payload_bytes + _BACKWARD_HEADER_BYTES)


def messages_of(shape: ModelShape) -> Messages:
    """The messages of a model of this shape."""
    return Messages(
        integer_bytes=integer_bytes(shape.vocabulary_size, shape.task),
        ends_in_norm=shape.family.is_encoder,
        has_projection=shape.embedding_width != shape.width,
        has_experts=shape.num_experts > 0,
    )


def stream_bytes(*, is_narrow: bool) -> int:
    """Of one element of the residual stream."""
    return 2 if is_narrow else WIDE_BYTES


def framed_bytes(num_bytes: int) -> int:
    """A message with what gRPC, HTTP/2 and TLS put around it."""
    num_records = -(-num_bytes // _RECORD_BYTES)
    return _PREFIX_BYTES + num_bytes + num_records * _PER_RECORD_BYTES


def _id_bytes(num_ids: int) -> int:
    """In the smallest type that holds them all."""
    return next(size for size in (1, 2, 4) if num_ids <= 256**size)


def integer_bytes(vocabulary_size: int, task: Task) -> int:
    """Of one token's id, and of its label where that is another number."""
    return _id_bytes(vocabulary_size) + _label_bytes(vocabulary_size, task)


def _label_bytes(vocabulary_size: int, task: Task) -> int:
    """Labels of a causal model are its ids and do not cross again; those of whole sequences are few."""
    match task:
        case Task.MASKED_LM:
            # One bit is for the sign, since tokens that do not count have a negative label.
            return _id_bytes(2 * vocabulary_size)
        case Task.TOKEN_CLASSIFICATION:
            return 1
    return 0
