"""How members meet and agree on a run: which one, on what model, from which step, and on its end.

The first cloud tells the others what it runs. The steps that each cloud has saved travel up to it by the
cloud's name, and its decision travels down: the newest step that all have saved, or a refusal that names the
cloud that lacks it. The end is agreed on likewise.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from isthmus.errors import FrameError, UserError
from isthmus.job import Job
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import Member, Priority
from isthmus.train.in_cloud import World
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

_PROFILE: Final = "start/profile"
_PROFILES: Final = "start/profiles"
_OFFER: Final = "start/offer"
_SAVED: Final = "start/saved"
_START: Final = "start/step"
_ENDED: Final = "end/here"
_ALL_ENDED: Final = "end/all"
_MAX_CLOUDS: Final = 64
_MAX_STEPS: Final = 100_000
_MAX_TOLD: Final = 5
_MAX_PROFILE_BYTES: Final = 8 * 2**20
# A neighbour that has not come by then is named.
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What only the first cloud knows; its clock is the run's."""

    run_id: str
    model: Mapping[str, Any]
    """What the model's configuration takes from the data."""
    num_labels: int | None
    config: str
    """The run config; each site may have measured other figures, so only one of them plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSteps:
    """The steps whose checkpoints one cloud has: those that are whole, and those that are damaged."""

    whole: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the run begins; `clock_offset_s` added to the clock here gives the first cloud's."""

    step: int
    clock_offset_s: float
    note: str | None = None
    """What the first cloud has to say about the step, known there alone."""


def gather_profiles(
    own: Callable[[], str | None],
    *,
    cloud: str,
    is_wanted: bool,
    up: Link | None,
    down: Link | None,
) -> dict[str, str]:
    """What all clouds have measured of themselves, at the first one, if it asks for it.

    The question travels down, so that all measure at the same time; the figures travel up as `own` gives
    them. None stands for a cloud that has nothing to tell.
    """
    if up is not None:
        is_wanted = up.receive(_PROFILE).header.get("is_wanted") is True
    if down is not None:
        down.send(_PROFILE, Packet({"is_wanted": is_wanted}))
    if not is_wanted:
        return {}
    text = own()
    found = {} if text is None else {cloud: text}
    if down is not None:
        found |= _read_profiles(down.receive(_PROFILES))
    if up is not None:
        up.send(_PROFILES, Packet({"clouds": list(found)}, tuple(one.encode() for one in found.values())))
    return found


def _read_profiles(packet: Packet) -> dict[str, str]:
    names = packet.header.get("clouds")
    if not isinstance(names, list) or not len(names) == len(packet.buffers) <= _MAX_CLOUDS:
        raise FrameError("profiles without the names of their clouds")
    if any(memoryview(one).nbytes > _MAX_PROFILE_BYTES for one in packet.buffers):
        raise FrameError(f"a profile of more than {_MAX_PROFILE_BYTES} bytes")
    try:
        texts = [bytes(one).decode() for one in packet.buffers]
    except UnicodeDecodeError as error:
        raise FrameError(f"a profile that is no text: {error}") from error
    return {str(name): text for name, text in zip(names, texts, strict=True)}


def pass_offer_on(offer: Offer | None, *, up: Link | None, down: Link | None) -> Offer:
    """Give the offer of the first cloud, where it is made, or as it comes, and pass it on."""
    if up is not None:
        header = up.receive(_OFFER).header
        try:
            offer = Offer(**header)  # type: ignore[arg-type]
        except TypeError as error:
            raise FrameError(f"an offer that cannot be read: {error}") from error
    if offer is None:
        raise ValueError("the first cloud makes the offer")
    if down is not None:
        down.send(_OFFER, Packet(asdict(offer)))
    return offer


