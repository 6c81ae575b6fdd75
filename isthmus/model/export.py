"""From stages back to one model: each cloud writes its part, `merge` joins them for `from_pretrained`."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.errors import UserError
from isthmus.model.source import INDEX_FILE, WEIGHTS_FILE
from isthmus.model.stage import Stage
from isthmus.model.transformers_log import quiet_transformers

PART_FILE: Final = "part.json"
CONFIG_FILE: Final = "config.json"
_HEADER_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one stage has written: its layers, and its files of weights with the tensors in each."""

    folder: Path
    layers: range
    num_layers: int
    config: Mapping[str, Any]
    files: Mapping[str, tuple[str, ...]]


def write_part(
    stage: Stage,
    folder: Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a stage's weights and configuration, all or nothing.

    `tensors` are its weights by their names in `stage.model`, where several ranks hold them.
    """
    with _all_or_nothing(folder) as new, quiet_transformers():
        stage.model.save_pretrained(
            new, state_dict=None if tensors is None else dict(tensors), max_shard_size=max_file_bytes
        )
        about = {"layers": [stage.layers.start, stage.layers.stop], "num_layers": stage.num_layers}
        (new / PART_FILE).write_text(json.dumps(about))


def merge(parts: Sequence[Path], folder: Path, *, companions: Iterable[Path] = ()) -> None:
    """Join the parts of all stages, all or nothing; companions, the tokenizer's files say, go along."""
    read = sorted((_read_part(part) for part in parts), key=lambda part: part.layers.start)
    _check_whole(read)
    with _all_or_nothing(folder) as new:
        _join_weights(read, new)
        for file in read[-1].folder.glob("*.json"):
            if file.name not in {PART_FILE, INDEX_FILE}:
                shutil.copyfile(file, new / file.name)
        for companion in companions:
            shutil.copyfile(companion, new / companion.name)


def _read_part(folder: Path) -> Part:
    try:
        about = json.loads((folder / PART_FILE).read_bytes())
        start, stop = about["layers"]
        files = sorted(folder.glob("model*.safetensors"))
        return Part(
            folder=folder,
            layers=range(int(start), int(stop)),
            num_layers=int(about["num_layers"]),
            config=json.loads((folder / CONFIG_FILE).read_bytes()),
            files={file.name: _tensor_names(file) for file in files},
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{folder} is no part of a model: {error}",
            hint="let the cloud that owns it write it again",
        ) from error


def _tensor_names(file: Path) -> tuple[str, ...]:
    with safe_open(file, framework="pt") as weights:
        return tuple(weights.keys())


def _check_whole(parts: Sequence[Part]) -> None:
    """The parts must be of one model, and hold each of its layers once."""
    if not parts:
        raise UserError("a model is joined from at least one part", hint="name what the clouds wrote")
    expected = 0
    for part in parts:
        if part.layers.start != expected or not part.files:
            raise UserError(
                f"{part.folder} holds layers from {part.layers.start} on, where {expected} is due",
                hint="name each cloud's part once",
            )
        if _essence(part) != _essence(parts[0]):
            raise UserError(f"{part.folder} and {parts[0].folder} are parts of different models")
        expected = part.layers.stop
    if expected != parts[0].num_layers:
        raise UserError(
            f"the layers from {expected} to {parts[0].num_layers - 1} are in none of the parts",
            hint="name each cloud's part once",
        )


def _essence(part: Part) -> tuple[int, Mapping[str, Any]]:
    config = {key: value for key, value in part.config.items() if key != "transformers_version"}
    return part.num_layers, config


def _join_weights(parts: Sequence[Part], folder: Path) -> None:
    """Give the files of all parts numbers of one row, and write the index over them."""
    files = [(part.folder / name, tensors) for part in parts for name, tensors in part.files.items()]
    weight_map: dict[str, str] = {}
    for number, (file, tensors) in enumerate(files, start=1):
        name = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for tensor in tensors:
            if tensor in weight_map:
                raise UserError(f"{tensor} is in more than one part", hint="name each cloud's part once")
            weight_map[tensor] = name
        _place(file, folder / name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_tensor_bytes(file) for file, _ in files)},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _place(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(file, target)


def _tensor_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
    return file.stat().st_size - _HEADER_LENGTH_BYTES - header_bytes


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of the old one once it is whole and on disk."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            yield new
            for path in [*new.iterdir(), new]:
                _sync(path)
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            new.rename(folder)
            _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
