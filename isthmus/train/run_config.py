"""The run config: what every member of a run agrees on, from the job and its plan to the worker.

The first cloud makes it, once it has planned, and sends it to all others, so that no two sites can differ.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from isthmus.errors import FrameError, UserError
from isthmus.job import CloudSpec, CodecSpec, Job, LinkSpec
from isthmus.job.boundary import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.model.blueprint import Blueprint
from isthmus.plan.codec_choice import Bounds
from isthmus.plan.cuts import first_trained, links_along, num_frozen_layers
from isthmus.plan.ladder import RAW, Crossing, Loss, Pair, Stretch, num_learners
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.steering import Cut
from isthmus.plan.types import Member
from isthmus.train.setup import Setup

_HIDDEN: Final = HiddenSpec()
_MAX_BYTES: Final = 48 * 1024
_MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What all members of a pipeline run agree on: the schedule, and what actors and wires need beside it."""

    pipeline: Pipeline
    seed: int
    layers: tuple[int, ...] = ()
    """The number of layers of each stage."""
    sharding: tuple[Literal["none", "optimizer", "full"], ...] = ()
    """What the ranks of each stage shard."""
    recompute: bool | Literal["auto"] = False
    offload_optimizer: bool = False
    optimizer_bits: Literal[8, 32] = 32
    boundaries: tuple[BoundarySpec, ...] = ()
    """What crosses each cut, in order; hidden states everywhere where nothing is said."""
    keeps_padding: bool = False
    """Whether padding crosses too, as `Blueprint.mixes_tokens` says."""
    cache_bytes: int = 0
    """The most that the first trained stage keeps of what frozen layers gave."""

    def boundary(self, cut: int) -> BoundarySpec:
        """What crosses the cut behind a stage."""
        return self.boundaries[cut] if self.boundaries else _HIDDEN

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each stage."""
        if sum(self.layers) != num_layers:
            raise UserError(
                f"the stages were planned with {sum(self.layers)} layers, but the model has {num_layers}",
                hint="set strategy.layers, or leave it out",
            )
        return tuple(range(start, stop) for start, stop in pairwise((0, *accumulate(self.layers))))

    @property
    def num_warmup_steps(self) -> int:
        """Steps before bottlenecks start, all at once."""
        return warmup_of(self.boundaries)

    @property
    def common_ranks(self) -> int:
        """The number of which a step's micro-batches are a multiple: the ranks of fully sharded stages."""
        pipeline = self.pipeline
        return max((pipeline.num_ranks[index] for index in pipeline.grouped_stages), default=1)

    @property
    def is_cached(self) -> bool:
        """Whether what frozen layers give is kept."""
        # With several ranks a sequence comes to another one every time.
        pipeline = self.pipeline
        return pipeline.first_trained > 0 and self.cache_bytes > 0 and set(pipeline.num_ranks) <= {1}


def warmup_of(boundaries: tuple[BoundarySpec, ...]) -> int:
    """Steps in which hidden states cross raw, for bottlenecks to learn from."""
    found = (one.num_warmup_steps for one in boundaries if isinstance(one, BottleneckSpec))
    return max(found, default=0)


def run_config(
    job: Job, setup: Setup, blueprint: Blueprint, *, num_validation_microbatches: int
) -> RunConfig:
    """The run config of a job."""
    followed = setup.followed(job)
    stage_layers = setup.stage_layers(blueprint.num_layers)
    boundaries = tuple(link.boundary for link in links_along(job, setup.clouds))
    trained_from = first_trained(stage_layers, num_frozen_layers(job))
    ranks = [followed.cloud_named(name).ranks for name in setup.clouds]
    pipeline = Pipeline(
        stages=tuple(
            tuple(Member(name, rank) for rank in range(number))
            for name, number in zip(setup.clouds, ranks, strict=True)
        ),
        num_steps=job.train.steps,
        num_microbatches=setup.layout.num_microbatches,
        policy=setup.policy,
        max_in_flight=setup.max_in_flight,
        first_trained=trained_from,
        grouped_stages=frozenset(
            index
            for index, name in enumerate(setup.clouds)
            if ranks[index] > 1 and followed.cloud_named(name).sharding == "full"
        ),
        evaluate_every=job.train.evaluate_every or None,
        num_validation_microbatches=num_validation_microbatches,
        evaluates_plain=job.train.evaluate_without_codec,
        fit_step=warmup_of(boundaries) or None,
        bottlenecks=frozenset(
            number for number, one in enumerate(boundaries) if isinstance(one, BottleneckSpec)
        ),
        save_every_s=job.checkpoint.every_s,
        cuts=_cuts(job, setup, ranks, hidden_width=blueprint.config.hidden_size, trained_from=trained_from),
    )
    return RunConfig(
        pipeline=pipeline,
        seed=job.seed,
        layers=tuple(map(len, stage_layers)),
        sharding=tuple(_sharding(followed.cloud_named(name)) for name in setup.clouds),
        recompute=followed.train.recompute or setup.recompute,
        offload_optimizer=followed.train.offload_optimizer,
        optimizer_bits=followed.train.optimizer_bits,
        boundaries=boundaries,
        keeps_padding=blueprint.mixes_tokens,
        cache_bytes=0 if job.model is None else job.model.cache_frozen_bytes,
    )


