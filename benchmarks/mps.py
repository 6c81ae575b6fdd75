"""Lets processes share a GPU at the same time instead of by turns, where NVIDIA's daemon for it is there."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_CONTROL: Final = "nvidia-cuda-mps-control"
_PROBE: Final = "import torch; print(float(torch.ones(4, device='cuda').sum()))"
_PLACES: Final = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def share_among(num_processes: int) -> None:
    """Give each process that is started from now on an equal part of the GPU's multiprocessors.

    So they hardly disturb each other.
    """
    os.environ[_SHARE] = str(100 // num_processes)


@contextmanager
def shared_gpu(*, is_wanted: bool) -> Iterator[bool]:
    """Start the daemon for the processes started inside; gives whether they can use it."""
    if not is_wanted or shutil.which(_CONTROL) is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **dict.fromkeys(_PLACES, folder)}
        subprocess.run([_CONTROL, "-d"], env=environment, check=False, timeout=30)
        try:
            works = _works(environment)
            if works:
                os.environ.update(dict.fromkeys(_PLACES, folder))
            yield works
        finally:
            for name in (*_PLACES, _SHARE):
                os.environ.pop(name, None)
            # It waits for clients that are just ending; it ends with this machine's session in any case.
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([_CONTROL], env=environment, input="quit\n", text=True, check=False, timeout=5)


def _works(environment: dict[str, str]) -> bool:
    if not (Path(environment[_PLACES[0]]) / "control").exists():
        return False
    probe = subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        return "4.0" in probe.communicate(timeout=90)[0]
    except subprocess.TimeoutExpired:
        probe.kill()
        return False
