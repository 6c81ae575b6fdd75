"""The stages' weights on their way to the first cloud, which joins them into one model."""

import re
import shutil
from pathlib import Path
from typing import Final

from isthmus.errors import FrameError
from isthmus.plan.types import Priority
from isthmus.wan.frames import Packet
from isthmus.wan.link import Link

_PART: Final = "part"
_PIECE_BYTES: Final = 8 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def fresh_folder(folder: Path) -> Path:
    """An empty folder to gather parts in, whatever an export that was stopped has left there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def gather_parts(folder: Path, *, up: Link | None, down: Link | None) -> tuple[Path, ...]:
    """Take in the parts of the stages behind, and pass them and those in the folder on; gives all of them."""
    if down is not None:
        _receive(folder, down)
    parts = tuple(sorted(part for part in folder.iterdir() if part.is_dir()))
    if up is not None:
        for part in parts:
            _send(part, up)
        up.send(_PART, Packet({"last": True}), priority=Priority.BACKGROUND)
    return parts


def _send(part: Path, link: Link) -> None:
    for file in sorted(part.iterdir()):
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                header = {"last": False, "part": part.name, "file": file.name}
                link.send(_PART, Packet(header, (piece,)), priority=Priority.BACKGROUND)


def _receive(folder: Path, link: Link) -> None:
    written: set[Path] = set()
    while not (packet := link.receive(_PART)).header.get("last"):
        path = folder / _name(packet, "part") / _name(packet, "file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if path in written else "wb") as file:
            for buffer in packet.buffers:
                file.write(buffer)
        written.add(path)


def _name(packet: Packet, key: str) -> str:
    name = packet.header.get(key)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FrameError(f"a piece of a part whose {key} is no plain name")
    return name
