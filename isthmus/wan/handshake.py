"""What the two ends of a connection say first: the server name of TLS, then a hello of our own.

A hello says who speaks and to whom; if two ends do not belong together, both are told why in one sentence.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from io import BytesIO
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from isthmus.errors import FrameError
from isthmus.events import __version__
from isthmus.job.fields import CLOUD_NAME, Address
from isthmus.job.spec import disagreement
from isthmus.plan.types import Member
from isthmus.wan.packet import PROTOCOL_VERSION

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
_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Text = Annotated[str, Field(max_length=128)]
# Links of protocol 1 did not say their release.
_UNNAMED = "of an early release"
_WRONG_DOOR = "look whether `listen`, and what forwards its port, lead to that cloud and its gateway"
VERSION_KEY = _PREFIX + "version"
MAX_NUM_LANES = 66
GATEWAY_RANK: Final = 10**9
"""Stands for the gateway of a cloud, where a rank is named."""
_SERVER_NAME = re.compile(rf"(?:rank-(0|[1-9][0-9]{{0,8}})|gateway)\.({CLOUD_NAME})\.isthmus", re.ASCII)


def name_of(member: Member) -> str:
    """A member as messages and logs name it."""
    if member.rank == GATEWAY_RANK:
        return f"the gateway of {member.cloud}"
    return f"{member.cloud} rank {member.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What each end says before anything else: who it is, and whom it means to speak to.

    `session` names one life of one end of the link, and `met` the life of the peer that this end has met:
    a connection of lives that have ended is told from one of the present ones.
    """

    version: _Number = PROTOCOL_VERSION
    release: _Text = __version__
    job_digest: _Text = ""
    job: Annotated[str, Field(max_length=4096)] = ""
    """What the clouds must agree on, to tell where jobs differ."""
    cloud: _Text
    rank: _Number = 0
    met: _Text = ""
    peer_cloud: _Text = ""
    peer_rank: _Number = 0
    session: _Text = ""
    lane: _Number = 0
    address: _Text = ""
    """Where a rank listens, if it registers at its gateway."""

    @property
    def sender(self) -> Member:
        return Member(self.cloud, self.rank)

    @property
    def peer(self) -> Member:
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
        return replace(self, peer_cloud=peer.cloud, peer_rank=peer.rank)

    def to_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((_PREFIX + field.name, str(getattr(self, field.name))) for field in fields(self))


_HELLO = TypeAdapter(Hello)


def read_hello(metadata: Iterable[tuple[str, str | bytes]]) -> Hello:
    """The hello in call metadata, every field checked; of another protocol no more than who speaks it."""
    found = {key.removeprefix(_PREFIX): value for key, value in metadata if key.startswith(_PREFIX)}
    # Other protocols may have other fields; these three are in all of them, and the release in most.
    is_ours = found.get("version") == str(PROTOCOL_VERSION)
    needed = {field.name for field in fields(Hello)} if is_ours else {"version", "cloud", "rank"}
    if missing := sorted(needed - found.keys()):
        raise FrameError(f"a handshake without {', '.join(missing)}")
    known = {name: value for name, value in found.items() if name in {*needed, "release"}}
    try:
        return _HELLO.validate_python({"release": _UNNAMED} | known)
    except ValidationError as error:
        raise FrameError(f"a handshake with a broken {error.errors()[0]['loc'][0]}") from error


def mismatch(here: Hello, there: Hello) -> str | None:
    """Why the two must not talk, in one sentence that names both sides; None if they may."""
    if (there.version, there.release) != (here.version, here.release):
        return (
            f"{there.who} runs Isthmus {_release(there)}, {here.who} runs {_release(here)}: "
            "install the same release at both"
        )
    if there.who != here.whom:
        return f"{here.who} has dialled {here.whom}, and {there.who} has answered: {_WRONG_DOOR}"
    if there.whom != here.who:
        return f"{there.who} has dialled {there.whom} and reached {here.who}: {_WRONG_DOOR}"
    if there.job_digest != here.job_digest:
        told = f"{{key}} is {{there}} at {there.cloud} and {{here}} at {here.cloud}"
        return (
            f"{there.who} and {here.who} have different job files: "
            f"{disagreement(there.job, here.job, told) or 'their SHA-256 differs'}: give both the same file"
        )
    if not 0 <= there.lane < MAX_NUM_LANES:
        return f"{there.who} asks for connection number {there.lane}, beyond {MAX_NUM_LANES - 1}"
    return None


def _release(hello: Hello) -> str:
    return f"{hello.release} (link protocol {hello.version})"


def server_name(cloud: str, rank: int) -> str:
    """Return the TLS server name of one rank of a cloud, or of its gateway."""
    return f"{'gateway' if rank == GATEWAY_RANK else f'rank-{rank}'}.{cloud}.isthmus"


def parse_server_name(text: str) -> Member | None:
    """Return the rank or gateway that a server name means, or None for any other name."""
    match = _SERVER_NAME.fullmatch(text)
    return match and Member(match[2], int(match[1] or GATEWAY_RANK))


MAX_HELLO_BYTES: Final = 16_384
_RECORD_HEADER_BYTES: Final = 5
_VERSION_AND_RANDOM_BYTES: Final = 34
_HOST_NAME: Final = re.compile(rb"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")


def parse_client_hello(data: bytes | bytearray) -> str | None:
    """The server name in the TLS hello that begins a connection, in lower case; None if bytes are missing.

    `data` is everything received so far; what follows the hello is not looked at. Whatever is no hello in one
    record with one server name is a FrameError.
    """
    record = _first_record(data)
    if record is None:
        return None
    record.take(1)
    hello = _Reader(record.vector(3))
    hello.take(_VERSION_AND_RANDOM_BYTES)
    for num_length_bytes in (1, 2, 1):  # session, cipher suites, compression
        hello.vector(num_length_bytes)
    extensions = _Reader(hello.vector(2))
    names = []
    while kind := extensions.read(2):
        body = extensions.vector(2)
        names += [body] if kind == b"\0\0" else []
    listed = _Reader(_Reader(b"".join(names)).vector(2))
    kind, name = listed.take(1), listed.vector(2)
    if len(names) != 1 or kind != b"\0" or listed.read() or not _HOST_NAME.fullmatch(name):
        raise FrameError("the TLS hello does not carry one host name")
    return name.decode("ascii").lower()


def _first_record(data: bytes | bytearray) -> "_Reader | None":
    header, record = data[:_RECORD_HEADER_BYTES], data[_RECORD_HEADER_BYTES:]
    if not b"\x16\x03".startswith(header[:2]):
        raise FrameError("the first bytes are not TLS")
    num_bytes = int.from_bytes(header[3:])
    if len(header) == _RECORD_HEADER_BYTES and not 0 < num_bytes <= MAX_HELLO_BYTES:
        raise FrameError(f"a TLS record of {num_bytes} bytes is not allowed")
    if record and record[0] != 1:
        raise FrameError("the first TLS message is not a hello")
    return _Reader(bytes(record[:num_bytes])) if record and len(record) >= num_bytes else None


class _Reader(BytesIO):
    """Takes fields off the front of some bytes; every length is checked against what is there."""

    def take(self, num_bytes: int) -> bytes:
        taken = self.read(num_bytes)
        if len(taken) < num_bytes:
            raise FrameError("the TLS hello ends in the middle of a field")
        return taken

    def vector(self, num_length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(num_length_bytes)))
