"""The whole state of one cloud at the start of a step, on disk: written whole or not at all, never pickled.

    checkpoints/step-00000120/<cloud>/weights.safetensors
                                      optimizer.safetensors
                                      state.json             step, layers, where the data goes on
                                      COMPLETE               written last

Dropout is drawn from seed, step, micro-batch and layer, and the learning rate follows from the step, so
there is no generator and no schedule to save.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.errors import UserError
from isthmus.model.stage import Stage
from isthmus.train.optimizer import Optimizer
from isthmus.train.order import Cursor

CHECKPOINTS_FOLDER: Final = "checkpoints"
COMPLETE: Final = "COMPLETE"
_PREFIX: Final = "step-"
_WEIGHTS: Final = "weights.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_STATE: Final = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is saved beside tensors; `step` is the next one, `cursor` is where its data begins."""

    step: int
    layers: tuple[int, int]
    cursor: Cursor | None = None


class Checkpoints:
    """The checkpoints of one cloud in a run."""

    def __init__(self, run: Path, *, cloud: str, keep: int = 2) -> None:
        self._folder = run / CHECKPOINTS_FOLDER
        self._cloud = cloud
        self._keep = keep

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoint is complete here, in order."""
        found = (
            path.parent.parent.name for path in self._folder.glob(f"{_PREFIX}*/{self._cloud}/{COMPLETE}")
        )
        return tuple(sorted(int(name.removeprefix(_PREFIX)) for name in found))

    def save(self, state: State, *, stage: Stage, optimizer: Optimizer) -> Path:
        """Write a checkpoint, then delete those that are older than the ones to keep."""
        folder = self._place(state.step)
        try:
            _write(folder, state, tensors_of(stage), optimizer.tensors())
        except OSError as error:
            raise UserError(
                f"the checkpoint {folder} cannot be written: {error.strerror or error}",
                hint="make room on the disk and start again: the run goes on from the one before",
            ) from error
        for step in self.steps()[: -self._keep]:
            self._delete(step)
        return folder

    def load(self, step: int, *, stage: Stage, optimizer: Optimizer) -> State:
        """Bring stage and optimizer back to where they were."""
        folder = self._place(step)
        try:
            weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER)
            state = _read_state(folder / _STATE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _unusable(folder, str(error)) from error
        if state.layers != (stage.layers.start, stage.layers.stop):
            raise _unusable(folder, f"it holds layers {state.layers}")
        own = tensors_of(stage)
        if weights.keys() != own.keys():
            raise _unusable(folder, "it is of another model")
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        optimizer.load_tensors(moments)
        return state

    def _place(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step:08d}" / self._cloud

    def _delete(self, step: int) -> None:
        folder = self._place(step)
        (folder / COMPLETE).unlink()
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def tensors_of(stage: Stage) -> dict[str, Tensor]:
    """All that a stage holds, by name; what is shared, once."""
    model = stage.model
    own = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in own}


def _write(folder: Path, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(_contiguous(weights), new / _WEIGHTS)
    save_file(_contiguous(moments), new / _OPTIMIZER)
    (new / _STATE).write_text(json.dumps(asdict(state)))
    for path in new.iterdir():
        _sync(path)
    (new / COMPLETE).touch()
    _sync(new)
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)
    _sync(folder.parent)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read_state(path: Path) -> State:
    values = json.loads(path.read_bytes())
    start, stop = values["layers"]
    cursor = values["cursor"]
    return State(
        step=int(values["step"]),
        layers=(int(start), int(stop)),
        cursor=None if cursor is None else Cursor(**{key: int(value) for key, value in cursor.items()}),
    )


def _unusable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"the checkpoint {folder} cannot be used: {reason}",
        hint="delete it, or start anew with --resume never",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
