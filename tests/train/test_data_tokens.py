"""Tokenizers: the model's own, named, trained and kept; and those that do not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from isthmus.errors import UserError
from isthmus.job import DataSpec, Job, ModelSpec
from isthmus.train.data.rows import open_rows
from isthmus.train.data.tokenizer import (
    choose_tokenizer,
    end_id,
    load_tokenizer,
    padding_id,
    read_limits,
    token_values,
    train_tokenizer,
)
from isthmus.train.data.training_data import open_data

TEXT = "Ada bought three apples — and naïve “pears”, 12 of them.\n"


def texts() -> Iterator[str]:
    return (str(row["text"]) for row in open_rows("builtin:messages"))


def trained(vocab_size: int = 400, *, encloses: bool = False) -> Any:
    return train_tokenizer(texts(), vocab_size=vocab_size, encloses=encloses)


def fresh(**values: object) -> ModelSpec:
    return ModelSpec(config={"model_type": "llama", **values})


def choose(tokenizer: str, model: ModelSpec, folder: Path) -> Any:
    data = DataSpec(source="builtin:messages", tokenizer=tokenizer)
    return choose_tokenizer(data, model, texts=texts(), limits=read_limits(model), folder=folder / "kept")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model without weights, whose tokenizer has 400 tokens of the 512 that its embedding holds."""
    folder = tmp_path / "model"
    LlamaConfig(vocab_size=512, pad_token_id=0, num_hidden_layers=1).save_pretrained(folder)
    trained().save_pretrained(folder)
    return folder


def test_a_trained_tokenizer_has_the_size_asked_for_and_loses_nothing() -> None:
    tokenizer = trained()
    assert len(tokenizer) == 400
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer("the street lamp is dark at night")["input_ids"]) < 24


def test_training_is_deterministic() -> None:
    assert trained().backend_tokenizer.to_str() == trained().backend_tokenizer.to_str()


def test_texts_are_enclosed_where_asked() -> None:
    ids = trained(encloses=True)("one", "two")["input_ids"]
    assert (ids[0], ids[-1], ids.count(2)) == (1, 2, 2)
    assert set(trained()("one")["input_ids"]).isdisjoint({0, 1, 2, 3})


