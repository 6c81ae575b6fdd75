"""A stage computes without reading from the device; other models are not touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from isthmus.model.stage import Batch, Stage, StageInput, StageOutput
from isthmus.model.transformers_calls import one_sequence_a_row
from tests.model.cases import RNG_KEY, blueprint, build, make_batch

_READING = {"__bool__", "__contains__", "__int__", "item", "tolist"}
PACKED = torch.tensor([[0, 1, 2, 0, 1]])


class Reads(TorchFunctionMode):
    """Counts the values that Python reads from tensors: each is a wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += getattr(func, "__name__", "") in _READING
        return func(*args, **(kwargs or {}))


def test_other_models_are_still_asked() -> None:
    indices = masking_utils.find_packed_sequence_indices(PACKED)
    assert indices is not None
    assert indices.tolist() == [[0, 0, 0, 1, 1]]
    with one_sequence_a_row(False):
        assert masking_utils.find_packed_sequence_indices(PACKED) is not None
    with one_sequence_a_row(True):
        assert masking_utils.find_packed_sequence_indices(PACKED) is None
    assert masking_utils.find_packed_sequence_indices(PACKED) is not None


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mistral", "gemma", "phi3", "gpt_neox"])
def test_a_stage_reads_nothing_from_the_device(name: str) -> None:
    plan = blueprint(name)
    [stage] = build(plan, [range(plan.num_layers)])
    batch = make_batch(plan.head, lengths=(9, 9))
    unpadded = Batch(ids=batch.ids, labels=batch.labels, num_targets=batch.num_targets)
    output, num_reads = _counted(stage, unpadded)
    assert num_reads == 0
    assert output.loss is not None
    positions = torch.arange(9).expand(2, 9)
    told = Batch(ids=batch.ids, labels=batch.labels, num_targets=batch.num_targets, position_ids=positions)
    same, num_reads = _counted(stage, told)
    assert num_reads > 0, "with positions of its own a batch may be packed"
    assert same.loss is not None
    assert torch.equal(same.loss, output.loss)


def _counted(stage: Stage, batch: Batch) -> tuple[StageOutput, int]:
    with Reads() as reads:
        output = stage(StageInput(batch=batch, rng_key=RNG_KEY))
    return output, reads.number
