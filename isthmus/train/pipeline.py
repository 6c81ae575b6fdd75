"""The pipeline strategy: who does what at one stage of one cloud, put together."""

from collections.abc import Callable
from typing import Final

import torch

from isthmus.codec.ends import Codecs, ReceivingEnd, SendingEnd, receiving_end, sending_end
from isthmus.codec.meter import Meter
from isthmus.model.randomness import seed_from
from isthmus.model.stage import Stage
from isthmus.plan.ladder import Pair
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.types import Event
from isthmus.train.course import Course, Post
from isthmus.train.crossing.bench import Bench
from isthmus.train.crossing.cache import Admission, Cache, Foresight
from isthmus.train.crossing.courier import Mailbox
from isthmus.train.crossing.cut import Codebook
from isthmus.train.crossing.ends import DownCut, UpCut
from isthmus.train.crossing.settlement import Settlement, Terms
from isthmus.train.crossing.traffic import Delivery, Ends, Traffic
from isthmus.train.crossing.words import Tally
from isthmus.train.device import Device, Lane
from isthmus.train.observer import Observer
from isthmus.train.optimize.optimizer import Optimizer
from isthmus.train.passes import Passes
from isthmus.train.ranks.reduction import NoReduction, Reduction
from isthmus.train.ranks.world import Alone, World
from isthmus.train.reading import Reader, Source
from isthmus.train.worker import Role, Worker
from isthmus.wan.link import Link

_FLOAT32_BYTES: Final = 4


def pipeline_worker(
    *,
    course: Course,
    post: Post,
    stage: Stage,
    optimizer: Optimizer,
    device: Device,
    source: Source | None,
    observer: Observer,
    autocast: torch.dtype | None = None,
    should_save: Callable[[int], bool] = lambda _: False,
    steer: Callable[[Tally], tuple[Pair, ...]] = lambda _: (),
    world: World | None = None,
    reduction: Reduction | None = None,
) -> tuple[Worker, Traffic]:
    """The worker of one rank of a stage, and its traffic, within which it runs."""
    world = world or Alone()
    width = stage.model.config.hidden_size
    window = course.first_windows()[post.index]
    role = _role(course, post, world)
    events: Mailbox[Event | Delivery] = Mailbox()
    traffic = Traffic(
        cloud=post.cloud,
        index=post.index,
        rank=post.rank,
        ends=_ends(course, post, device, width, observer),
        routing=course.routing,
        events=events,
        settlement=Settlement(terms=_terms(course, should_save, steer), world=world),
        on_span=observer.span,
        on_evaluated=observer.evaluated,
    )
    worker = Worker(
        role,
        passes=_passes(course, role, stage, device, autocast),
        optimizer=optimizer,
        scheduler=_scheduler(course, post, window),
        window=window,
        traffic=traffic,
        events=events,
        device=device,
        reader=_reader(course, role, source, width, observer, world) if source is not None else None,
        observer=observer,
        world=world,
        reduction=reduction or NoReduction(),
    )
    return worker, traffic


def _terms(
    course: Course, should_save: Callable[[int], bool], steer: Callable[[Tally], tuple[Pair, ...]]
) -> Terms:
    return Terms(
        num_microbatches=course.num_microbatches,
        max_in_flight=course.max_in_flight,
        policy=course.policy,
        should_save=should_save,
        steer=steer,
        num_ranks=course.routing.num_ranks,
    )


def _passes(course: Course, role: Role, stage: Stage, device: Device, autocast: torch.dtype | None) -> Passes:
    return Passes(
        stage,
        device=device.torch_device,
        seed=course.seed,
        autocast=autocast,
        is_frozen=role.is_frozen,
        sends_gradients=role.index > course.first_trained,
        num_warmup_steps=course.num_warmup_steps,
    )


def _role(course: Course, post: Post, world: World) -> Role:
    return Role(
        track=f"{post.cloud}/{post.rank}" if world.seat.num_ranks > 1 else post.cloud,
        index=post.index,
        is_last=post.index == course.num_stages - 1,
        is_frozen=post.index < course.first_trained,
        begins_at=course.num_warmup_steps or None,
        evaluates_plain=course.evaluates_plain,
        is_plain=course.is_plain,
    )


def _scheduler(course: Course, post: Post, window: int) -> PipelineScheduler:
    return PipelineScheduler(
        stage=post.index,
        num_stages=course.num_stages,
        policy=course.policy,
        window=window,
        first_trained=course.first_trained,
    )


def _ends(course: Course, post: Post, device: Device, width: int, observer: Observer) -> Ends:
    ups, downs = post.up_links, post.down_links
    return Ends(
        up={peer: (link, _up_cut(course, post, link, device, width, observer)) for peer, link in ups.items()},
        down={
            peer: (link, _down_cut(course, post, link, device, width, observer))
            for peer, link in downs.items()
        },
    )


def _down_cut(
    course: Course, post: Post, link: Link, device: Device, width: int, observer: Observer
) -> DownCut:
    cut = course.cut(post.index)
    lane = device.lane()

    def make(codecs: Codecs) -> SendingEnd:
        with lane.work():
            return sending_end(codecs, device=lane.torch_device)

    return DownCut(
        book=Codebook(cut, hidden_width=width, make=make, seed=_cut_seed(course, post.index)),
        bench=_bench(post, link, lane, width, observer),
        meter=Meter(every=cut.guard_every, num_microbatches=course.num_microbatches),
        is_plain=course.is_plain,
        keeps_padding=course.keeps_padding,
        awaits_gradients=post.index >= course.first_trained,
        drops_held=course.is_cached and post.index + 1 == course.first_trained,
    )


def _up_cut(course: Course, post: Post, link: Link, device: Device, width: int, observer: Observer) -> UpCut:
    cut = course.cut(post.index - 1)
    lane = device.lane()

    def make(codecs: Codecs) -> ReceivingEnd:
        with lane.work():
            return receiving_end(codecs, device=lane.torch_device)

    caches = course.is_cached and post.index == course.first_trained
    return UpCut(
        book=Codebook(cut, hidden_width=width, make=make, seed=_cut_seed(course, post.index - 1)),
        bench=_bench(post, link, lane, width, observer),
        meter=Meter(every=cut.guard_every, num_microbatches=course.num_microbatches),
        is_plain=course.is_plain,
        keeps_padding=course.keeps_padding,
        sends_gradients=post.index > course.first_trained,
        cache=Cache(_admission(course, width)) if caches else None,
    )


def _bench(post: Post, link: Link, lane: Lane, width: int, observer: Observer) -> Bench:
    peer = link.peer.cloud
    return Bench(
        lane=lane,
        leaves=f"{post.cloud}→{peer}",
        arrives=f"{peer}→{post.cloud}",
        hidden_width=width,
        on_span=observer.span,
        on_measured=observer.measured,
    )


def _cut_seed(course: Course, number: int) -> int:
    """Cuts round by themselves, or their errors would add up."""
    return seed_from("cut", course.seed, number)


def _admission(course: Course, width: int) -> Admission:
    return Admission(max_bytes=course.cache_bytes, row_bytes=_FLOAT32_BYTES * width)


def _reader(
    course: Course, role: Role, source: Source, width: int, observer: Observer, world: World
) -> Reader:
    foresight = None
    if course.is_cached:
        foresight = Foresight(admission=_admission(course, width), keeps_padding=course.keeps_padding)
    return Reader(
        source=source,
        world=world,
        track=role.track,
        on_span=observer.span,
        is_plain=course.is_plain,
        foresight=foresight,
    )
