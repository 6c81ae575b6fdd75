"""Metrics for trackers that users have already: TensorBoard, Weights & Biases, MLflow, trackio."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from isthmus.errors import UserError


class Tracker(Protocol):
    """Takes numbers by name, step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def close(self) -> None:
        """Write out what is left."""


def open_trackers(run: Path, *, names: Sequence[str], project: str) -> list[Tracker]:
    """Open the trackers of these names, for one run."""
    check_trackers(names)
    return [_TRACKERS[name](run, project) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse, before anything is started, what could not be opened."""
    for name in names:
        if name not in _TRACKERS:
            raise UserError(f"there is no tracker {name!r}", hint=f"choose one of {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed", hint=f"pip install {name}")


class _TensorBoard:
    def __init__(self, run: Path, _: str) -> None:
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(run / "tensorboard")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Run:
    """Weights & Biases, and trackio, which has the same interface."""

    def __init__(self, package: str, run: Path, project: str) -> None:
        module = importlib.import_module(package)
        self._run = module.init(project=project, name=run.name)
        self._finish = module.finish if package == "trackio" else self._run.finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._finish()


class _MLflow:
    def __init__(self, run: Path, project: str) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_TRACKERS: Final[Mapping[str, Callable[[Path, str], Tracker]]] = MappingProxyType(
    {
        "tensorboard": _TensorBoard,
        "wandb": lambda run, project: _Run("wandb", run, project),
        "mlflow": _MLflow,
        "trackio": lambda run, project: _Run("trackio", run, project),
    }
)