def test_a_fresh_model_gets_a_trained_tokenizer_that_is_kept(tmp_path: Path) -> None:
    tokenizer = choose("auto", fresh(vocab_size=300), tmp_path)
    kept = load_tokenizer(str(tmp_path / "kept"))
    assert kept.get_vocab() == tokenizer.get_vocab()
    assert kept(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_resumed_run_takes_the_tokenizer_it_kept(tmp_path: Path) -> None:
    choose("auto", fresh(vocab_size=300), tmp_path)
    assert len(choose("auto", fresh(vocab_size=400), tmp_path)) == 300


def test_another_rank_of_the_machine_may_keep_the_tokenizer_first(tmp_path: Path) -> None:
    data, model = DataSpec(source="builtin:messages"), fresh(vocab_size=300)

    def while_another_is_first() -> Iterator[str]:
        choose("auto", model, tmp_path)
        yield from texts()

    tokenizer = choose_tokenizer(
        data, model, texts=while_another_is_first(), limits=read_limits(model), folder=tmp_path / "kept"
    )
    assert load_tokenizer(str(tmp_path / "kept")).get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_model_brings_its_own(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = choose("auto", ModelSpec(source=str(model_folder)), tmp_path)
    assert tokenizer.get_vocab() == trained().get_vocab()


def test_how_a_pretrained_model_generates_is_kept_for_the_export(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "generation_config.json").write_text('{"temperature": 0.6}')
    given = {"source": "builtin:tales", "sequence_length": 64}
    job = Job.model_validate(
        {"name": "x", "cloud": [{"name": "a"}], "model": {"source": str(model_folder)}, "data": given}
    )
    for _ in range(2):
        open_data(job, tokenizer_folder=tmp_path / "kept")
    assert (tmp_path / "kept" / "generation_config.json").read_text() == '{"temperature": 0.6}'


def test_a_tokenizer_by_name_for_fresh_weights(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = choose(str(model_folder), fresh(), tmp_path)
    given = {"model_type": "llama", "eos_token_id": 2}
    assert token_values(tokenizer, given) == {"vocab_size": 400, "pad_token_id": 0, "bos_token_id": 1}


def test_a_tokenizer_of_more_tokens_than_the_model(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 400 tokens, but the model's vocabulary is 399") as caught:
        choose(str(model_folder), fresh(vocab_size=399), tmp_path)
    assert "vocab_size of [model.config] to 400" in str(caught.value.hint)
    assert not (tmp_path / "kept").exists()


def test_a_tokenizer_of_another_vocabulary_than_the_weights(model_folder: Path, tmp_path: Path) -> None:
    trained(300).save_pretrained(tmp_path / "other")
    for other in ("trained", str(tmp_path / "other")):
        with pytest.raises(UserError, match=r"data\.tokenizer has another vocabulary than") as caught:
            choose(other, ModelSpec(source=str(model_folder)), tmp_path)
        assert 'leave data.tokenizer at "auto"' in str(caught.value.hint)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=300, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    model = ModelSpec(source=str(tmp_path / "model"))
    with pytest.raises(UserError, match="has no tokenizer") as caught:
        choose("auto", model, tmp_path)
    assert 'set it to "trained"' in str(caught.value.hint)
    assert len(choose("trained", model, tmp_path)) == 300


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (fresh(), "has no vocab_size, so no tokenizer can be trained"),
        (fresh(vocab_size=259), "a vocabulary of 259 is too small: bytes and special tokens are 260"),
    ],
)
def test_models_for_which_none_can_be_trained(model: ModelSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        choose("auto", model, tmp_path)
    assert "260 or more" in str(caught.value.hint)


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(question: str = "") -> str:
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr("builtins.input", ask)


@pytest.mark.usefixtures("_nobody_is_asked")
def test_code_that_a_tokenizer_or_model_brings_is_not_run_unasked(model_folder: Path) -> None:
    bring_code(model_folder / "tokenizer_config.json", {"AutoTokenizer": ["own.OwnTokenizer", None]})
    (model_folder / "own.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(UserError, match="brings Python code of its own") as caught:
        load_tokenizer(str(model_folder))
    assert "model.trust_remote_code = true" in str(caught.value.hint)
    bring_code(model_folder / "config.json", {"AutoConfig": "own.OwnConfig"}, model_type="own")
    with pytest.raises(UserError, match="brings Python code of its own"):
        read_limits(ModelSpec(source=str(model_folder)))


def bring_code(file: Path, auto_map: dict[str, object], **changes: object) -> None:
    values = json.loads(file.read_text())
    values.pop("tokenizer_class", None)
    file.write_text(json.dumps({**values, "auto_map": auto_map, **changes}))


def test_special_tokens_that_the_users_configuration_has_elsewhere() -> None:
    with pytest.raises(UserError, match=r"pad_token_id is 5 in \[model.config\], but 0 in the tokenizer"):
        token_values(trained(), {"pad_token_id": 5})


def test_which_tokens_end_and_pad(model_folder: Path) -> None:
    tokenizer = trained()
    model = ModelSpec(source=str(model_folder))
    assert end_id(tokenizer) == 2
    assert padding_id(tokenizer, read_limits(model)) == 0
    assert padding_id(tokenizer, read_limits(fresh(pad_token_id=3))) == 3
    tokenizer.eos_token = tokenizer.pad_token = None
    assert padding_id(tokenizer, read_limits(fresh())) == 0
    with pytest.raises(UserError, match="no token that ends a text"):
        end_id(tokenizer)


@pytest.mark.parametrize(
    ("config", "max_length"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "bert", "max_position_embeddings": 514}, 514),
        ({"model_type": "bert"}, 512),
        ({"model_type": "gpt2", "n_positions": 64}, 64),
        ({"model_type": "unknown"}, None),
    ],
)
def test_the_longest_sequence_of_a_fresh_model(config: dict[str, object], max_length: int | None) -> None:
    assert read_limits(ModelSpec(config=config)).max_length(pad_id=1) == max_length


def test_the_longest_sequence_of_a_stored_model(tmp_path: Path) -> None:
    GPT2Config(vocab_size=300, n_positions=64).save_pretrained(tmp_path)
    limits = read_limits(ModelSpec(source=str(tmp_path)))
    assert (limits.vocab_size, limits.max_length(pad_id=0)) == (300, 64)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model is found"):
        read_limits(ModelSpec(source=str(tmp_path)))