def agree_on_start(
    saved: SavedSteps, *, cloud: str, num_steps: int, up: Link | None, down: Link | None
) -> Start:
    """Begin where all clouds can; the first cloud decides, and refuses where one of them lacks its part."""
    known = {cloud: saved}
    if down is not None:
        known |= _read_saved(down.receive(_SAVED))
    if up is None:
        start = choose_start(known, num_steps=num_steps)
    else:
        up.send(_SAVED, Packet({"saved": {name: asdict(one) for name, one in known.items()}}))
        start = _read_start(up.receive(_START), up.counters().clock_offset_s or 0.0)
    if down is not None:
        down.send(_START, Packet({"step": start.step, "clock_offset_s": start.clock_offset_s}))
    return start


def choose_start(saved: Mapping[str, SavedSteps], *, num_steps: int) -> Start:
    """The newest step that every cloud has whole, 0 where none has saved anything.

    No run begins again from its first step because a part of its checkpoints is missing.
    """
    if not any(one.whole or one.damaged for one in saved.values()):
        return Start(step=0, clock_offset_s=0.0)
    common = set.intersection(*(set(one.whole) for one in saved.values()))
    possible = [step for step in common if step <= num_steps]
    if possible:
        step = max(possible)
        return Start(step=step, clock_offset_s=0.0, note=_describe_older(saved, step))
    if common:
        raise UserError(
            f"the run has already taken {min(common)} steps, more than the {num_steps} of train.steps",
            hint=f"set train.steps to {min(common)} or more",
        )
    raise UserError(_describe_lack(saved), hint="copy it back, or start again with --resume never")


def agree_on_end(*, up: Link | None, down: Link | None) -> None:
    """Wait until every cloud has come to the end: none closes a link that another still listens to."""
    if down is not None:
        down.receive(_ENDED)
    if up is not None:
        up.send(_ENDED, Packet({}))
        up.receive(_ALL_ENDED)
    if down is not None:
        down.send(_ALL_ENDED, Packet({}))


class Neighbours:
    """The stages before and behind this one; leaders speak to each other and tell their cloud's ranks."""

    def __init__(self, endpoint: Endpoint, world: World, *, clouds: Sequence[str], cloud: str) -> None:
        self.index = clouds.index(cloud)
        """Of this rank's own stage."""
        self._endpoint = endpoint
        self._world = world
        self._clouds = clouds
        self.up = self._leaders_link(self.index - 1)
        """The leaders' link to the stage before; None at other ranks and at the first stage."""
        self.down = self._leaders_link(self.index + 1)

    def meet(self, job: Job, *, note: Callable[[str], None]) -> None:
        """Wait for the neighbours; say whom this cloud waits for, once it has waited a little."""
        for link in filter(None, (self.up, self.down)):
            try:
                link.wait_ready(timeout_s=_PATIENCE_S)
            except TimeoutError:
                peer = job.cloud_named(link.peer.cloud)
                place = f" at {peer.listen}" if peer.listen is not None else ""
                why = f": {link.problem}" if link.problem else ""
                note(f"waiting for cloud {peer.name!r}{place}{why}")
                link.wait_ready()

    def gather_profiles(self, own: Callable[[], str | None], *, is_wanted: bool) -> dict[str, str]:
        """What clouds have measured of themselves, by name, at the leader of the first; else nothing."""
        if not self._world.seat.is_leader:
            return {}
        return gather_profiles(
            own, cloud=self._clouds[self.index], is_wanted=is_wanted, up=self.up, down=self.down
        )

    def agree_on_offer(self, own: Offer | None) -> Offer:
        """What the first cloud, whose leader alone has an offer, runs."""
        words = None
        if self._world.seat.is_leader:
            words = asdict(pass_offer_on(own, up=self.up, down=self.down))
        return Offer(**self._world.broadcast(words))

    def agree_on_start(self, saved: SavedSteps, *, num_steps: int) -> Start:
        """Where the run begins, by the steps that every cloud has saved."""
        words = None
        if self._world.seat.is_leader:
            start = agree_on_start(
                saved, cloud=self._clouds[self.index], num_steps=num_steps, up=self.up, down=self.down
            )
            words = asdict(start)
        return Start(**self._world.broadcast(words))

    def agree_on_end(self) -> None:
        """Wait until every rank of every cloud has come to the end."""
        self._world.gather(None)
        if self._world.seat.is_leader:
            agree_on_end(up=self.up, down=self.down)
        self._world.broadcast(None)

    def links(self, pipeline: Pipeline) -> dict[Member, Link]:
        """The links to all members of the neighbouring stages that this member speaks to."""
        found: dict[Member, Link] = {}
        for stage in (self.index - 1, self.index + 1):
            if 0 <= stage < len(self._clouds):
                peers = pipeline.routing.peers(self.index, self._world.seat.rank, neighbour=stage)
                found |= {
                    Member(self._clouds[stage], peer): self._endpoint.link(self._clouds[stage], peer)
                    for peer in peers
                }
        return found

    def _leaders_link(self, stage: int) -> Link | None:
        if not self._world.seat.is_leader or not 0 <= stage < len(self._clouds):
            return None
        return self._endpoint.link(self._clouds[stage])


