"""Who is at the other end, and whether the two belong together; a mismatch is one sentence for both."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from isthmus.errors import FrameError
from isthmus.events import __version__
from isthmus.job.fields import Address
from isthmus.job.spec import disagreement
from isthmus.plan.types import Member
from isthmus.wan.frames import PROTOCOL_VERSION

EXIT_LOST: Final = 75
"""The exit code of a process that could not end by itself after a sibling was lost: worth another try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank of a cloud; `master` is where the ranks of the cloud find each other.

    Where `is_served`, the launcher has something listening at the master's address already; else rank 0 does.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    master: Address | None = None
    is_served: bool = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its cloud."""
        return self.rank == 0


_PREFIX = "isthmus-"
_MAX_TEXT = 128
_MAX_JOB = 4096
# Links of protocol 1 did not say their release.
_UNNAMED = "of an early release"
_WRONG_DOOR = "look whether `listen`, and what forwards its port, lead to that cloud and its gateway"
VERSION_KEY = _PREFIX + "version"
MAX_NUM_LANES = 66
_NUMBERS = {"version", "rank", "epoch", "peer_rank", "lane"}


def name_of(member: Member) -> str:
    """A member as messages and logs name it."""
    return f"{member.cloud} rank {member.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What each end says before anything else: who it is, and whom it means to speak to.

    `session` names one life of one end of the link.
    """

    version: int = PROTOCOL_VERSION
    release: str = __version__
    job_digest: str = ""
    job: str = ""
    """What the clouds must agree on, to tell where jobs differ."""
    cloud: str
    rank: int = 0
    epoch: int = 0
    peer_cloud: str = ""
    peer_rank: int = 0
    session: str = ""
    lane: int = 0

    @property
    def sender(self) -> Member:
        """Who speaks."""
        return Member(self.cloud, self.rank)

    @property
    def peer(self) -> Member:
        """Whom the speaker means."""
        return Member(self.peer_cloud, self.peer_rank)

    @property
    def who(self) -> str:
        """The speaker as a log names it."""
        return name_of(self.sender)

    @property
    def whom(self) -> str:
        """The member that the speaker means, as a log names it."""
        return name_of(self.peer)

    def to(self, peer: Member) -> "Hello":
        """The same hello to another peer."""
        return replace(self, peer_cloud=peer.cloud, peer_rank=peer.rank)

    def on_lane(self, lane: int) -> "Hello":
        """The same hello for another connection of the link."""
        return replace(self, lane=lane)

    def to_metadata(self) -> tuple[tuple[str, str], ...]:
        """As call metadata."""
        return tuple((_PREFIX + field.name, str(getattr(self, field.name))) for field in fields(self))


def read_hello(metadata: Iterable[tuple[str, str | bytes]]) -> Hello:
    """The hello in call metadata, every field checked; of another protocol no more than who speaks it."""
    found = {key.removeprefix(_PREFIX): value for key, value in metadata if key.startswith(_PREFIX)}
    # Other protocols may have other fields; these three are in all of them, and the release in most.
    needed = ["version", "cloud", "rank"]
    _require(found, needed)
    if _number(found, "version") == PROTOCOL_VERSION:
        needed = [field.name for field in fields(Hello)]
        _require(found, needed)
    release = _text(found, "release") if "release" in found else _UNNAMED
    values: dict[str, Any] = {
        name: _number(found, name) if name in _NUMBERS else _text(found, name) for name in needed
    }
    return Hello(**(values | {"release": release}))


def mismatch(here: Hello, there: Hello) -> str | None:
    """Why the two must not talk, in one sentence that names both sides; None if they may."""
    if (there.version, there.release) != (here.version, here.release):
        return (
            f"{there.who} runs Isthmus {_release(there)}, {here.who} runs {_release(here)}: "
            "install the same release at both"
        )
    if there.job_digest != here.job_digest:
        told = f"{{key}} is {{there}} at {there.cloud} and {{here}} at {here.cloud}"
        return (
            f"{there.who} and {here.who} have different job files: "
            f"{disagreement(there.job, here.job, told) or 'their SHA-256 differs'}: give both the same file"
        )
    if there.epoch != here.epoch:
        return (
            f"{there.who} is in epoch {there.epoch}, {here.who} in epoch {here.epoch}: restart the older one"
        )
    if there.who != here.whom:
        return f"{here.who} has dialled {here.whom}, and {there.who} has answered: {_WRONG_DOOR}"
    if there.whom != here.who:
        return f"{there.who} has dialled {there.whom} and reached {here.who}: {_WRONG_DOOR}"
    if not 0 <= there.lane < MAX_NUM_LANES:
        return f"{there.who} asks for connection number {there.lane}, beyond {MAX_NUM_LANES - 1}"
    return None


def _release(hello: Hello) -> str:
    return f"{hello.release} (link protocol {hello.version})"


def _require(found: Mapping[str, str | bytes], names: Iterable[str]) -> None:
    if missing := sorted(set(names) - found.keys()):
        raise FrameError(f"a handshake without {', '.join(missing)}")


def _text(found: Mapping[str, str | bytes], name: str) -> str:
    value = found[name]
    if not isinstance(value, str) or len(value) > (_MAX_JOB if name == "job" else _MAX_TEXT):
        raise FrameError(f"a handshake with a broken {name}")
    return value


def _number(found: Mapping[str, str | bytes], name: str) -> int:
    value = _text(found, name)
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise FrameError(f"a handshake whose {name} is no number")
    return int(value)


def server_name(cloud: str, rank: int) -> str:
    """Return the TLS server name of one rank of a cloud."""
    return f"rank-{rank}.{cloud}.isthmus"
