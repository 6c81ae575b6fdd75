"""From stages back to one model: each cloud writes its part, `merge` joins them for `from_pretrained`.

No rank holds the weights of several stages: files of parts are linked or copied, one at a time. The last
evaluation of a run loads the joined model as anybody would.
"""

import inspect
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.job.hub import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from isthmus.job.load import sync
from isthmus.model import modeling_bottleneck
from isthmus.model.bottleneck import Half
from isthmus.model.encoder_decoder import decoder_inputs, untied_embedding
from isthmus.model.heads import Head
from isthmus.model.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from isthmus.model.modeling_bottleneck import BottleneckConfig, BottleneckModel
from isthmus.model.stage import Batch, Stage
from isthmus.model.transformers_calls import expect_no_padding, quiet_transformers

PART_FILE: Final = "part.json"
_UP_FILE: Final = "up.safetensors"
_DOWN_FILE: Final = "down.safetensors"
_ADAPTER_FOLDER: Final = "adapter"
_INNER: Final = "inner."
_CODE: Final = "modeling_bottleneck"
_ROOM: Final = 1.25
"""Memory for a model that runs without gradients, by that of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one stage has written."""

    folder: Path
    layers: range
    num_layers: int
    layers_path: str
    auto_class: str
    config: Mapping[str, Any]
    files: Mapping[str, Mapping[str, int]]
    """By file: the bytes of each tensor in it, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBoundary:
    """A bottleneck in a joined model, and the layer before which it lies."""

    layer: int
    text: str
    entry: Mapping[str, Any]
    """What the configuration says of it."""
    tensors: Mapping[str, Tensor]
    """Its weights by their names in the folder."""


def _join_halves(
    layer: int, text: str, down: Mapping[str, Tensor], up: Mapping[str, Tensor]
) -> TrainedBoundary:
    """Fold both ends' anchors into one: what the sender takes off, the receiver need not put back."""

    def through(rows_ND: Tensor) -> Tensor:
        """What the receiver would get of these rows."""
        narrow_NR = rows_ND.double() @ down["weight"].double().T
        return narrow_NR @ up["weight"].double().T

    rank, width = down["weight"].shape
    entry: dict[str, Any] = {"layer": layer, "trained_as": text, "width": width, "rank": rank}
    if "init=ffn-" in text:
        entry["within"] = True
    found = {"down.weight": down["weight"]}
    if "core" in up:
        entry["inner_width"] = len(up["rise"])
        found |= {"core.weight": up["core"], "rise.weight": up["rise"]}
    else:
        bias_D = up["anchors.mean"].double() - through(down["anchors.mean"])
        found |= {"up.weight": up["weight"], "up.bias": bias_D}
    if "anchors.table" in up:
        entry["vocabulary_size"] = len(up["anchors.table"])
        found["tokens.weight"] = _scaled(up, "table") - through(_scaled(down, "table"))
    elif "anchors.codes" in up:
        codes = torch.cat((up["anchors.codes"], down["anchors.codes"]), dim=1)
        entry |= {"vocabulary_size": len(codes), "code_width": codes.shape[1]}
        directions = torch.cat((_scaled(up, "directions"), -through(_scaled(down, "directions"))))
        found |= {"tokens.weight": codes, "directions.weight": directions.T}
    tensors = {f"boundaries.{layer}.{name}": one.float().contiguous() for name, one in found.items()}
    return TrainedBoundary(layer=layer, text=text, entry=entry, tensors=tensors)


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
        weights = dict(stage.model.state_dict() if tensors is None else tensors)
        weights |= untied_embedding(stage.model, weights) if stage.is_first else {}
        adapters = stage.adapters
        if adapters is not None:
            adapters.write(weights, new)
            weights = adapters.merged(weights, _scratch(new)) if adapters.spec.merge else {}
        if weights:
            stage.model.save_pretrained(new, state_dict=weights, max_shard_size=max_file_bytes)
        else:
            stage.model.config.save_pretrained(new)
        for half, file in ((stage.up, _UP_FILE), (stage.down, _DOWN_FILE)):
            if half is not None and half.has_begun:
                _write_half(half, new / file)
        about = {
            "layers": [stage.layers.start, stage.layers.stop],
            "num_layers": stage.num_layers,
            "layers_path": stage.family.layers,
            "auto_class": stage.head.auto_class.__name__,
        }
        (new / PART_FILE).write_text(json.dumps(about))


