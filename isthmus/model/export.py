"""From stages back to one model: each cloud writes its part, `merge` joins them for `from_pretrained`."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.job.write import sync
from isthmus.model.bottleneck import Half
from isthmus.model.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, Adapters
from isthmus.model.source import INDEX_FILE, WEIGHTS_FILE
from isthmus.model.stage import Stage
from isthmus.model.transformers_log import quiet_transformers

PART_FILE: Final = "part.json"
CONFIG_FILE: Final = "config.json"
_UP_FILE: Final = "up.safetensors"
_DOWN_FILE: Final = "down.safetensors"
_ADAPTER_FOLDER: Final = "adapter"
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
    """Write a stage's weights or adapters, its configuration, and its halves of bottlenecks, all or nothing.

    `tensors` are its weights by their names in `stage.model`, where several ranks hold them.
    """
    with _all_or_nothing(folder) as new, quiet_transformers():
        if stage.adapters is None:
            stage.model.save_pretrained(
                new, state_dict=None if tensors is None else dict(tensors), max_shard_size=max_file_bytes
            )
        else:
            weights = tensors if tensors is not None else stage.model.state_dict()
            _write_adapted(stage.model, stage.adapters, weights, new, max_file_bytes)
        for half, file in ((stage.up, _UP_FILE), (stage.down, _DOWN_FILE)):
            if half is not None and half.has_begun:
                _write_half(half, new / file)
        about = {"layers": [stage.layers.start, stage.layers.stop], "num_layers": stage.num_layers}
        (new / PART_FILE).write_text(json.dumps(about))


def merge(parts: Sequence[Path], folder: Path, *, companions: Iterable[Path] = ()) -> tuple[str, ...]:
    """Join the parts of all stages, all or nothing; companions, the tokenizer's files say, go along.

    A bottleneck has no place in the model as transformers knows it: it is written beside it, and noted. Where
    only adapters were trained the folder is one that peft loads; with merged weights, they lie in `adapter/`.
    """
    read = sorted((_read_part(part) for part in parts), key=lambda part: part.layers.start)
    _check_whole(read)
    with _all_or_nothing(folder) as new:
        if read[0].files:
            _join_weights(read, new)
            for file in read[-1].folder.glob("*.json"):
                if file.name not in {PART_FILE, INDEX_FILE, ADAPTER_CONFIG_FILE}:
                    shutil.copyfile(file, new / file.name)
        _join_adapters(read, new / _ADAPTER_FOLDER if read[0].files else new)
        for companion in companions:
            shutil.copyfile(companion, new / companion.name)
        return _join_boundaries(read, new)


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
        if part.layers.start != expected or not (part.files or _is_adapted(part)):
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


def _write_adapted(
    model: PreTrainedModel,
    adapters: Adapters,
    weights: Mapping[str, Tensor],
    folder: Path,
    max_file_bytes: int,
) -> None:
    adapters.write(weights, folder)
    if adapters.spec.merge:
        model.save_pretrained(folder, state_dict=adapters.merged(weights), max_shard_size=max_file_bytes)
    else:
        model.config.save_pretrained(folder)


def _is_adapted(part: Part) -> bool:
    return (part.folder / ADAPTER_FILE).is_file()


def _join_adapters(parts: Sequence[Part], folder: Path) -> None:
    """Write the adapters of all parts into one file; the last part knows the head that goes with them."""
    if not all(map(_is_adapted, parts)):
        return
    folder.mkdir(exist_ok=True)
    tensors = {name: one for part in parts for name, one in load_file(part.folder / ADAPTER_FILE).items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    shutil.copyfile(parts[-1].folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_CONFIG_FILE)


def _write_half(half: Half, file: Path) -> None:
    tensors = {name: one.contiguous() for name, one in half.values().items()}
    save_file(tensors, file, metadata={"boundary": str(half.spec)})


def _join_boundaries(parts: Sequence[Part], folder: Path) -> tuple[str, ...]:
    """Write both halves of each bottleneck into one file, numbered as the stage behind it."""
    notes = []
    for index, (before, behind) in enumerate(pairwise(parts), start=1):
        halves = {"down": before.folder / _DOWN_FILE, "up": behind.folder / _UP_FILE}
        if not all(file.is_file() for file in halves.values()):
            continue
        with safe_open(halves["up"], framework="pt") as up:
            text = up.metadata()["boundary"]
        name = f"boundary-{index}.safetensors"
        note = (
            f"the model was trained with {text} before layer {behind.layers.start}, which transformers "
            f"leaves out: its weights are in {name}"
        )
        tensors = {
            f"{half}.{key}": one for half, file in halves.items() for key, one in load_file(file).items()
        }
        save_file(tensors, folder / name, metadata={"boundary": text, "note": note})
        notes.append(note)
    return tuple(notes)


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
            for path in [*new.rglob("*"), new]:
                sync(path)
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            new.rename(folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
