"""The pipeline strategy: who does what at one stage of one cloud, put together."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from isthmus.codec.ends import Codecs, ReceivingEnd, SendingEnd, receiving_end, sending_end
from isthmus.codec.meter import Meter
from isthmus.model.randomness import seed_from
from isthmus.model.stage import Stage
from isthmus.plan.ladder import Pair
from isthmus.plan.pipeline import PipelineScheduler, Policy
from isthmus.plan.rank_windows import bare_scenario, first_windows
from isthmus.plan.routing import Routing
from isthmus.plan.types import Arrived, Event, Pass, Run, Send, Started
from isthmus.train.bench import Bench
from isthmus.train.cache import Admission, Cache, Foresight
from isthmus.train.courier import Mailbox
from isthmus.train.crossing import DownCut, UpCut
from isthmus.train.cut import Codebook, Cut
from isthmus.train.device import Device, Lane
from isthmus.train.messages import Tally
from isthmus.train.optimizer import Optimizer
from isthmus.train.passes import Passes
from isthmus.train.reduction import NoReduction, Reduction
from isthmus.train.settlement import Settlement, Terms
from isthmus.train.traffic import Delivery, Ends, Traffic
from isthmus.train.worker import Observer, Role, Source, Worker
from isthmus.train.world import Alone, World
from isthmus.wan.link import Link

_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What all stages of a run must agree on."""

    num_stages: int
    num_steps: int
    num_microbatches: int
    seed: int
    max_in_flight: int
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    evaluate_every: int | None = None
    num_validation_microbatches: int = 0
    keeps_padding: bool = False
    """Whether padding crosses too: experts sort tokens by kind, and padding that is zero changes the rows."""
    cuts: tuple[Cut, ...] = ()
    """One for each cut, in order; none where hidden states cross raw everywhere."""
    evaluates_plain: bool = False
    """Whether each evaluation is done a second time with everything raw."""
    first_trained: int = 0
    """The first stage with anything to learn."""
    cache_bytes: int = 0
    """The most that the first trained stage keeps of what frozen layers gave."""
    num_ranks: tuple[int, ...] = ()
    """Of each stage; one each where nothing is said."""

    def cut(self, number: int) -> Cut:
        """The cut behind the stage of that number."""
        return self.cuts[number] if self.cuts else Cut()

    @property
    def num_warmup_steps(self) -> int:
        """Steps before bottlenecks begin, all at once."""
        return max((cut.num_warmup_steps for cut in self.cuts), default=0)

    @property
    def is_cached(self) -> bool:
        """Whether what frozen layers give is kept."""
        # With several ranks a sequence comes to another one every time.
        return self.first_trained > 0 and self.cache_bytes > 0 and set(self.num_ranks) <= {1}

    @property
    def routing(self) -> Routing:
        """Which rank takes which micro-batch; the ranks of a cloud are of one speed."""
        return Routing(
            speeds=tuple((1.0,) * number for number in self.num_ranks or (1,) * self.num_stages),
            num_microbatches=self.num_microbatches,
            num_validation_microbatches=self.num_validation_microbatches,
        )

    def is_plain(self, about: Run | Send | Arrived) -> bool:
        """Whether something belongs to the second, plain, round of an evaluation."""
        return about.kind is Pass.EVALUATION and about.microbatch >= self.num_validation_microbatches

    def turns(self, first_step: int = 0, *, stage: int = 0, rank: int = 0) -> Iterator[Started]:
        """Every step, an evaluation after each so many, and one at the end, as one rank has them."""
        share = functools.partial(self.routing.share, stage, rank)
        for step in range(first_step, self.num_steps):
            if self._evaluates_before(step) and step > first_step:
                yield self._evaluation(step, share(step=step, is_evaluation=True))
            yield Started(step=step, microbatches=share(step=step))
        if self.evaluate_every and self.num_validation_microbatches:
            yield self._evaluation(self.num_steps, share(step=self.num_steps, is_evaluation=True))

    def _evaluates_before(self, step: int) -> bool:
        if not self.evaluate_every or not self.num_validation_microbatches:
            return False
        return step % self.evaluate_every == 0

    def _evaluation(self, step: int, share: tuple[int, ...]) -> Started:
        starts = range((1 + self.evaluates_plain) * self.num_validation_microbatches)
        rounds = starts[:: self.num_validation_microbatches]
        numbers = tuple(start + number for start in rounds for number in share)
        return Started(step=step, microbatches=numbers, evaluation=True)

    def first_windows(self) -> tuple[int, ...]:
        """Windows before anything is measured: as if a message took as long as a pass."""
        scenario = bare_scenario(
            self.routing.num_ranks, num_microbatches=self.num_microbatches, policy=self.policy
        )
        return first_windows(scenario, max_in_flight=self.max_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a rank stands: its cloud and stage, and the links to the stages before and behind it.

    `up` and `down` join leaders, and are None at other ranks and at the ends; `ups` and `downs` are to all
    ranks that this one speaks to, those two alone where nothing is said.
    """

    cloud: str
    index: int
    up: Link | None
    down: Link | None
    rank: int = 0
    ups: Mapping[int, Link] | None = None
    downs: Mapping[int, Link] | None = None

    @property
    def up_links(self) -> Mapping[int, Link]:
        """To ranks of the stage before, by rank."""
        return _all_links(self.ups, self.up)

    @property
    def down_links(self) -> Mapping[int, Link]:
        """To ranks of the stage behind, by rank."""
        return _all_links(self.downs, self.down)


def _all_links(given: Mapping[int, Link] | None, leader: Link | None) -> Mapping[int, Link]:
    if given is not None:
        return given
    return {} if leader is None else {0: leader}


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
    window = course.first_windows()[post.index]
    events: Mailbox[Event | Delivery] = Mailbox()
    terms = Terms(
        num_microbatches=course.num_microbatches,
        max_in_flight=course.max_in_flight,
        policy=course.policy,
        should_save=should_save,
        steer=steer,
        num_ranks=course.routing.num_ranks,
    )
    settlement = Settlement(terms=terms, world=world)
    width = stage.model.config.hidden_size
    traffic = Traffic(
        cloud=post.cloud,
        index=post.index,
        rank=post.rank,
        ends=_ends(course, post, device, width, observer),
        routing=course.routing,
        events=events,
        settlement=settlement,
        on_span=observer.span,
        on_evaluated=observer.evaluated,
    )
    role = _role(course, post, world)
    worker = Worker(
        role,
        passes=Passes(
            stage,
            device=device.torch_device,
            seed=course.seed,
            autocast=autocast,
            is_frozen=role.is_frozen,
            sends_gradients=post.index > course.first_trained,
            num_warmup_steps=course.num_warmup_steps,
        ),
        optimizer=optimizer,
        scheduler=_scheduler(course, post, window),
        window=window,
        settlement=settlement,
        traffic=traffic,
        events=events,
        device=device,
        source=source,
        observer=observer,
        world=world,
        reduction=reduction or NoReduction(),
        foresight=_foresight(course, width) if post.index == 0 else None,
    )
    return worker, traffic


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
    )


def _cut_seed(course: Course, number: int) -> int:
    """Cuts round by themselves, or their errors would add up."""
    return seed_from("cut", course.seed, number)


def _admission(course: Course, width: int) -> Admission:
    return Admission(max_bytes=course.cache_bytes, row_bytes=_FLOAT32_BYTES * width)


def _foresight(course: Course, width: int) -> Foresight | None:
    if not course.is_cached:
        return None
    return Foresight(admission=_admission(course, width), keeps_padding=course.keeps_padding)
