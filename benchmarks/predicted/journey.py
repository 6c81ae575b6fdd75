"""One process per cloud that goes from WAN to WAN: importing torch anew for each would take minutes.

Every process first measures on every WAN, then waits until the predictions are in their file, then runs.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from emulated import CLOUDS, Wan, links_of
from member import prepare_process

from isthmus.job import Job
from isthmus.plan.times import Profile
from isthmus.plan.types import Member
from isthmus.train.device import Device
from isthmus.wan.certificates import Identity
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import RankSpec
from isthmus.wan.link import Link
from isthmus.wan.local import LocalWan, Report, run_ranks
from isthmus.wan.packet import Packet
from predicted.cases import Case
from predicted.packets import Packets
from predicted.stages import Stages

_HERE: Final = "journey/here"
_GO: Final = "journey/go"
_POLL_S: Final = 0.2
_MEASURED: Final = "measured"
_SLOW_DOWN: Final = "slow-down "
_CASE: Final = "case "
_GOES_ON: Final = "goes_on"

At = Callable[["Visit"], Any]
"""What a cloud does on a WAN, with its links open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One WAN with its cases, and what each cloud needs to join it."""

    job: Job
    cases: tuple[Case, ...]
    identities: dict[str, Identity]
    sites: dict[str, Site]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What one cloud has built and measured on its way, for cases that have the same stages."""

    stages: dict[Stages, Any] = field(default_factory=dict)
    profiles: dict[Stages, Profile] = field(default_factory=dict)
    packets: dict[tuple[Stages, tuple[str, str]], Packets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One cloud on one WAN."""

    job: Job
    endpoint: Endpoint
    cloud: str
    links: Mapping[str, Link]
    """To the neighbours along the pipeline."""
    cases: tuple[Case, ...]
    report: Report
    known: Known

    @property
    def index(self) -> int:
        """The stage of this cloud."""
        return [cloud.name for cloud in self.job.cloud].index(self.cloud)

    def stage(self, case: Case) -> Any:
        """This cloud's stage of a case, on its device."""
        if case.stages not in self.known.stages:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(self.job.cloud)))
            stage = case.stages.build(self.index)
            torch.set_num_threads(1)
            self.known.stages[case.stages] = stage.to(Device(case.stages.device).torch_device)
        return self.known.stages[case.stages]

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Have the first emulated line carry `factor` times less for this long, or until told anew."""
        about = {"wan": self.cases[0].wan.name, "factor": factor, "duration_s": duration_s}
        self.report(_SLOW_DOWN + json.dumps(about))

    def ended(self, case: Mapping[str, Any]) -> None:
        """Tell of a case that has run."""
        self.report(_CASE + json.dumps(case))

    def meet(self, *, goes_on: bool = True) -> bool:
        """Wait until all clouds have come here; gives whether the first of them wants to go on."""
        up, down = self._neighbour(-1), self._neighbour(1)
        if down is not None:
            down.receive(_HERE)
        if up is not None:
            up.send(_HERE, Packet({}))
            goes_on = bool(up.receive(_GO).header[_GOES_ON])
        if down is not None:
            down.send(_GO, Packet({_GOES_ON: goes_on}))
        return goes_on

    def _neighbour(self, distance: int) -> Link | None:
        index, clouds = self.index + distance, self.job.cloud
        return self.links[clouds[index].name] if 0 <= index < len(clouds) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What happens on the journey, and the file without which nobody runs."""

    measure: At
    run: At
    predictions: Path


def travel(
    cases: Sequence[Case],
    plans: Plans,
    *,
    on_measured: Callable[[], None],
    say: Report,
    on_case: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> list[Any]:
    """Measure on all WANs, have predictions made, run; gives what the first cloud brings from each WAN."""
    # Its links are never opened: it only gives every cloud its process.
    home = max((case.wan for case in cases), key=lambda wan: len(wan.clouds)).job()
    names = [cloud.name for cloud in home.cloud]
    waiting = set(names)
    emulated: dict[str, LocalWan] = {}

    def on_report(cloud: str, text: str) -> None:
        if text.startswith(_SLOW_DOWN):
            _slow_down(emulated, json.loads(text.removeprefix(_SLOW_DOWN)))
        elif text.startswith(_CASE):
            on_case(json.loads(text.removeprefix(_CASE)))
        elif text != _MEASURED:
            say(text)
        else:
            waiting.discard(cloud)
            if not waiting:
                on_measured()

    with ExitStack() as stack:
        wans = list(dict.fromkeys(case.wan for case in cases))
        emulated |= {wan.name: stack.enter_context(LocalWan(wan.job())) for wan in wans}
        stops = [_stop(wan, cases, emulated[wan.name]) for wan in wans]
        work = functools.partial(_be_cloud, stops=stops, plans=plans)
        found = run_ranks(home, work, stack.enter_context(LocalWan(home)), on_report=on_report)
    brought: list[Any] = found[Member(names[0])]
    return brought


def _slow_down(emulated: Mapping[str, LocalWan], about: Mapping[str, Any]) -> None:
    wan = emulated[about["wan"]]
    wan.relay(*CLOUDS[:2]).slow_down(about["factor"], about["duration_s"])


def _stop(wan: Wan, cases: Sequence[Case], emulated: LocalWan) -> Stop:
    return Stop(
        job=wan.job(),
        cases=tuple(case for case in cases if case.wan == wan),
        identities={cloud: emulated.identity(cloud) for cloud in wan.clouds},
        sites={cloud: emulated.site(cloud) for cloud in wan.clouds},
    )


def _be_cloud(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Report,
    spec: RankSpec,
    stops: Sequence[Stop],
    plans: Plans,
) -> list[Any]:
    """Be one cloud all the way."""
    del job, endpoint, spec
    prepare_process()
    own = [stop for stop in stops if cloud in stop.identities]
    known = Known()
    for stop in own:
        _visit(stop, cloud, report, known, plans.measure)
    report(_MEASURED)
    while not plans.predictions.exists():
        time.sleep(_POLL_S)
    return [_visit(stop, cloud, report, known, plans.run) for stop in own]


def _visit(stop: Stop, cloud: str, report: Report, known: Known, work: At) -> Any:
    with Endpoint(stop.job, cloud=cloud, identity=stop.identities[cloud], site=stop.sites[cloud]) as endpoint:
        visit = Visit(
            job=stop.job,
            endpoint=endpoint,
            cloud=cloud,
            links=links_of(stop.job, endpoint, cloud),
            cases=stop.cases,
            report=report,
            known=known,
        )
        return work(visit)
