"""Chooses the tokenizer: the model's own, another one by name, or one trained on the data."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
from isthmus.job import DataSpec, ModelSpec
from isthmus.job.hub import code_not_run, find_file, needs_code
from isthmus.job.sections import ABNetSpec
from isthmus.model.blueprint import read_config
from isthmus.model.encoder_decoder import MODEL_TYPES

TRAINED: Final = "trained"
_SPECIAL: Final = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
_LEAST_VOCABULARY: Final = 256 + len(_SPECIAL)
_MAX_TRAINING_CHARACTERS: Final = 50_000_000
_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_COUNT_FROM_PADDING: Final = ("camembert", "roberta", "xlm-roberta")
_VOCABULARY: Final = "vocab_size"
_POSITIONS: Final = "max_position_embeddings"
_PADDING: Final = "pad_token_id"
_ID_KEYS: Final = (_PADDING, "bos_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model's configuration says about tokens; None for what it does not say."""

    vocab_size: int | None
    pad_id: int | None
    num_positions: int | None
    counts_from_padding: bool
    """Whether the first position follows the padding token's id, as in RoBERTa."""

    def max_length(self, pad_id: int) -> int | None:
        """The longest sequence that has positions, given the id of the padding token."""
        if self.num_positions is None or not self.counts_from_padding:
            return self.num_positions
        return self.num_positions - pad_id - 1


def read_limits(model: ModelSpec) -> ModelLimits:
    """The limits of the job's model: of its `config` table, or of the configuration beside its weights."""
    if model.abnet is not None:
        return _limits_of_both(model, model.abnet)
    if model.source is not None:
        config = read_config(model.source, trust_remote_code=model.trust_remote_code).get_text_config()
        values = {
            key: getattr(config, key, None) for key in ("model_type", _VOCABULARY, _PADDING, _POSITIONS)
        }
    else:
        given = model.config or {}
        values = {**given, _POSITIONS: _fresh_positions(given)}
    return ModelLimits(
        vocab_size=_whole(values, _VOCABULARY),
        pad_id=_whole(values, _PADDING),
        num_positions=_whole(values, _POSITIONS),
        counts_from_padding=values.get("model_type") in _COUNT_FROM_PADDING,
    )


def _limits_of_both(model: ModelSpec, abnet: ABNetSpec) -> ModelLimits:
    """The limits that texts and translations keep to, where two encoders are joined."""
    apart = model.model_copy(update={"abnet": None})
    second = {"source": abnet.decoder or model.source, "config": abnet.decoder_config or model.config}
    own, other = read_limits(apart), read_limits(apart.model_copy(update=second))
    positions = [one for one in (own.num_positions, other.num_positions) if one is not None]
    counts = own.counts_from_padding or other.counts_from_padding
    return replace(own, num_positions=min(positions, default=None), counts_from_padding=counts)


def choose_tokenizer(
    data: DataSpec, model: ModelSpec, *, texts: Iterable[str], limits: ModelLimits, folder: Path
) -> Any:
    """The run's tokenizer, always loaded from its folder, in a new and in a resumed run."""
    if not _is_kept(folder):
        tokenizer = _new_tokenizer(data, model, texts=texts, limits=limits)
        check_vocabulary(tokenizer, limits)
        _keep(tokenizer, folder)
    return load_tokenizer(str(folder), trust_remote_code=model.trust_remote_code)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or on the hub; code that it brings is not run unless trusted."""
    if not any(find_file(name, file) for file in _FILES):
        find_file(name, _FILES[0], is_required=True)
        raise UserError(
            f"{name} has no tokenizer", hint=f'name one in data.tokenizer, or set it to "{TRAINED}"'
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        if needs_code(error):
            raise code_not_run(name) from None
        raise UserError(
            f"the tokenizer of {name} cannot be loaded: {str(error).strip().splitlines()[0]}",
            hint="name another one in data.tokenizer",
        ) from None


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, encloses: bool) -> Any:
    """A byte-level BPE of at most so many tokens; `encloses` puts each text between <bos> and <eos>."""
    if vocab_size < _LEAST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small: bytes and special tokens are {_LEAST_VOCABULARY}",
            hint=f"set vocab_size of [model.config] to {_LEAST_VOCABULARY} or more",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, _MAX_TRAINING_CHARACTERS), trainer=trainer)
    if encloses:
        tokenizer.post_processor = _enclosing(tokenizer)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **_SPECIAL)


def trains_tokenizer(data: DataSpec, model: ModelSpec) -> bool:
    """Whether the job's tokenizer is trained on its data."""
    return data.tokenizer == TRAINED or (data.tokenizer == "auto" and model.source is None)


