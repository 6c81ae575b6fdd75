"""Makes of a model with bottlenecks a folder that transformers loads with all of it.

The folder holds the code of `modeling_bottleneck`, a configuration that names it, and weights that are the
model's own under `inner.` and those of each bottleneck under `boundaries.`. Its type is one that transformers
does not know, so nobody loads the model without its bottlenecks unawares.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from isthmus.model import modeling_bottleneck
from isthmus.model.modeling_bottleneck import BottleneckConfig, BottleneckModel
from isthmus.model.source import CONFIG_FILE

INNER: Final = "inner."
_CODE: Final = "modeling_bottleneck"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBoundary:
    """Both halves of a bottleneck by the names of their tensors, and the layer before which it lies."""

    layer: int
    text: str
    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]

    @property
    def entry(self) -> dict[str, Any]:
        """What the configuration says of it."""
        rank, width = self.down["weight"].shape
        entry: dict[str, Any] = {"layer": self.layer, "trained_as": self.text, "width": width, "rank": rank}
        if "anchors.table" in self.up:
            entry["vocabulary_size"] = len(self.up["anchors.table"])
        elif "anchors.codes" in self.up:
            codes = self.up["anchors.codes"]
            entry |= {"vocabulary_size": len(codes), "code_width": 2 * codes.shape[1]}
        return entry

    def tensors(self) -> dict[str, Tensor]:
        """Its weights by their names in the folder."""
        return {f"boundaries.{self.layer}.{name}": one for name, one in self._folded().items()}

    def _folded(self) -> dict[str, Tensor]:
        """Both ends' anchors as one: what the sender takes off, the receiver need not put back."""
        found = {"down.weight": self.down["weight"], "up.weight": self.up["weight"]}
        found["up.bias"] = self.up["anchors.mean"].double() - self._through(self.down["anchors.mean"])
        if "anchors.table" in self.up:
            found["tokens.weight"] = _scaled(self.up, "table") - self._through(_scaled(self.down, "table"))
        elif "anchors.codes" in self.up:
            found["tokens.weight"] = torch.cat((self.up["anchors.codes"], self.down["anchors.codes"]), dim=1)
            taken_off = self._through(_scaled(self.down, "directions"))
            found["directions.weight"] = torch.cat((_scaled(self.up, "directions"), -taken_off)).T
        return {name: one.float().contiguous() for name, one in found.items()}

    def _through(self, rows_ND: Tensor) -> Tensor:
        """What the receiver would get of these rows."""
        narrow_NR = rows_ND.double() @ self.down["weight"].double().T
        return narrow_NR @ self.up["weight"].double().T


def write_wrapper(
    folder: Path,
    boundaries: list[TrainedBoundary],
    *,
    config: Mapping[str, Any],
    auto_class: str,
    layers_path: str,
) -> None:
    """Write the configuration and the code of a model with these bottlenecks, but none of its weights."""
    wrapper = BottleneckConfig(
        text_config=config,
        auto_class=auto_class,
        layers=layers_path,
        boundaries=[one.entry for one in boundaries],
        architectures=[BottleneckModel.__name__],
        auto_map={
            "AutoConfig": f"{_CODE}.{BottleneckConfig.__name__}",
            auto_class: f"{_CODE}.{BottleneckModel.__name__}",
        },
        dtype=config.get("dtype"),
    )
    wrapper.save_pretrained(folder)
    (folder / f"{_CODE}.py").write_text(inspect.getsource(modeling_bottleneck), encoding="utf-8")


def is_wrapped(folder: Path) -> bool:
    """Whether a folder holds a model with bottlenecks."""
    values = json.loads((folder / CONFIG_FILE).read_bytes())
    return bool(values.get("model_type") == BottleneckConfig.model_type)


def _scaled(half: Mapping[str, Tensor], name: str) -> Tensor:
    return half["anchors.unit"].double() * half[f"anchors.{name}"].double()
