"""Facts as bytes and back: one serialiser for everything that schedulers exchange and save.

Facts come from peers, so their size is checked before they are parsed and every field by its type. The values
are JSON, with NaN and infinities as constants, so that floats return to the bit.
"""

import functools
from collections.abc import Hashable
from typing import Any, Final, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from isthmus.errors import FrameError
from isthmus.plan.types import Facts

MAX_FACTS_BYTES: Final = 32 * 1024
_MAX_SHOWN: Final = 200

F = TypeVar("F", bound=Facts)


def pack_facts(facts: Facts, *, max_bytes: int = MAX_FACTS_BYTES) -> str:
    """Facts as JSON text; more than `max_bytes` is the caller's mistake."""
    text = _adapter_of(type(facts)).dump_json(facts).decode()
    if len(text) > max_bytes:
        raise ValueError(f"{type(facts).__name__} of {len(text)} bytes is over the limit of {max_bytes}")
    return text


def unpack_facts(text: object, kind: type[F], *, max_bytes: int = MAX_FACTS_BYTES) -> F:
    """The facts of this kind that `pack_facts` gave; anything else is an error of the peer."""
    if not isinstance(text, str) or len(text) > max_bytes:
        raise FrameError(f"a message whose {kind.__name__} is no text or over {max_bytes} bytes")
    try:
        found: F = _adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]
        raise FrameError(f"a message with unreadable {kind.__name__}: {str(reason)[:_MAX_SHOWN]}") from None
    return found


def _adapter_of(kind: type[Facts]) -> TypeAdapter[Any]:
    # mypy does not see that a class is hashable when its instances compare by value.
    return _adapter(cast("Hashable", kind))


@functools.lru_cache(maxsize=256)
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Facts]", kind))
