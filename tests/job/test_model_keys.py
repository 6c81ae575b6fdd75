"""Keys of models' configurations: as transformers has them, and refused where it does not."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
from isthmus.job import ModelSpec
from isthmus.job.sections import MODEL_KEYS
from isthmus.model.blueprint import fresh_blueprint
from isthmus.model.heads import HEADS


@pytest.mark.parametrize("model_type", MODEL_KEYS)
def test_they_are_those_of_transformers(model_type: str) -> None:
    own = CONFIG_MAPPING[model_type]
    assert {*own().to_dict(), *own.attribute_map} <= set(MODEL_KEYS[model_type])


@pytest.mark.parametrize("key", ["hiden_size", "zebra"])
def test_a_misspelt_key_is_refused_in_the_words_of_a_run(key: str) -> None:
    values: dict[str, object] = {"model_type": "llama", key: 64}
    with pytest.raises(UserError) as running:
        fresh_blueprint(values, head=HEADS["causal-lm"])
    with pytest.raises(ValueError, match=f"the configuration of llama has no key '{key}'") as reading:
        ModelSpec(config=values)
    assert str(running.value) in str(reading.value)


def test_models_that_transformers_alone_knows_are_left_to_it() -> None:
    assert ModelSpec(config={"model_type": "mamba", "zebra": 1}).config is not None
