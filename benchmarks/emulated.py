"""Emulated WANs: clouds in a row on this machine, and what the lines between them are set to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.plan.types import Member
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.link import Link
from isthmus.wan.local import LocalWan, Report, run_ranks

CLOUDS: Final = ("east", "west", "north", "south")
MS: Final = 0.001
MBPS: Final = 1e6

Work = Callable[[str, Mapping[str, Link]], Any]
"""What a cloud does, given its name and its links to its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShape:
    """What one emulated line is set to: activations go down, gradients up."""

    rtt_s: float
    down_bps: float
    up_bps: float

    @property
    def bandwidth_bps(self) -> float:
        """The bandwidth of the narrower direction."""
        return min(self.down_bps, self.up_bps)

    @property
    def rates(self) -> str:
        """Both in words, such as "100 Mbit/s", or "500 / 50 Mbit/s" where the directions differ."""
        down, up = f"{self.down_bps / MBPS:g}", f"{self.up_bps / MBPS:g}"
        return f"{down if down == up else f'{down} / {up}'} Mbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """The lines along a pipeline."""

    lines: tuple[LineShape, ...]

    @property
    def clouds(self) -> tuple[str, ...]:
        """One for each stage, in order."""
        return CLOUDS[: len(self.lines) + 1]

    @property
    def name(self) -> str:
        """As tables show it."""
        return ", ".join(f"{1e3 * one.rtt_s:g} ms {one.rates}" for one in self.lines)

    def job(self) -> Job:
        """All but the last cloud can be dialled."""
        clouds = [
            f'[[cloud]]\nname = "{name}"\nlisten = "127.0.0.1:{7600 + number}"\n'
            for number, name in enumerate(self.clouds[:-1])
        ]
        clouds.append(f'[[cloud]]\nname = "{self.clouds[-1]}"\n')
        links = [
            f'[[link]]\nbetween = ["{first}", "{second}"]\n'
            f'bandwidth = ["{line.down_bps / MBPS:g} Mbps", "{line.up_bps / MBPS:g} Mbps"]\n'
            f'rtt = "{1e3 * line.rtt_s:g} ms"\n'
            for line, first, second in zip(self.lines, self.clouds, self.clouds[1:], strict=False)
        ]
        text = 'name = "benchmark"\n' + "".join((*clouds, *links))
        return parse_job(text, file=Path("benchmark.toml"))


def wan_of(*lines: tuple[float, float]) -> Wan:
    """Lines by round trip in milliseconds and bandwidth in Mbit/s, the same both ways."""
    return Wan(
        lines=tuple(
            LineShape(rtt_s=rtt_ms * MS, down_bps=mbps * MBPS, up_bps=mbps * MBPS) for rtt_ms, mbps in lines
        )
    )


def run_on(wan: Wan, work: Work) -> Any:
    """Have each cloud work in a process of its own while this one emulates; gives what the first found."""
    job = wan.job()
    with LocalWan(job) as local:
        found = run_ranks(job, partial(_be_cloud, work=work), local, on_report=lambda *_: None)
    return found[Member(wan.clouds[0])]


def links_of(job: Job, endpoint: Endpoint, cloud: str) -> dict[str, Link]:
    """The links of a cloud to its neighbours in the row, with the neighbours there."""
    clouds = [one.name for one in job.cloud]
    index = clouds.index(cloud)
    peers = [*clouds[max(0, index - 1) : index], *clouds[index + 1 : index + 2]]
    links = {peer: endpoint.link(peer) for peer in peers}
    for link in links.values():
        link.wait_ready()
    return links


def _be_cloud(job: Job, endpoint: Endpoint, *, cloud: str, report: Report, spec: RankSpec, work: Work) -> Any:
    del report, spec
    return work(cloud, links_of(job, endpoint, cloud))
