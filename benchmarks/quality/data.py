"""Prepared ids on the device, and batches of them whose order depends on the seed alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from quality.prepare import MAX_PAIR_TOKENS, PAD

_LENGTH_STEP: Final = 8
"""Lengths are rounded up to this, for few shapes and aligned masks."""
_POOL_BATCHES: Final = 50
"""Batches that are sorted by length together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """A batch of sentence pairs; `rows` are the places of the source's tokens, padding left out."""

    source_BS: Tensor
    target_BT: Tensor
    rows_N: Tensor
    num_targets: int


class Translation:
    """All pairs on the device as padded rows, and their lengths on the host, so that no step waits."""

    def __init__(self, folder: Path, device: torch.device, *, max_pairs: int | None = None) -> None:
        tensors = load_file(folder / "translation.safetensors")
        self._parts = {
            name: (tensors[f"{name}_source"][:max_pairs], tensors[f"{name}_target"][:max_pairs])
            for name in ("train", "test")
        }
        self._lengths = {
            name: tuple((part != PAD).sum(1).numpy() for part in parts) for name, parts in self._parts.items()
        }
        self._parts = {
            name: (parts[0].to(device).long(), parts[1].to(device).long())
            for name, parts in self._parts.items()
        }

    def training(self, *, seed: int, num_steps: int, batch_pairs: int) -> Iterator[Pairs]:
        """Batches of similar length, drawn anew in each epoch."""
        generator = np.random.default_rng(seed)
        num_left = num_steps
        while num_left:
            for indices in self._epoch(generator, batch_pairs)[:num_left]:
                num_left -= 1
                yield self._batch("train", indices)

    def testing(self, batch_pairs: int) -> Iterator[tuple[np.ndarray, Pairs]]:
        """The test pairs from short to long, each batch with the numbers of its pairs."""
        order = np.argsort(self._lengths["test"][0], kind="stable")
        for start in range(0, len(order), batch_pairs):
            indices = order[start : start + batch_pairs]
            yield indices, self._batch("test", indices)

    def _epoch(self, generator: np.random.Generator, batch_pairs: int) -> list[np.ndarray]:
        lengths = self._lengths["train"]
        order = generator.permutation(len(lengths[0]))
        pool = _POOL_BATCHES * batch_pairs
        batches = []
        for start in range(0, len(order), pool):
            some = order[start : start + pool]
            some = some[np.lexsort((lengths[1][some], lengths[0][some]))]
            batches += [some[at : at + batch_pairs] for at in range(0, len(some), batch_pairs)]
        full = [batch for batch in batches if len(batch) == batch_pairs]
        return [full[index] for index in generator.permutation(len(full))]

    def _batch(self, name: str, indices: np.ndarray) -> Pairs:
        source, target = self._parts[name]
        source_lengths, target_lengths = (lengths[indices] for lengths in self._lengths[name])
        index = torch.from_numpy(indices)
        if source.is_cuda:
            index = index.pin_memory().to(source.device, non_blocking=True)
        source_BS = source[index, : _rounded(source_lengths.max())]
        return Pairs(
            source_BS=source_BS,
            target_BT=target[index, : _rounded(target_lengths.max())],
            rows_N=_places(source_BS != PAD, int(source_lengths.sum())),
            num_targets=int(target_lengths.sum()),
        )


class Language:
    """One long row of ids on the device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        path = folder / "language.safetensors"
        tensors = load_file(path)
        self._train, self._valid = (tensors[name].to(device).long() for name in ("train", "valid"))
        with safe_open(path, framework="pt") as file:
            self.valid_bytes = int(file.metadata()["valid_bytes"])
        self.num_valid_tokens = len(self._valid)

    def training(self, *, seed: int, num_steps: int, batch: int, length: int) -> Iterator[Tensor]:
        """Batches of windows at random places."""
        generator = np.random.default_rng(seed)
        starts = generator.integers(0, len(self._train) - length, (num_steps, batch))
        places = torch.from_numpy(starts).to(self._train.device)
        span = torch.arange(length, device=self._train.device)
        for step in range(num_steps):
            yield self._train[places[step][:, None] + span]

    def validation(self, *, batch: int, length: int, max_batches: int | None = None) -> list[Tensor]:
        """The validation part in windows that follow each other."""
        whole = self._valid[: len(self._valid) // length * length].view(-1, length)
        return list(torch.split(whole, batch))[:max_batches]


def read_references(folder: Path) -> list[str]:
    """The English sentences of the test part."""
    references: list[str] = json.loads((folder / "translation-references.json").read_text())
    return references


def _rounded(length: int) -> int:
    return min(-(-int(length) // _LENGTH_STEP) * _LENGTH_STEP, MAX_PAIR_TOKENS)


def _places(mask: Tensor, count: int) -> Tensor:
    """Where a mask is set, in order; `nonzero` would make the host wait to learn how many there are."""
    return mask.flatten().to(torch.int8).argsort(descending=True, stable=True)[:count]
