"""How clouds meet and agree on a run: its run config, the step that it starts from, and its end.

Clouds agree along a tree of links from the first cloud, which sends the run config to all others. The steps
that each cloud has saved travel up by the cloud's name, and the decision travels down: the newest step that
all have saved, or a refusal that names the cloud that lacks it. The end is agreed on in the same way.
"""

import functools
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Protocol

from pydantic import Field

from isthmus.errors import FrameError, PeerLost, UserError
from isthmus.job import Job
from isthmus.plan.types import Count, Facts, Member, Priority, pack_facts, unpack_facts
from isthmus.train.build import RunConfig
from isthmus.train.in_cloud import World
from isthmus.train.rejoin import Joining, hail_all, new_life
from isthmus.train.role import MAX_CONFIG_BYTES, pack_config, unpack_config
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

_PROFILE: Final = "start/profile"
_PROFILES: Final = "start/profiles"
_CONFIG: Final = "start/config"
_SAVED: Final = "start/saved"
_START: Final = "start/step"
_ENDED: Final = "end/here"
_ALL_ENDED: Final = "end/all"
_PART: Final = "part"
_PIECE_BYTES: Final = 8 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_CLOUDS: Final = 64
_MAX_TOLD: Final = 5
_FACTS: Final = "facts"
# A neighbour that has not come by then is named.
_PATIENCE_S: Final = 5.0

_Steps = tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSteps(Facts):
    """The steps whose checkpoints one cloud has: those that are whole, and those that are damaged."""

    whole: _Steps = ()
    damaged: _Steps = ()
    epoch: Count = 0
    """The newest epoch that the cloud has been in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllSaved(Facts):
    clouds: Annotated[dict[str, SavedSteps], Field(max_length=_MAX_CLOUDS)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Facts):
    """Where the run starts; `clock_offset_s` added to the clock here gives the first cloud's."""

    step: Count
    epoch: Count = 0
    clock_offset_s: float = 0.0
    life: Count = 0
    """Not 0 where the state of this cloud may not be that of the others, which one of them gives it then."""
    is_common: bool = True
    """Whether all start from this step; else each from the newest that it has."""
    note: str | None = None
    """What the first cloud reports about the step; only it knows."""


Connect = Callable[[str, int], Link]
"""Gives the link to a rank of another cloud, which may not be connected yet."""


