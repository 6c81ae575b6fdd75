"""A pretrained model in a folder or on the hub, and its tensors, each read only when asked for."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.errors import UserError

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with a model in Hugging Face's layout, or a model's name on the hub."""

    name: str

    def find(self, file: str) -> Path | None:
        """The local path of a file, downloaded if need be; None where there is no such file to be had."""
        folder = Path(self.name)
        if folder.is_dir():
            return folder / file if (folder / file).is_file() else None
        try:
            return Path(hf_hub_download(self.name, file))
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise self.unreachable() from error

    def unreachable(self) -> UserError:
        """The error for a model that is neither here nor on the hub."""
        return UserError(
            f"no model is found at {self.name!r}",
            hint="give a folder with a config.json, or a name on the Hugging Face hub, if it can be reached",
        )


def needs_code(error: Exception) -> bool:
    """Whether transformers has refused to run code that a model or tokenizer brings."""
    return "trust_remote_code" in str(error)


def code_not_run(name: str) -> UserError:
    """The error for a model or tokenizer that does not work without its own code."""
    return UserError(
        f"{name} brings Python code of its own, which is not run unless the job says so",
        hint="read the code, and if you trust it, set model.trust_remote_code = true",
    )


class Checkpoint:
    """The safetensors of a pretrained model, in one file or many."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._files: dict[str, Any] = {}
        # Loaders ask from several threads at once.
        self._lock = threading.Lock()

    def tensors(self) -> "dict[str, LazyTensor]":
        """Every tensor by name; none is read, and no shard fetched, before it is asked for."""
        index = self.source.find(INDEX_FILE)
        if index is not None:
            return {name: LazyTensor(self, file, name) for name, file in _read_index(index).items()}
        if self.source.find(WEIGHTS_FILE) is None:
            raise UserError(
                f"{self.source.name} has no safetensors weights",
                hint="pickled weights are never loaded: convert them with transformers' save_pretrained",
            )
        return {name: LazyTensor(self, WEIGHTS_FILE, name) for name in self.open(WEIGHTS_FILE).keys()}  # noqa: SIM118 not a dict

    def open(self, file: str) -> Any:
        """A file of the checkpoint, opened once."""
        with self._lock:
            if file not in self._files:
                self._files[file] = self._open(file)
            return self._files[file]

    def _open(self, file: str) -> Any:
        path = self.source.find(file)
        if path is None:
            raise UserError(f"{self.source.name} lacks {file}, which its index names", hint="fetch it again")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is no safetensors file: {error}", hint="fetch it again") from None


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor in a checkpoint, read when it is indexed, as transformers' loader does."""

    checkpoint: Checkpoint
    file: str
    name: str

    def __getitem__(self, index: EllipsisType | slice | tuple[slice, ...]) -> Tensor:
        try:
            # safetensors gives every reader the same memory, that of the file; a model trains in its own.
            tensor: Tensor = self.checkpoint.open(self.file).get_slice(self.name)[index].clone()
        except SafetensorError as error:
            raise UserError(
                f"{self.name} cannot be read from {self.file} of {self.checkpoint.source.name}: {error}",
                hint="fetch the file again",
            ) from None
        return tensor


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        named = {str(name): Path(file).name for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no index of safetensors", hint="fetch it again") from None
    return named
