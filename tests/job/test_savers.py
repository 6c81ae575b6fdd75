import pytest
from pydantic import ValidationError

from isthmus.job.sections import LoraSpec, ModelSpec, TrainSpec


def test_savers_are_off_unless_asked_for() -> None:
    train = TrainSpec()
    assert (train.recompute, train.optimizer_bits, train.offload_optimizer, train.compile) == (
        False,
        32,
        False,
        False,
    )
    assert ModelSpec(source="a/b").lora is None


def test_a_budget_is_read_with_its_unit() -> None:
    train = TrainSpec.model_validate({"recompute": "auto", "memory_budget": "40 GiB"})
    assert train.memory_budget_bytes == 40 * 2**30


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory_budget": "1 GiB"}, "nothing keeps to"),
        ({"memory_budget": "1 GiB", "recompute": True}, "nothing keeps to"),
        ({"optimizer_bits": 8, "offload_optimizer": True}, "both together"),
        ({"optimizer_bits": 16}, "optimizer_bits"),
        ({"recompute": "sometimes"}, "recompute"),
    ],
)
def test_savers_that_do_not_go_together_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainSpec.model_validate(values)


@pytest.mark.parametrize("values", [{"r": 0}, {"alpha": 0.0}, {"targets": []}, {"targets": [""]}])
def test_adapters_without_substance_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraSpec.model_validate(values)


def test_adapters_need_weights_to_stand_on() -> None:
    with pytest.raises(ValidationError, match="adapters for fresh weights"):
        ModelSpec.model_validate({"config": {"model_type": "llama"}, "lora": {"r": 4}})
    assert ModelSpec.model_validate({"source": "a/b", "lora": {"r": 4}}).lora == LoraSpec(r=4)
