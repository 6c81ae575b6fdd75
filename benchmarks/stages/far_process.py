"""A far end in another process, behind TLS, gRPC and the product's WAN emulator, which runs in a third."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from crossing import BEYOND
from emulated import Wan, run_on

from isthmus.plan.codecs import read_pair, texts_of
from isthmus.train.pipeline import PipelineConfig
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet
from stages.far_end import answer, prepared_gradient
from stages.loop import Scale

_NEXT: Final = "next"
_READY: Final = "ready"
_CODECS: Final = "codecs"


@dataclass(frozen=True, slots=True, kw_only=True)
class FarProcess:
    """The far end as the measured stage's process sees it."""

    link: Link

    @contextmanager
    def begin(self, config: PipelineConfig) -> Iterator[Any]:
        """Have it answer one run of the measured stage; gives the link to it."""
        # A run of before has let go of the link when the far end is ready.
        self.link.send(_NEXT, Packet({_CODECS: list(texts_of(config.pipeline.cuts[0].codecs))}))
        self.link.receive(_READY)
        yield self.link

    def end(self) -> None:
        """Let it go."""
        self.link.send(_NEXT, Packet({_CODECS: None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the far end must know beforehand."""

    scale: Scale
    dtype: torch.dtype
    max_in_flight: int

    def serve(self, link: Link) -> None:
        """Answer run after run until there is none any more."""
        while (codecs := link.receive(_NEXT).header[_CODECS]) is not None:
            config = self.scale.run_config(read_pair(codecs), max_in_flight=self.max_in_flight)
            gradient = prepared_gradient(config, shape=self.scale.shape, dtype=self.dtype)
            link.send(_READY, Packet({}))
            answer(config, link, gradient, width=self.scale.width)


def measure_over(wan: Wan, measure: Callable[[FarProcess], Any], served: Served) -> Any:
    """Have one process measure and another be the far end; this one is left to the emulator."""
    return run_on(wan, partial(_be_cloud, measure=measure, served=served))


def _be_cloud(
    cloud: str, links: Mapping[str, Link], *, measure: Callable[[FarProcess], Any], served: Served
) -> Any:
    (link,) = links.values()
    if cloud == BEYOND.cloud:
        served.serve(link)
        return None
    far_end = FarProcess(link=link)
    found = measure(far_end)
    far_end.end()
    return found
