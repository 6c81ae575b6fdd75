"""Notes which modules and classes of the package run in a rank, from its session to its first backward pass.

`size.py` lets every process of a run import this by a `sitecustomize` of its own. A rank that comes to its
first backward pass, when the loss exists, writes what it has seen to a JSON file and traces no further.
"""

import inspect
import json
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any, Final

PACKAGE: Final = "isthmus"
FOLDER_VARIABLE: Final = "ISTHMUS_CALLS_FOLDER"
SESSION: Final = "isthmus.train.session"
"""The module whose first call begins the session of a rank."""
HAND_OVERS: Final = frozenset({"Traffic.send", "Wire.send"})
"""What hands an activation over to be sent: in the first edition, in the second."""
_TAKEN_OVER: Final = frozenset({("isthmus.wan.link", "Link.send"), ("isthmus.wan.exchange", "Exchange.send")})
_FORWARD: Final = ("isthmus.model.stage", "Stage.forward")
_BACKWARD: Final = ("torch.autograd", "backward")


class Recorder:
    """What `sys.setprofile` calls in every thread of a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = False
        self._modules: dict[str, None] = {}
        self._has_session = False
        self._has_run_forward = False
        self._hand_over: FrameType | None = None
        self._is_handed_over = False
        self._classes: dict[int, dict[str, None]] = defaultdict(dict)
        self._until_link: list[str] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See a function begin or end."""
        if self._is_over:
            return
        if event == "return" and frame is self._hand_over:
            self._hand_over = None
        elif event == "call":
            self._called(frame)

    def _called(self, frame: FrameType) -> None:
        module = frame.f_globals.get("__name__") or ""
        name = frame.f_code.co_qualname
        if (module, name) == _BACKWARD and self._has_session and _is_computing():
            self._write()
        elif module.startswith(f"{PACKAGE}.") and _is_function(frame) and not _is_importing(frame):
            self._note_module(frame, module)
            self._note_class(frame, module, name)

    def _note_module(self, frame: FrameType, module: str) -> None:
        if not _is_computing() or frame.f_code.co_filename.startswith("<"):
            return
        self._has_session = self._has_session or module == SESSION
        if self._has_session:
            self._modules.setdefault(module)

    def _note_class(self, frame: FrameType, module: str, name: str) -> None:
        self._has_run_forward = self._has_run_forward or (module, name) == _FORWARD
        if self._until_link is not None or not self._has_run_forward:
            return
        if name in HAND_OVERS and not self._is_handed_over:
            self._hand_over, self._is_handed_over = frame, True
        if not self._is_handed_over:
            return
        if (module, name) in _TAKEN_OVER:
            self._until_link = self._seen_on_the_way()
        elif (not _is_computing() or self._hand_over is not None) and (owner := _class_of(frame)):
            self._classes[threading.get_ident()].setdefault(owner)

    def _seen_on_the_way(self) -> list[str]:
        computing, sending = threading.main_thread().ident, threading.get_ident()
        return list(self._classes[computing or 0] | self._classes[sending])

    def _write(self) -> None:
        self._is_over = True
        found = {"modules": list(self._modules), "classes": self._until_link}
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(found))
        sys.setprofile(None)


def install() -> None:
    """Trace this process from now on, if it is asked for."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        recorder = Recorder(Path(folder))
        threading.setprofile(recorder)
        sys.setprofile(recorder)


def _is_computing() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_function(frame: FrameType) -> bool:
    """Whether it is no body of a module or of a class."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _is_importing(frame: FrameType) -> bool:
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            return True
        outer = outer.f_back
    return False


def _class_of(frame: FrameType) -> str | None:
    """The class of the package whose method this is."""
    names = frame.f_code.co_varnames
    if not frame.f_code.co_argcount or names[0] not in ("self", "cls"):
        return None
    first: Any = frame.f_locals.get(names[0])
    owner = first if isinstance(first, type) else type(first)
    if not owner.__module__.startswith(f"{PACKAGE}."):
        return None
    return f"{owner.__module__}.{owner.__qualname__}"
