"""The whole state of one cloud at the start of a step, on disk: written whole or not at all, never pickled.

    checkpoints/step-00000120/<cloud>/weights.safetensors
                                      optimizer.safetensors
                                      codecs.safetensors     codecs, and what their next message depends on
                                      codecs-1.safetensors   the same of rank 1, and so on
                                      state.json             step, layers, where the data goes on
                                      COMPLETE               written last

Rank 0 of a cloud writes and reads for all its ranks, so only its disk counts. What ranks hold shares of is
written whole.

Dropout is drawn from seed, step, micro-batch and layer, and the learning rate follows from the step, so
there is no generator and no schedule to save.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.errors import FrameError, UserError
from isthmus.job.write import sync
from isthmus.model.stage import Stage
from isthmus.train.crossing.cut import SavedCuts, read_pair, texts_of
from isthmus.train.crossing.steering import Standing
from isthmus.train.data.order import Cursor
from isthmus.train.optimize.optimizer import Optimizer

CHECKPOINTS_FOLDER: Final = "checkpoints"
COMPLETE: Final = "COMPLETE"
_PREFIX: Final = "step-"
_WEIGHTS: Final = "weights.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_STATE: Final = "state.json"
_VERSION: Final = 4


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
    other_cuts: tuple[SavedCuts, ...] = ()
    """Of the ranks behind rank 0, in order."""


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
        """Write a checkpoint of a whole stage, then delete those that are not to be kept."""
        return self.write(state, weights=stage.tensors_by_name(), moments=optimizer.tensors())

    def write(self, state: State, *, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint, then delete those that are not to be kept."""
        folder = self._place(state.step)
        try:
            _write(folder, state, weights, moments)
        except OSError as error:
            raise UserError(
                f"the checkpoint {folder} cannot be written: {error.strerror or error}",
                hint="make room on the disk and start again: the run goes on from the one before",
            ) from error
        self._prune(newest=state.step)
        return folder

    def load(self, step: int, *, stage: Stage, optimizer: Optimizer) -> State:
        """Bring stage and optimizer back to where they were."""
        state, weights, moments = self.read(step, stage=stage)
        for name, tensor in stage.tensors_by_name().items():
            tensor.copy_(weights[name])
        optimizer.load_tensors(moments)
        return state

    def read(self, step: int, *, stage: Stage) -> tuple[State, dict[str, Tensor], dict[str, Tensor]]:
        """A checkpoint of this stage: its state, weights, and the optimizer's moments, on the host."""
        folder = self._place(step)
        try:
            weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER)
            state = _read_state(folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, FrameError) as error:
            raise _unusable(folder, str(error)) from error
        if state.layers != (stage.layers.start, stage.layers.stop):
            raise _unusable(folder, f"it holds layers {state.layers}")
        if weights.keys() != stage.tensors_by_name().keys():
            raise _unusable(folder, "it is of another model")
        return state, weights, moments

    def _prune(self, *, newest: int) -> None:
        """Delete what is too old, and what was lost when the run went on from an older step."""
        kept = [step for step in self.steps() if step <= newest][-self._keep :]
        for step in set(self.steps()).difference(kept):
            self._delete(step)

    def _place(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step:08d}" / self._cloud

    def _delete(self, step: int) -> None:
        folder = self._place(step)
        _remove(folder)
        # The last cloud to delete its own takes the folder of the step along.
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _write(folder: Path, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(_contiguous(weights), new / _WEIGHTS)
    save_file(_contiguous(moments), new / _OPTIMIZER)
    for rank, cuts in enumerate((state.cuts, *state.other_cuts)):
        save_file(_contiguous(cuts.tensors()), new / _codecs_file(rank))
    (new / _STATE).write_text(json.dumps(_state_values(state)))
    for path in new.iterdir():
        sync(path)
    (new / COMPLETE).touch()
    sync(new)
    if folder.exists():
        _remove(folder)
    new.rename(folder)
    sync(folder.parent)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; where that is cut short, what is left does not pass for a whole one."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _codecs_file(rank: int) -> str:
    return f"codecs-{rank}.safetensors" if rank else "codecs.safetensors"


def _state_values(state: State) -> dict[str, object]:
    return {
        "version": _VERSION,
        "step": state.step,
        "layers": state.layers,
        "cursor": None if state.cursor is None else asdict(state.cursor),
        "num_ranks": 1 + len(state.other_cuts),
        "standings": [{**asdict(standing), "pair": texts_of(standing.pair)} for standing in state.standings],
    }


def _read_state(folder: Path) -> State:
    values = json.loads((folder / _STATE).read_bytes())
    if values.get("version") != _VERSION:
        raise ValueError("another version of Isthmus has written it")
    start, stop = values["layers"]
    cursor = values["cursor"]
    cuts, *others = (
        SavedCuts.from_tensors(load_file(folder / _codecs_file(rank))) for rank in range(values["num_ranks"])
    )
    return State(
        step=int(values["step"]),
        layers=(int(start), int(stop)),
        cursor=None if cursor is None else Cursor(**{key: int(value) for key, value in cursor.items()}),
        cuts=cuts,
        standings=tuple(Standing(**{**one, "pair": read_pair(one["pair"])}) for one in values["standings"]),
        other_cuts=tuple(others),
    )


def _unusable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"the checkpoint {folder} cannot be used: {reason}",
        hint="delete it, or start anew with --resume never",
    )