class Neighbours:
    """The clouds beside this one in the tree along which clouds agree, whose root is the first cloud.

    Leaders exchange messages and broadcast them to their ranks.
    """

    def __init__(
        self,
        connect: Connect,
        world: World,
        *,
        clouds: Sequence[str],
        cloud: str,
        links: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        self.index = clouds.index(cloud)
        """The number of this cloud."""
        self._connect = connect
        self._world = world
        self._cloud = cloud
        self._links = list(pairwise(clouds)) if links is None else links
        self._join(clouds)

    def _join(self, clouds: Sequence[str]) -> None:
        self._clouds = clouds
        up, downs = tree(clouds, self._links)[self._cloud]
        is_leader = self._world.is_leader
        self.up = self._connect(up, 0) if is_leader and up is not None else None
        """The leaders' link towards the first cloud; None there, and at other ranks."""
        self.downs = tuple(self._connect(down, 0) for down in downs) if is_leader else ()
        """The leaders' links away from the first cloud."""

    @property
    def is_first(self) -> bool:
        """Whether this is the leader of the first cloud of those that are there."""
        return self.is_of_first and self._world.is_leader

    @property
    def is_of_first(self) -> bool:
        """Whether this is a rank of the first cloud of those that are there."""
        return self._clouds[0] == self._cloud

    def hail(self, job: Job, *, note: Callable[[str], None], until_s: float = math.inf) -> Joining | None:
        """Meet all clouds that a link joins to this one, or as many as there are once one of them trains.

        Gives what that one says.
        """
        joining = None
        if self._world.is_leader:
            linked = {one for pair in self._links if self._cloud in pair for one in pair} - {self._cloud}
            others = {one: self._connect(one, 0) for one in self._clouds if one in linked}
            joining = hail_all(
                others, on_waiting=lambda link: _note_waiting(job, link, note), until_s=until_s
            )
        max_bytes = 4 * MAX_CONFIG_BYTES
        text = self._world.broadcast(None if joining is None else pack_facts(joining, max_bytes=max_bytes))
        return None if text is None else unpack_facts(text, Joining, max_bytes=max_bytes)

    def meet(self, job: Job, *, note: Callable[[str], None], until_s: float = math.inf) -> None:
        """Wait for the neighbours; report whom this cloud waits for, once it has waited a little."""
        for link in filter(None, (self.up, *self.downs)):
            try:
                link.wait_ready(timeout_s=_PATIENCE_S)
            except TimeoutError:
                _note_waiting(job, link, note)
                self._wait(link, until_s)

    def _wait(self, link: Link, until_s: float) -> None:
        left_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
        try:
            link.wait_ready(timeout_s=left_s)
        except TimeoutError as error:
            raise PeerLost(link.peer.cloud, "it has not come back within checkpoint.patience") from error

    def gather_profiles(self, own: Callable[[], str | None], *, is_wanted: bool) -> dict[str, str]:
        """The profiles that clouds measure, by name, at the leader of the first if it asks; else nothing.

        The question travels down, so that all measure at the same time; `own` gives None for a cloud that
        has nothing to send.
        """
        if not self._world.is_leader:
            return {}
        if self.up is not None:
            is_wanted = self.up.receive(_PROFILE).header.get("is_wanted") is True
        self._send_down(_PROFILE, Packet({"is_wanted": is_wanted}))
        if not is_wanted:
            return {}
        text = own()
        found = {} if text is None else {self._cloud: text}
        for down in self.downs:
            found |= _read_profiles(down.receive(_PROFILES))
        if self.up is not None:
            texts = tuple(one.encode() for one in found.values())
            self.up.send(_PROFILES, Packet({"clouds": list(found)}, texts))
        return found

    def agree_on_config(self, own: RunConfig | None, joining: Joining | None = None) -> RunConfig:
        """The run config of the first cloud, whose leader alone has made one, or of a run under way."""
        text = None if own is None else pack_config(own)
        if joining is not None:
            text = joining.hail.config
        elif self.up is not None:
            text = "".join(_read_texts(self.up.receive(_CONFIG)))
        text = str(self._world.broadcast(text))
        config = unpack_config(text)
        member = Member(self._cloud, self._world.rank)
        if member not in config.members:
            raise FrameError(f"a run config without {member}")
        if joining is None:
            self._send_down(_CONFIG, Packet({}, (text.encode(),)))
        return config

    def agree_on_start(
        self,
        saved: SavedSteps,
        *,
        num_steps: int,
        choose: "Choose | None" = None,
        joining: Joining | None = None,
    ) -> Start:
        """Where all clouds can start, which `choose` decides at the first cloud; `choose_start` unless given.

        A cloud that joins a run under way starts from the newest step that it has.
        """
        decide = functools.partial(choose or choose_start, num_steps=num_steps)
        start = self._leaders_start(saved, decide, joining) if self._world.is_leader else None
        text: object = self._world.broadcast(None if start is None else pack_facts(start))
        return unpack_facts(text, Start)

    def _leaders_start(
        self,
        saved: SavedSteps,
        decide: Callable[[Mapping[str, SavedSteps]], Start],
        joining: Joining | None,
    ) -> Start:
        newest = max(saved.whole, default=0)
        if joining is not None:
            told = joining.hail
            offset_s = told.clock_offset_s
            return Start(step=newest, epoch=told.epoch, clock_offset_s=offset_s, life=joining.life)
        known = {self._cloud: saved}
        for down in self.downs:
            known |= unpack_facts(down.receive(_SAVED).header.get(_FACTS), _AllSaved).clouds
        if self.up is None:
            epoch = 1 + max(one.epoch for one in known.values())
            start = replace(decide(known), epoch=epoch)
        else:
            self.up.send(_SAVED, Packet({_FACTS: pack_facts(_AllSaved(clouds=known))}))
            start = unpack_facts(self.up.receive(_START).header.get(_FACTS), Start)
            offset_s = start.clock_offset_s + (self.up.counters().clock_offset_s or 0.0)
            start = replace(start, clock_offset_s=offset_s)
        self._send_down(_START, Packet({_FACTS: pack_facts(replace(start, note=None))}))
        return start if start.is_common else replace(start, step=newest)

    def part_with(self, lost: Collection[str]) -> None:
        """End without these clouds, which the others went on without, over the links that there are now."""
        agreed = self._world.broadcast(sorted(lost))
        self._join([one for one in self._clouds if one not in agreed])

    def agree_on_end(self) -> None:
        """Wait until every rank has come to the end: none closes a link that another still listens to."""
        self._world.gather(None)
        for down in self.downs:
            down.receive(_ENDED)
        if self.up is not None:
            self.up.send(_ENDED, Packet({}))
            self.up.receive(_ALL_ENDED)
        self._send_down(_ALL_ENDED, Packet({}))
        self._world.broadcast(None)

    def gather_parts(self, folder: Path) -> tuple[Path, ...]:
        """Take in the parts of clouds further down, and send them and those in the folder up; gives all."""
        for down in self.downs:
            _receive(folder, down)
        parts = tuple(sorted(part for part in folder.iterdir() if part.is_dir()))
        if self.up is not None:
            for part in parts:
                _send(part, self.up)
            self.up.send(_PART, Packet({"last": True}), priority=Priority.BACKGROUND)
        return parts

    def links(self, peers: Sequence[Member]) -> dict[Member, Link]:
        """The links to members of other clouds."""
        others = [peer for peer in peers if peer.cloud != self._cloud]
        return {peer: self._connect(peer.cloud, peer.rank) for peer in others}

    def _send_down(self, stream: str, packet: Packet) -> None:
        for down in self.downs:
            down.send(stream, packet)


def tree(
    clouds: Sequence[str], links: Sequence[tuple[str, str]]
) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """The neighbours of each cloud in the tree of least depth from the first: the one above, those below."""
    above: dict[str, str | None] = {clouds[0]: None}
    reached = [clouds[0]]
    for cloud in reached:
        linked = {one for pair in links if cloud in pair for one in pair}
        for other in [one for one in clouds if one in linked and one not in above]:
            above[other] = cloud
            reached.append(other)
    if missing := [cloud for cloud in clouds if cloud not in above]:
        raise UserError(
            f"no link joins cloud {missing[0]!r} to cloud {clouds[0]!r}, directly or through others",
            hint="give the job a [[link]] between them",
        )
    return {cloud: (above[cloud], tuple(one for one in reached if above[one] == cloud)) for cloud in clouds}


class Choose(Protocol):
    """Decides where clouds start."""

    def __call__(self, saved: Mapping[str, SavedSteps], *, num_steps: int) -> Start:
        """The start of clouds that have saved these steps, of a run with so many."""


def choose_own(saved: Mapping[str, SavedSteps], *, num_steps: int) -> Start:  # noqa: ARG001 - each for itself
    """Every cloud starts from the newest step that it has."""
    return Start(step=0, is_common=False)


def choose_recent(saved: Mapping[str, SavedSteps], *, num_steps: int) -> Start:
    """The newest step that all have, if it is one of the last two; else each takes the newest of its own.

    Clouds that train together save the same steps, but for one that a crash has interrupted. One that has
    been away for longer gets the state of the others, so that nothing of theirs is lost.
    """
    every = sorted({step for one in saved.values() for step in one.whole})
    common = set.intersection(*(set(one.whole) for one in saved.values()))
    if not every or common.intersection(every[-2:]):
        return choose_start(saved, num_steps=num_steps)
    note = f"the newest of {_describe(saved)} is given to all"
    return Start(step=0, is_common=False, life=new_life(), note=note)


def choose_start(saved: Mapping[str, SavedSteps], *, num_steps: int) -> Start:
    """The newest step that every cloud has whole, 0 where none has saved anything.

    No run starts again from its first step because a part of its checkpoints is missing.
    """
    if not any(one.whole or one.damaged for one in saved.values()):
        return Start(step=0)
    common = set.intersection(*(set(one.whole) for one in saved.values()))
    possible = [step for step in common if step <= num_steps]
    if possible:
        step = max(possible)
        return Start(step=step, note=_describe_older(saved, step))
    if common:
        raise UserError(
            f"the run has already taken {min(common)} steps, more than the {num_steps} of train.steps",
            hint=f"set train.steps to {min(common)} or more",
        )
    raise UserError(
        f"no step is saved at every cloud: {_describe(saved)}",
        hint="copy back what is missing, or start again with --resume never",
    )


def _note_waiting(job: Job, link: Link, note: Callable[[str], None]) -> None:
    peer = job.cloud_named(link.peer.cloud)
    place = f" at {peer.listen}" if peer.listen is not None else ""
    note(f"waiting for cloud {peer.name!r}{place}{f': {link.problem}' if link.problem else ''}")


def _describe_older(saved: Mapping[str, SavedSteps], step: int) -> str | None:
    newer = {
        name: SavedSteps(whole=tuple(one for one in its.whole if one > step))
        for name, its in saved.items()
        if any(one > step for one in its.whole)
    }
    return f"step {step} is the newest that every cloud has saved; {_describe(newer)} too" if newer else None


def _describe(saved: Mapping[str, SavedSteps]) -> str:
    """`'east' has steps 100 and 200, 'west' has none (step 100 is damaged)`."""
    texts = []
    for name, one in saved.items():
        verb = "are" if len(one.damaged) > 1 else "is"
        damage = f" ({_steps(one.damaged)} {verb} damaged)" if one.damaged else ""
        texts.append(f"{name!r} has {_steps(one.whole) if one.whole else 'none'}{damage}")
    return ", ".join(texts)


def _steps(steps: Sequence[int]) -> str:
    """`step 100`, or `steps 100 and 200`; of many the newest."""
    texts = [str(step) for step in sorted(steps)[-_MAX_TOLD:]]
    listed = f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]
    more = f" and {len(steps) - _MAX_TOLD} older" if len(steps) > _MAX_TOLD else ""
    return f"step{'s' if len(steps) > 1 else ''} {listed}{more}"


def _read_profiles(packet: Packet) -> dict[str, str]:
    names = packet.header.get("clouds")
    if not isinstance(names, list) or not len(names) == len(packet.buffers) <= _MAX_CLOUDS:
        raise FrameError("profiles without the names of their clouds")
    return {str(name): text for name, text in zip(names, _read_texts(packet), strict=True)}


def _read_texts(packet: Packet) -> list[str]:
    if any(memoryview(one).nbytes > MAX_CONFIG_BYTES for one in packet.buffers):
        raise FrameError(f"a text of more than {MAX_CONFIG_BYTES} bytes")
    try:
        return [bytes(one).decode() for one in packet.buffers]
    except UnicodeDecodeError as error:
        raise FrameError(f"a profile or a run config that is no text: {error}") from error


def fresh_folder(folder: Path) -> Path:
    """An empty folder to gather parts in, whatever an export that was stopped has left there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


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
        raise FrameError(f"a piece of a part whose {key} is no file name")
    return name
