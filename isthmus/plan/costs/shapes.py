"""The sizes of a model, read from a Hugging Face configuration without transformers."""

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.errors import UserError
from isthmus.plan.costs.families import FAMILIES, Family, Rotary
from isthmus.units import closest

CONFIG_FILE: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 16 * 2**20
# Tables of every possible stage grow with the square of the layers: these take some 15 s and 1 GB to plan.
_MAX_LAYERS: Final = 512


class Task(enum.Enum):
    """What the model learns to do, which decides its head."""

    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105 no secret
    QUESTION_ANSWERING = "question-answering"

    @property
    def is_language_model(self) -> bool:
        """Whether its classes are the vocabulary."""
        return self in (Task.CAUSAL_LM, Task.MASKED_LM)


class Activation(enum.Enum):
    """Between the two products of a feed-forward part, by what a backward needs of it."""

    SMOOTH = "smooth"
    """One kernel, such as SiLU or GELU: its input."""
    RECTIFIED = "rectified"
    """ReLU: its output, which the next product keeps anyway."""
    SPELLED_OUT = "spelled out"
    """GELU of GPT-2, written as a formula of several kernels: each of their inputs."""


_ACTIVATIONS: Final = {
    "relu": Activation.RECTIFIED,
    "gelu_new": Activation.SPELLED_OUT,
    "gelu_fast": Activation.SPELLED_OUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as far as its costs go; widths are numbers of elements."""

    model_type: str
    family: Family
    task: Task
    num_labels: int
    num_layers: int
    width: int
    inner_width: int
    vocabulary_size: int
    embedding_width: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    rotary_width: int
    """How much of each head turns with the position."""
    num_experts: int
    """0 where each layer has one feed-forward part."""
    num_active_experts: int
    num_positions: int
    """Positions with a vector of their own; 0 where they are rotated in."""
    num_token_types: int
    activation: Activation
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_parallel_residual: bool
    is_tied: bool
    """Whether embedding and head share their weights where one stage holds both."""
    attention_dropout: float
    residual_dropout: float
    embedding_dropout: float
    attention_windows: tuple[int | None, ...]
    """Per layer, how far back a token sees; None for all the way."""


def read_shape(
    values: Mapping[str, object], *, task: Task = Task.CAUSAL_LM, num_labels: int | None = None
) -> ModelShape:
    """The sizes that a configuration gives, with its family's defaults for what it leaves out."""
    reader = _Reader(values)
    _check_head(reader, task)
    width, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    head_width = reader.count("head_dim", otherwise=max(1, width // num_heads))
    num_experts = reader.number("num_local_experts")
    shape = ModelShape(
        model_type=reader.model_type,
        family=reader.family,
        task=task,
        num_labels=2 if num_labels is None or task is Task.QUESTION_ANSWERING else num_labels,
        num_layers=reader.num_layers(),
        width=width,
        inner_width=reader.count("intermediate_size", otherwise=4 * width),
        vocabulary_size=reader.count("vocab_size"),
        embedding_width=reader.count("embedding_size", otherwise=width),
        num_heads=num_heads,
        num_key_value_heads=reader.count("num_key_value_heads", otherwise=num_heads),
        head_width=head_width,
        rotary_width=round(head_width * reader.rotary_share()),
        num_experts=num_experts,
        num_active_experts=reader.number("num_experts_per_tok") if num_experts else 0,
        num_positions=reader.number("max_position_embeddings"),
        num_token_types=reader.number("type_vocab_size"),
        activation=_ACTIVATIONS.get(reader.text("hidden_act"), Activation.SMOOTH),
        has_qkv_bias=reader.flag("qkv_bias", "attention_bias"),
        has_out_bias=reader.flag("out_bias", "attention_bias"),
        has_mlp_bias=reader.flag("mlp_bias"),
        has_parallel_residual=reader.flag("use_parallel_residual"),
        is_tied=reader.flag("tie_word_embeddings") and task.is_language_model,
        attention_dropout=reader.share("attention_dropout"),
        residual_dropout=reader.share("residual_dropout"),
        embedding_dropout=reader.share("embedding_dropout"),
        attention_windows=reader.windows(),
    )
    for misfit in _misfits(reader, shape):
        raise UserError(f"the model's configuration does not fit together: {misfit}")
    return shape


def max_length(values: Mapping[str, object]) -> int:
    """The longest sequence that has positions, whatever the id of the padding token is."""
    reader = _Reader(values)
    return reader.num_positions - (1 if reader.family.counts_from_padding else 0)


def check_length(sequence_length: int, most: int | None) -> None:
    """Refuse sequences for which a model has too few positions; None where it has any number."""
    if most is not None and sequence_length > most:
        raise UserError(
            f"sequences of {sequence_length} tokens are longer than the model's {most} positions",
            hint=f"set data.sequence_length to {most} or less, "
            "or raise max_position_embeddings of a fresh model",
        )


def load_config(source: str) -> dict[str, object]:
    """The configuration of a model in a folder or on the hub, which keeps what it has fetched before."""
    folder = Path(source)
    path = folder / CONFIG_FILE if folder.is_dir() else _fetch(source)
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UserError(f"{path} is too large for a model's configuration")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(source) from error
    if not isinstance(values, dict):
        raise _unreadable(source)
    return values


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise UserError(
            f"{name!r} is no folder here, and the hub's client is not installed",
            hint="pip install 'isthmus[train]', or give a folder with a config.json",
        ) from error
    try:
        return Path(hf_hub_download(name, CONFIG_FILE))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _unreadable(name) from error


def _unreadable(source: str) -> UserError:
    return UserError(
        f"no configuration of a model is found at {source!r}",
        hint="give a folder with a config.json, or a name on the Hugging Face hub, if it can be reached",
    )


class _Reader:
    """The values of a configuration in one spelling, each checked as it is read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.model_type = str(values.get("model_type"))
        self.family = _family(values.get("model_type"))
        spelled = {self.family.spellings.get(key, key): value for key, value in values.items()}
        self._values = {**self.family.defaults, **spelled}
        self.num_positions = self.number("max_position_embeddings")
        self._values |= self.family.fixed

    def is_absent(self, key: str) -> bool:
        """Whether neither the configuration nor its family gives a value."""
        return self._values.get(key) is None

    def number(self, key: str) -> int:
        """A number of at least 0; 0 where there is none."""
        return self._whole(key, self._values.get(key) or 0, least=0)

    def count(self, key: str, *, otherwise: int | None = None) -> int:
        """A number of at least 1."""
        value = self._values.get(key)
        return self._whole(key, otherwise if value is None else value, least=1)

    def num_layers(self) -> int:
        """As many as the costs of cuts can be tabulated for."""
        number = self.count("num_hidden_layers")
        if number > _MAX_LAYERS:
            raise UserError(
                f"a model of {number} layers cannot be planned, {_MAX_LAYERS} are the most",
                hint="lower num_hidden_layers of the model's configuration",
            )
        return number

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        value = self._values.get(key) or 0.0
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong(key, value, "a number from 0 to 1")
        return float(value)

    def flag(self, *keys: str) -> bool:
        """True or false, by the first of these keys that is there."""
        key = next((key for key in keys if key in self._values), None)
        value = False if key is None else self._values[key]
        if not isinstance(value, bool | None):
            raise self._wrong(str(key), value, "true or false")
        return bool(value)

    def text(self, key: str) -> str:
        """A word."""
        return str(self._values.get(key))

    def rotary_share(self) -> float:
        """How much of a head turns, wherever it is said."""
        rope = self._values.get("rope_parameters")
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            return float(rope["partial_rotary_factor"])
        return self.share("partial_rotary_factor")

    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, by the list of kinds where there is one, else by the layer from which on."""
        num_layers = self.num_layers()
        window = self.number("sliding_window") if self.flag("use_sliding_window") else 0
        kinds = self._values.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == num_layers:
            slides = [kind == "sliding_attention" for kind in kinds]
        else:
            slides = [layer >= self.number("max_window_layers") for layer in range(num_layers)]
        return tuple(window if one and window else None for one in slides)

    def _whole(self, key: str, value: object, *, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(key, value, f"a whole number of at least {least}")
        return value

    def _wrong(self, key: str, value: object, what: str) -> UserError:
        return UserError(f"{key} of the model's configuration is {value!r}, not {what}")


def _check_head(reader: _Reader, task: Task) -> None:
    """Refuse a task for which transformers has no head."""
    lacks_masked = task is Task.MASKED_LM and not reader.family.is_encoder
    if lacks_masked or (task is Task.QUESTION_ANSWERING and not reader.family.has_question_head):
        hint = 'set data.task to "causal-lm", or take an encoder such as BERT'
        raise UserError(f"{reader.model_type} has no head for {task.value} in transformers", hint=hint)


def _misfits(reader: _Reader, shape: ModelShape) -> Iterator[str]:
    """Sizes that do not go together in attention or among experts."""
    if reader.is_absent("head_dim") and shape.width % shape.num_heads:
        yield f"a hidden_size of {shape.width} is no multiple of {shape.num_heads} attention heads"
    if shape.num_heads % shape.num_key_value_heads:
        num_shared = shape.num_key_value_heads
        yield f"{shape.num_heads} attention heads are no multiple of {num_shared} key-value heads"
    if shape.family.rotary is not Rotary.NONE and shape.rotary_width % 2:
        yield f"an odd number of a head's elements, {shape.rotary_width}, cannot turn in pairs"
    if shape.num_experts and shape.num_active_experts > shape.num_experts:
        yield f"{shape.num_active_experts} experts for each token are more than all {shape.num_experts}"


def _family(model_type: object) -> Family:
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    known = f"models of these types can be planned: {', '.join(FAMILIES)}"
    if model_type is None:
        raise UserError("the model's configuration has no model_type", hint=known)
    meant = closest(str(model_type), FAMILIES)
    # What only begins like a known name, such as qwen3_moe, is another model and no slip.
    is_slip = meant is not None and not str(model_type).startswith(meant)
    raise UserError(
        f"the costs of model_type {model_type!r} are not known",
        hint=f"did you mean {meant!r}?" if is_slip else known,
    )
