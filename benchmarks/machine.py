"""Where a benchmark runs, and with what: the part that all JSON lines have in common."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """The machine, and the versions of Python and of packages; None for one that is not installed."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