def check_vocabulary(tokenizer: Any, limits: ModelLimits) -> None:
    """Refuse a tokenizer with ids that the model does not have."""
    size = vocabulary_size(tokenizer)
    if limits.vocab_size is not None and size > limits.vocab_size:
        raise UserError(
            f"the tokenizer has {size} tokens, but the model's vocabulary is {limits.vocab_size}",
            hint=f'leave data.tokenizer at "auto", or set vocab_size of [model.config] to {size} or more',
        )


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def token_values(tokenizer: Any, given: Mapping[str, object]) -> dict[str, object]:
    """The values that a fresh model's configuration takes from the tokenizer and the user has not given."""
    values: dict[str, object] = {_VOCABULARY: vocabulary_size(tokenizer)}
    for key in _ID_KEYS:
        own = getattr(tokenizer, key)
        if own is None:
            continue
        if given.get(key, own) != own:
            raise UserError(
                f"{key} is {given[key]} in [model.config], but {own} in the tokenizer",
                hint=f"leave {key} out: it is then taken from the tokenizer",
            )
        values[key] = own
    if given.get("model_type") in MODEL_TYPES:
        # As in Marian and T5 a decoder starts with padding; in mBART with what ends a translation.
        start = "eos_token_id" if given["model_type"] == "mbart" else _PADDING
        values["decoder_start_token_id"] = values[start]
    return {key: value for key, value in values.items() if key not in given}


def ids_of_encoder(tokenizer: Any) -> dict[str, object]:
    """Special tokens by a decoder's names for them: it starts and ends as texts of the encoder do."""
    starts = (tokenizer.bos_token_id, tokenizer.cls_token_id)
    start = next((one for one in starts if one is not None), None)
    return {_PADDING: tokenizer.pad_token_id, "bos_token_id": start, "eos_token_id": end_id(tokenizer)}


def end_id(tokenizer: Any) -> int:
    """The token that ends a document."""
    for own in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if own is not None:
            return int(own)
    raise UserError("the tokenizer has no token that ends a text", hint="name another one in data.tokenizer")


def padding_id(tokenizer: Any, limits: ModelLimits) -> int:
    """The id that fills short sequences; any will do where model and tokenizer have none, as it is masked."""
    for known in (limits.pad_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if known is not None:
            return int(known)
    return 0


def _keep(tokenizer: Any, folder: Path) -> None:
    """Write all files or none; another rank of this machine may have written the same before."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            tokenizer.save_pretrained(new)
            new.rename(folder)
    except OSError as error:
        if not _is_kept(folder):
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None


def _is_kept(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def _new_tokenizer(data: DataSpec, model: ModelSpec, *, texts: Iterable[str], limits: ModelLimits) -> Any:
    if data.tokenizer == "auto" and model.source is not None:
        return load_tokenizer(model.source, trust_remote_code=model.trust_remote_code)
    if not trains_tokenizer(data, model):
        tokenizer = load_tokenizer(data.tokenizer, trust_remote_code=model.trust_remote_code)
    elif limits.vocab_size is None:
        raise UserError(
            "the model's configuration has no vocab_size, so no tokenizer can be trained",
            hint=f"set vocab_size in [model.config], to {_LEAST_VOCABULARY} or more",
        )
    else:
        encloses = data.task != "causal-lm"
        tokenizer = train_tokenizer(texts, vocab_size=limits.vocab_size, encloses=encloses)
    if model.source is not None:
        _check_same_vocabulary(tokenizer, model.source, trust_remote_code=model.trust_remote_code)
    return tokenizer


def check_decoder(tokenizer: Any, model: ModelSpec) -> None:
    """Refuse a second encoder that was trained with another vocabulary than the first."""
    decoder = None if model.abnet is None else model.abnet.decoder
    if decoder is None or not any(find_file(decoder, file) for file in _FILES):
        return
    if load_tokenizer(decoder).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{decoder} has another vocabulary than {model.source}, with which model.abnet joins it",
            hint="take two encoders of one vocabulary, such as two multilingual ones",
        )


def _check_same_vocabulary(tokenizer: Any, model_name: str, *, trust_remote_code: bool) -> None:
    """Refuse another vocabulary than that of the weights, if the model has tokenizer files."""
    if any(find_file(model_name, file) for file in _FILES):
        own = load_tokenizer(model_name, trust_remote_code=trust_remote_code)
        if own.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"data.tokenizer has another vocabulary than {model_name}",
                hint='leave data.tokenizer at "auto", to use the model\'s own',
            )


def _fresh_positions(given: Mapping[str, object]) -> object:
    """The number of positions of a fresh model: as given, also under the family's own name, or by default."""
    model_type = given.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    own_name = config_class.attribute_map.get(_POSITIONS, _POSITIONS)
    return given.get(_POSITIONS) or given.get(own_name) or getattr(config_class(), _POSITIONS, None)


def _whole(values: Mapping[str, object], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Texts up to a limit, since a vocabulary gains nothing from a larger corpus."""
    left = limit
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def _enclosing(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    begin, end = _SPECIAL["bos_token"], _SPECIAL["eos_token"]
    return processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