def pack_config(config: RunConfig) -> str:
    """A run config as the text that the first cloud sends."""
    text = _adapter().dump_json(config).decode()
    if len(text) > _MAX_BYTES:
        raise UserError(
            f"the run config of {len(config.pipeline.members)} members takes {len(text)} bytes, "
            f"more than the {_MAX_BYTES} that clouds exchange",
            hint="use fewer ranks",
        )
    return text


def unpack_config(text: object, *, member: Member) -> RunConfig:
    """The run config that the first cloud has sent, which must know this member."""
    if not isinstance(text, str) or len(text) > _MAX_BYTES:
        raise FrameError(f"a run config that is no text, or over {_MAX_BYTES} bytes")
    try:
        config: RunConfig = _adapter().validate_json(text)
    except (ValidationError, ValueError) as error:
        raise FrameError(f"a run config that cannot be read: {str(error)[:_MAX_SHOWN]}") from None
    if member not in config.pipeline.members:
        raise FrameError(f"a run config without {member}")
    return config


@functools.lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(RunConfig)


def _sharding(cloud: CloudSpec) -> Literal["none", "optimizer", "full"]:
    """What the ranks of a cloud shard; one rank has no one to share with."""
    if cloud.ranks == 1 or cloud.sharding == "auto":
        return "none"
    return cloud.sharding


def _cuts(
    job: Job, setup: Setup, ranks: list[int], *, hidden_width: int, trained_from: int
) -> tuple[Cut, ...]:
    """The cuts of a job; where it leaves a codec open, they start with what was planned, else raw."""
    length = 1 if job.data is None else job.data.sequence_length
    links = links_along(job, setup.clouds)
    warmup = warmup_of(tuple(link.boundary for link in links))
    cuts = []
    for number, link in enumerate(links):
        forward, backward = _own(link.codec.forward), _own(link.codec.backward)
        first = _first_pair(forward, backward, None if setup.codecs is None else setup.codecs[number])
        stretch = Stretch(
            num_steps=job.train.steps,
            num_microbatches=setup.layout.num_microbatches,
            num_learners=num_learners(*ranks[number : number + 2]),
        )
        cuts.append(
            Cut(
                crossing=Crossing(
                    num_rows=setup.layout.num_sequences * length,
                    width=link.boundary.crossing_width(hidden_width),
                    has_gradient=number >= trained_from,
                    stretch=stretch,
                ),
                name=link.name,
                codecs=first,
                num_warmup_steps=warmup if isinstance(link.boundary, BottleneckSpec) else 0,
                guard_every=link.guard_every,
                guard_cosine=link.guard_cosine,
                bounds=Bounds(loss=Loss[job.limits.codec_loss.upper()], forward=forward, backward=backward),
                is_free=forward is None or backward is None,
                bandwidths_bps=_bandwidths(link, setup.clouds[number]),
                least_lossy=first if job.limits.counts_money and link.usd_per_gib else None,
            )
        )
    return tuple(cuts)


def _first_pair(forward: CodecSpec | None, backward: CodecSpec | None, planned: Pair | None) -> Pair:
    if planned is not None:
        pair = Pair(forward=forward or planned.forward, backward=backward or planned.backward)
        if pair.is_possible:
            return pair
    return Pair(forward=forward or RAW, backward=backward or RAW)


def _own(codec: CodecSpec | str) -> CodecSpec | None:
    return codec if isinstance(codec, CodecSpec) else None


def _bandwidths(link: LinkSpec, sender: str) -> tuple[float, float] | None:
    if link.bandwidth_bps is None:
        return None
    there, back = link.bandwidth_bps
    return (there, back) if link.between[0] == sender else (back, there)