def merge(parts: Sequence[Path], folder: Path, *, companions: Iterable[Path] = ()) -> tuple[str, ...]:
    """Join the parts of all stages, all or nothing; companions, the tokenizer's files say, go along.

    A model with bottlenecks is wrapped, and a note says how it is loaded; see
    `TrainedBoundary`. Where only adapters were trained the folder is one that peft loads; with merged
    weights, they lie in `adapter/`.
    """
    read = sorted((_read_part(part) for part in parts), key=lambda part: part.layers.start)
    _check_whole(read)
    boundaries = _boundaries(read)
    with _all_or_nothing(folder) as new:
        if read[0].files:
            _join_weights(read, boundaries, new)
            for file in (*read[-1].folder.glob("*.json"), *read[-1].folder.glob("*.py")):
                if file.name not in {PART_FILE, INDEX_FILE, ADAPTER_CONFIG_FILE}:
                    shutil.copyfile(file, new / file.name)
        _join_adapters(read, new / _ADAPTER_FOLDER if read[0].files else new)
        for companion in companions:
            shutil.copyfile(companion, new / companion.name)
        if boundaries:
            _write_wrapper(new, boundaries, read[-1])
        # safetensors writes files that only their owner may read.
        mode = next(new.rglob("*.json")).stat().st_mode
        for weights in new.rglob("*.safetensors"):
            weights.chmod(mode)
    return (_note(boundaries),) if boundaries else ()


def _read_part(folder: Path) -> Part:
    try:
        about = json.loads((folder / PART_FILE).read_bytes())
        start, stop = about["layers"]
        files = sorted(folder.glob("model*.safetensors"))
        return Part(
            folder=folder,
            layers=range(int(start), int(stop)),
            num_layers=int(about["num_layers"]),
            layers_path=str(about["layers_path"]),
            auto_class=str(about["auto_class"]),
            config=json.loads((folder / CONFIG_FILE).read_bytes()),
            files={file.name: _tensor_sizes(file) for file in files},
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{folder} is no part of a model: {error}",
            hint="let the cloud that owns it write it again",
        ) from error


def _tensor_sizes(file: Path) -> dict[str, int]:
    """The bytes of each tensor in a file of safetensors, from its header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    offsets = {name: one["data_offsets"] for name, one in header.items() if name != "__metadata__"}
    return {name: stop - start for name, (start, stop) in offsets.items()}


def _check_whole(parts: Sequence[Part]) -> None:
    """The parts must be of one model, and hold each of its layers once."""
    if not parts:
        raise UserError("a model is joined from at least one part", hint="name what the clouds wrote")
    held = [layer for part in parts if part.files or _is_adapted(part) for layer in part.layers]
    if held != [*range(parts[0].num_layers)]:
        raise UserError(
            f"the parts hold the layers {held} of {parts[0].num_layers}",
            hint="name each cloud's part once",
        )
    for part in parts:
        if _essence(part) != _essence(parts[0]):
            raise UserError(f"{part.folder} and {parts[0].folder} are parts of different models")


def _essence(part: Part) -> tuple[int, Mapping[str, Any]]:
    config = {key: value for key, value in part.config.items() if key != "transformers_version"}
    return part.num_layers, config


def _join_weights(parts: Sequence[Part], boundaries: Sequence[TrainedBoundary], folder: Path) -> None:
    """Number the files of all parts in one row, and write the index over them."""
    files = [(part.folder / name, tensors) for part in parts for name, tensors in part.files.items()]
    num_files = len(files) + bool(boundaries)
    prefix = _INNER if boundaries else ""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, (file, tensors) in enumerate(files, start=1):
        name = _weights_name(number, num_files)
        for tensor, num_bytes in tensors.items():
            if f"{prefix}{tensor}" in weight_map:
                raise UserError(f"{tensor} is in more than one part", hint="name each cloud's part once")
            weight_map[f"{prefix}{tensor}"] = name
            total_bytes += num_bytes
        _place(file, folder / name, prefix=prefix)
    if boundaries:
        name = _weights_name(num_files, num_files)
        extra = {key: one for boundary in boundaries for key, one in boundary.tensors.items()}
        save_file(extra, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(extra, name)
        total_bytes += sum(one.nbytes for one in extra.values())
    if num_files > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _weights_name(number: int, num_files: int) -> str:
    return WEIGHTS_FILE if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"


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


def _boundaries(parts: Sequence[Part]) -> list[TrainedBoundary]:
    """The bottlenecks between the parts, in order."""
    found = []
    for before, behind in itertools.pairwise(parts):
        down, up = before.folder / _DOWN_FILE, behind.folder / _UP_FILE
        if not (down.is_file() and up.is_file()):
            continue
        with safe_open(up, framework="pt") as opened:
            text = opened.metadata()["boundary"]
        found.append(_join_halves(behind.layers.start, text, load_file(down), load_file(up)))
    if found and not parts[0].files:
        raise UserError(
            f"adapters alone cannot hold {found[0].text}, which was trained with them",
            hint="set model.lora.merge = true, so that the whole model is exported",
        )
    return found


def _note(boundaries: Sequence[TrainedBoundary]) -> str:
    places = " and ".join(f"{one.text} before layer {one.layer}" for one in boundaries)
    return (
        f"the exported model has {places}: transformers loads it by the code in its folder, with "
        "trust_remote_code=True"
    )


def _place(file: Path, target: Path, *, prefix: str) -> None:
    """Bring a file of weights to its place, under other names if there is a prefix."""
    if prefix:
        tensors = {f"{prefix}{name}": one for name, one in load_file(file).items()}
        save_file(tensors, target, metadata={"format": "pt"})
        return
    try:
        os.link(file, target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(file, target)


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


def _scratch(new: Path) -> Path:
    """A folder that goes when the new one takes its place."""
    scratch = new.with_name("scratch")
    scratch.mkdir()
    return scratch


def _write_wrapper(folder: Path, boundaries: Sequence[TrainedBoundary], last: Part) -> None:
    """Write the configuration and the code of a model with these bottlenecks, but none of its weights."""
    wrapper = BottleneckConfig(
        text_config=last.config,
        auto_class=last.auto_class,
        layers=last.layers_path,
        boundaries=[dict(one.entry) for one in boundaries],
        architectures=[BottleneckModel.__name__],
        auto_map={
            "AutoConfig": f"{_CODE}.{BottleneckConfig.__name__}",
            last.auto_class: f"{_CODE}.{BottleneckModel.__name__}",
        },
        dtype=last.config.get("dtype"),
    )
    wrapper.save_pretrained(folder)
    (folder / f"{_CODE}.py").write_text(inspect.getsource(modeling_bottleneck), encoding="utf-8")


def _scaled(half: Mapping[str, Tensor], name: str) -> Tensor:
    return half["anchors.unit"].double() * half[f"anchors.{name}"].double()


# The model as anybody would load it.


def load_exported(folder: Path, head: Head, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in a folder that `merge` has written, and that brings no code of its own unless trusted."""
    values = json.loads((folder / CONFIG_FILE).read_bytes())
    with quiet_transformers():
        if values.get("model_type") == BottleneckConfig.model_type:
            model: PreTrainedModel = BottleneckModel.from_pretrained(folder)
        else:
            model = head.auto_class.from_pretrained(folder, trust_remote_code=trust_remote_code)
    expect_no_padding(model)
    return model.eval()


