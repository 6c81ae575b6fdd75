"""What a run's ranks must agree on, and where each of them stands."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.job import Job
from isthmus.model.blueprint import Blueprint
from isthmus.plan.cuts import first_trained, num_frozen_layers
from isthmus.plan.pipeline import Policy
from isthmus.plan.rank_windows import bare_scenario, first_windows
from isthmus.plan.routing import Routing
from isthmus.plan.scenario import Caps
from isthmus.plan.types import Arrived, Pass, Run, Send, Started
from isthmus.train.crossing.cut import Cut
from isthmus.train.crossing.wiring import cuts_of
from isthmus.train.setup import Setup
from isthmus.wan.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What all stages of a run must agree on."""

    num_stages: int
    num_steps: int
    num_microbatches: int
    seed: int
    max_in_flight: Caps
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


def course_of(job: Job, setup: Setup, blueprint: Blueprint, *, num_validation_microbatches: int) -> Course:
    """The course of a job."""
    stage_layers = setup.stage_layers(blueprint.num_layers)
    return Course(
        num_stages=len(setup.clouds),
        num_steps=job.train.steps,
        num_microbatches=setup.layout.num_microbatches,
        seed=job.seed,
        max_in_flight=setup.max_in_flight,
        policy=setup.policy,
        evaluate_every=job.train.evaluate_every or None,
        num_validation_microbatches=num_validation_microbatches,
        keeps_padding=blueprint.family.router is not None,
        cuts=cuts_of(job, setup.clouds, planned=setup.codecs),
        evaluates_plain=job.train.evaluate_without_codec,
        first_trained=first_trained(stage_layers, num_frozen_layers(job)),
        cache_bytes=0 if job.model is None else job.model.cache_frozen_bytes,
        num_ranks=tuple(job.cloud_named(name).ranks for name in setup.clouds),
    )


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
