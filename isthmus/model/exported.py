"""The loss of a model as it was exported: loaded from its folder as anybody would load it, and run whole."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from isthmus.job.hub import CONFIG_FILE
from isthmus.model.export import is_wrapped
from isthmus.model.heads import Head
from isthmus.model.modeling_bottleneck import BottleneckModel
from isthmus.model.stage import Batch
from isthmus.model.transformers_calls import expect_no_padding, quiet_transformers

_ROOM: Final = 1.25
"""Memory for a model that runs without gradients, by that of its weights."""


def load_exported(folder: Path, head: Head, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in a folder that `merge` has written, and that brings no code of its own unless trusted."""
    with quiet_transformers():
        if is_wrapped(folder):
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
) -> str | None:
    """Says what the model in a folder gives for held-out data, or why nobody knows; None without data."""
    first = next(batches, None)
    if first is None:
        return None
    if reason := _why_not_loaded(folder, device):
        return f"the exported model was not evaluated: {reason}"
    held_out = itertools.chain((first,), batches)
    loss = exported_loss(
        folder,
        head=head,
        batches=held_out,
        device=device,
        autocast=autocast,
        trust_remote_code=trust_remote_code,
    )
    return f"the exported model has a validation loss of {loss:.4f}, without codecs"


def exported_loss(
    folder: Path,
    *,
    head: Head,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> float:
    """The loss per target over these micro-batches of the model in a folder, run whole on one device."""
    model = load_exported(folder, head, trust_remote_code=trust_remote_code).to(device)
    loss_sum, num_targets = 0.0, 0
    for batch in (one.to(device) for one in batches):
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            scores = head.scores(model(**batch.arguments()))
        if batch.labels is not None:
            loss_sum += float(head.loss(scores, batch.labels))
            num_targets += batch.num_targets
    return loss_sum / max(num_targets, 1)


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
