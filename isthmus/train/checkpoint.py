"""The whole state of one cloud at the start of a step, on disk: written whole or not at all, never pickled.

    checkpoints/step-00000120/<cloud>/weights.safetensors
                                      optimizer.safetensors
                                      codecs.safetensors     what the next message of each cut depends on
                                      state.json             step, layers, codecs, where the data goes on
                                      COMPLETE               written last

Dropout is drawn from seed, step, micro-batch and layer, and the learning rate follows from the step, so
there is no generator and no schedule to save.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.errors import FrameError, UserError
from isthmus.model.stage import Stage
from isthmus.train.cut import CodeState, SavedCuts, read_pair, texts_of
from isthmus.train.optimizer import Optimizer
from isthmus.train.order import Cursor
from isthmus.train.steering import Standing

CHECKPOINTS_FOLDER: Final = "checkpoints"
COMPLETE: Final = "COMPLETE"
_PREFIX: Final = "step-"
_WEIGHTS: Final = "weights.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_CODECS: Final = "codecs.safetensors"
_STATE: Final = "state.json"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is saved beside weights; `step` is the next one, `cursor` is where its data begins.

    `standings` of all cuts are at the first stage, which chooses codecs.
    """

    step: int
    layers: tuple[int, int]
    cursor: Cursor | None = None
    cuts: SavedCuts = field(default_factory=SavedCuts)
    standings: tuple[Standing, ...] = ()


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
            _write(folder, state, stage.tensors_by_name(), optimizer.tensors())
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
            state = _read_state(folder / _STATE, load_file(folder / _CODECS))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, FrameError) as error:
            raise _unusable(folder, str(error)) from error
        if state.layers != (stage.layers.start, stage.layers.stop):
            raise _unusable(folder, f"it holds layers {state.layers}")
        own = stage.tensors_by_name()
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


def _write(folder: Path, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(_contiguous(weights), new / _WEIGHTS)
    save_file(_contiguous(moments), new / _OPTIMIZER)
    save_file(_contiguous(_codec_tensors(state.cuts)), new / _CODECS)
    (new / _STATE).write_text(json.dumps(_state_values(state)))
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


def _state_values(state: State) -> dict[str, object]:
    cuts = {"up": state.cuts.up, "down": state.cuts.down}
    return {
        "version": _VERSION,
        "step": state.step,
        "layers": state.layers,
        "cursor": None if state.cursor is None else asdict(state.cursor),
        "codecs": {name: texts_of(code.pair) for name, code in cuts.items() if code is not None},
        "standings": [{**asdict(standing), "pair": texts_of(standing.pair)} for standing in state.standings],
    }


def _codec_tensors(cuts: SavedCuts) -> dict[str, Tensor]:
    codes = {"up": cuts.up, "down": cuts.down}
    return {
        f"{name}/{key}": tensor
        for name, code in codes.items()
        if code is not None
        for key, tensor in code.tensors.items()
    }


def _read_state(path: Path, codec_tensors: Mapping[str, Tensor]) -> State:
    values = json.loads(path.read_bytes())
    if values.get("version") != _VERSION:
        raise ValueError("another version of Isthmus has written it")
    start, stop = values["layers"]
    cursor = values["cursor"]
    return State(
        step=int(values["step"]),
        layers=(int(start), int(stop)),
        cursor=None if cursor is None else Cursor(**{key: int(value) for key, value in cursor.items()}),
        cuts=SavedCuts(
            **{name: _read_code(name, texts, codec_tensors) for name, texts in values["codecs"].items()}
        ),
        standings=tuple(Standing(**{**one, "pair": read_pair(one["pair"])}) for one in values["standings"]),
    )


def _read_code(name: str, texts: object, tensors: Mapping[str, Tensor]) -> CodeState:
    own = {key.removeprefix(f"{name}/"): one for key, one in tensors.items() if key.startswith(f"{name}/")}
    return CodeState(pair=read_pair(texts), tensors=own)


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