def describe_exported(
    folder: Path,
    *,
    head: Head,
    batches: Iterator[Batch],
    device: torch.device,
    autocast: torch.dtype | None,
    trust_remote_code: bool,
    judge: Callable[[PreTrainedModel, Sequence[Batch]], str] = lambda *_: "",
) -> str | None:
    """Says the loss of the model in a folder on held-out data, or why it is not known; None without data.

    `judge` adds what else is known of it.
    """
    held_out = [batch.to(device) for batch in batches]
    if not held_out:
        return None
    if reason := _why_not_loaded(folder, device):
        return f"the exported model was not evaluated: {reason}"
    model = load_exported(folder, head, trust_remote_code=trust_remote_code).to(device)
    loss = loss_of(model, head, held_out, autocast=autocast)
    more = judge(model, held_out)
    return f"the exported model has a validation loss of {loss:.4f}{more and f', {more}'}, without codecs"


def loss_of(
    model: PreTrainedModel, head: Head, batches: Iterable[Batch], *, autocast: torch.dtype | None = None
) -> float:
    """The loss per target of a whole model."""
    loss_sum, num_targets = 0.0, 0
    for batch in batches:
        kind = batch.ids.device.type
        with torch.no_grad(), torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            scores = head.scores(model(**_arguments(model, batch)))
        if batch.labels is not None:
            loss_sum += float(head.loss(scores, batch.labels))
            num_targets += batch.num_targets
    return loss_sum / max(num_targets, 1)


def _arguments(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    inner = model.inner if isinstance(model, BottleneckModel) else model
    if not inner.config.is_encoder_decoder:
        return batch.arguments()
    return batch.arguments() | {"decoder_input_ids": decoder_inputs(inner, batch.labels)}


def _why_not_loaded(folder: Path, device: torch.device) -> str | None:
    if not (folder / CONFIG_FILE).is_file():
        return "it is an adapter, and the model that it belongs to lies elsewhere"
    needed_bytes = _ROOM * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if needed_bytes > _free_bytes(device):
        return "it does not fit into the memory that is free in the first cloud"
    return None


def _free_bytes(device: torch.device) -> int:
    """What is free on the device, and on the host, which the weights pass through."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (host_bytes,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if device.type == "cpu":
        return host_bytes
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    return min(host_bytes, int(free_bytes))
