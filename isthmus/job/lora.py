"""Low-rank adapters, as the job names them."""

from typing import Annotated

from pydantic import AfterValidator, Field

from isthmus.job.fields import Frozen
from isthmus.job.findings import FieldError


def _checked_targets(targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if targets is not None and (not targets or not all(targets)):
        raise FieldError("must name modules of a layer", cure='for example ["q_proj", "v_proj"]')
    return targets


class LoraSpec(Frozen):
    """Small adapters are trained beside the model's own weights, which stay as they are."""

    r: int = Field(default=16, ge=1, le=4096, description="rank of the adapters", examples=[16])
    alpha: float = Field(
        default=32.0, gt=0, description="weight of the adapters, times their rank", examples=[32.0]
    )
    targets: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | None, AfterValidator(_checked_targets)
    ] = Field(
        default=None,
        description="modules of each layer that get one, by the end of their name; all linear ones if absent",
        examples=[["q_proj", "v_proj"]],
    )
    merge: bool = Field(
        default=False,
        description="export the whole model with the adapters in its weights, beside the adapter alone",
        examples=[True],
    )
