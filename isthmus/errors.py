"""Every exception that Isthmus raises on purpose.

IsthmusError
├── UserError            the input is wrong; the command exits with 2
│   └── JobError         a job file, with all its problems at once
├── LinkError            a link between clouds cannot go on
│   ├── FrameError       bytes that are no valid frame
│   ├── Refused          the peer, or we, turned the handshake down
│   │   └── NotReady     for now, since the peer is still linked to an earlier life of ours
│   ├── PeerLost         a cloud has been silent for longer than the heartbeat time-out
│   │   └── BadUpdate    a cloud has sent what cannot be used
│   ├── Aborted          some cloud ended the run for all
│   └── LinkClosed       the link was used after its end
├── RankLost             a rank of this cloud is lost, so its world has ended
├── Terminated           SIGTERM has come: a launcher ends this process
└── CloudFailed          the process of one cloud on this machine has failed

FieldError is a ValueError, which pydantic gathers into a JobError.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class IsthmusError(Exception):
    """An error that a user can act on: one sentence, and the cure where there is one."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(IsthmusError):
    """The user's input is wrong; the command exits with 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in a job file: where, what, and the cure."""

    key: str
    what: str
    cure: str | None = None


class JobError(UserError):
    """A job file that cannot be used, with all its problems at once."""

    def __init__(self, file: Path, problems: tuple[Problem, ...]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{file} has {count}")
        self.file = file
        self.problems = problems


class FieldError(ValueError):
    """A value that cannot be used: what is wrong with it, and the cure."""

    def __init__(self, what: str, *, cure: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.cure = cure


class LinkError(IsthmusError):
    """A link between clouds cannot go on."""


class FrameError(LinkError):
    """Bytes that are no valid frame."""


class Refused(LinkError):
    """The handshake was turned down, by the peer or by us."""


class NotReady(Refused):
    """The peer is still linked to an earlier life of ours; another try may succeed."""


class PeerLost(LinkError):
    """A cloud has been silent for longer than the heartbeat time-out."""

    def __init__(self, cloud: str, reason: str) -> None:
        super().__init__(f"cloud {cloud!r} is lost: {reason}")
        self.cloud = cloud


class BadUpdate(PeerLost):
    """A cloud has sent what cannot be used, and would again."""


class Aborted(LinkError):
    """Some cloud ended the run for all."""

    def __init__(self, cloud: str, reason: str) -> None:
        super().__init__(f"cloud {cloud!r} aborted the run: {reason}")
        self.cloud = cloud
        self.reason = reason


class LinkClosed(LinkError):
    """The link was used after its end."""


class RankLost(IsthmusError):
    """A rank of this cloud is lost, so its world has ended."""


class Terminated(IsthmusError):
    """SIGTERM has come: a launcher ends this process."""

    def __init__(self) -> None:
        super().__init__("its launcher has ended its ranks")


class CloudFailed(IsthmusError):
    """The process of one cloud on this machine has failed; a crash is worth another start."""

    def __init__(
        self,
        cloud: str,
        message: str,
        *,
        hint: str | None = None,
        rank: int | None = None,
        is_crash: bool = False,
    ) -> None:
        who = f"cloud {cloud!r}" if rank is None else f"rank {rank} of cloud {cloud!r}"
        super().__init__(f"{who} failed: {message}", hint=hint)
        self.cloud = cloud
        self.is_crash = is_crash


def import_extra(module: str, *, extra: str, what: str, otherwise: str = "") -> Any:
    """Import a module of an optional package, or say what needs it and how it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {module.partition('.')[0]!r}, which is not installed here",
            hint=f"in the clone of isthmus: pip install '.[{extra}]'{otherwise}",
        ) from error