def _describe_lack(saved: Mapping[str, SavedSteps]) -> str:
    lacking = {name: one for name, one in saved.items() if not one.whole}
    having = {name: one for name, one in saved.items() if one.whole}
    if not lacking:
        return f"no step is saved at every cloud: {_list_steps(having)}"
    lacks = " and ".join(_describe_lacking(name, one) for name, one in lacking.items())
    return f"{lacks}, while {_list_steps(having)}" if having else lacks


def _describe_lacking(cloud: str, saved: SavedSteps) -> str:
    if saved.damaged:
        verb = "are" if len(saved.damaged) > 1 else "is"
        return f"cloud {cloud!r} has no whole checkpoint of this run ({_steps(saved.damaged)} {verb} damaged)"
    return f"cloud {cloud!r} has no checkpoint of this run"


def _describe_older(saved: Mapping[str, SavedSteps], step: int) -> str | None:
    newer = {
        name: SavedSteps(whole=tuple(one for one in its.whole if one > step)) for name, its in saved.items()
    }
    newer = {name: its for name, its in newer.items() if its.whole}
    if not newer:
        return None
    return f"step {step} is the newest that every cloud has saved; {_list_steps(newer)} too"


def _list_steps(saved: Mapping[str, SavedSteps]) -> str:
    return ", ".join(f"{name!r} has {_steps(one.whole)}" for name, one in saved.items())


def _steps(steps: Sequence[int]) -> str:
    """`step 100`, or `steps 100 and 200`; of many the newest."""
    texts = [str(step) for step in sorted(steps)[-_MAX_TOLD:]]
    told = f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]
    more = f" and {len(steps) - _MAX_TOLD} older" if len(steps) > _MAX_TOLD else ""
    return f"step{'s' if len(steps) > 1 else ''} {told}{more}"


def _read_saved(packet: Packet) -> dict[str, SavedSteps]:
    match packet.header:
        case {"saved": dict(found)} if len(found) <= _MAX_CLOUDS:
            return {str(name): _read_steps(one) for name, one in found.items()}
    raise FrameError("a list of saved steps that is none")


def _read_steps(values: object) -> SavedSteps:
    match values:
        case {"whole": list(whole), "damaged": list(damaged)} if _are_steps([*whole, *damaged]):
            return SavedSteps(whole=tuple(whole), damaged=tuple(damaged))
    raise FrameError("a list of saved steps that is none")


def _are_steps(values: Iterable[object]) -> bool:
    found = list(values)
    return len(found) <= _MAX_STEPS and all(type(one) is int and one >= 0 for one in found)


def _read_start(packet: Packet, offset_s: float) -> Start:
    step, before_s = packet.header.get("step"), packet.header.get("clock_offset_s")
    if not isinstance(step, int) or not isinstance(before_s, float):
        raise FrameError("a start without a step")
    return Start(step=step, clock_offset_s=before_s + offset_s)


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
