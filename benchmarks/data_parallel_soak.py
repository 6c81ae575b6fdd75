"""Random faults over three clouds of data parallel: do rounds commit, do all take part, is nothing lost?

    python benchmarks/data_parallel_soak.py [--seeds 20] [--faults 60]

The schedulers that workers run, in the simulator, on virtual time: ranks and clouds are killed and
return, with what they saved last or with an old save, links are cut, swallow everything, or have a tenth of
their bandwidth; one fault in two rounds on average. All clouds must end with one history of rounds, and every
step of a cloud must be in one share of each fragment, or have been thrown away with the state it changed.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Final

from bench import finish, options, show

from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.data_times import DataTimes, simulated_data
from isthmus.plan.lines import Disturbance
from isthmus.plan.membership import DataEnded, DataParallel, Ledger, Piece, RoundCommit, RoundEnded
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import Action, Done, Event, Member, Scheduler, Send, WorkKind

CLOUDS: Final = ("east", "north", "west")
HEARTBEAT_S: Final = 5.0
STEP_S: Final = 1.0
GOALS: Final = {"committed": 0.97, "taking_part": 0.9, "digests_agree": 1.0, "accounting_holds": 1.0}
# Kind, the least and the longest time that it lasts; a cloud that is away for long returns stale.
CLOUD_FAULTS: Final = {"kill a rank": (3.0, 8.0), "kill a cloud": (8.0, 20.0), "return stale": (40.0, 60.0)}
LINK_FAULTS: Final = {
    FaultKind.CUT: (0.5, 4.0),
    FaultKind.BLACKHOLE: (1.0, 12.0),
    FaultKind.SLOW_DOWN: (5.0, 30.0),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What one soak came to."""

    num_faults: int
    committed: float
    """Rounds that are in the outer parameters at the end, of those that were due."""
    at_once: float
    """Attempts that gave a round, of all: one in each view in which a change of it was sent."""
    taking_part: float
    """Clouds in the mean of a round, of those that were live."""
    work_kept: float
    """Local steps that are in rounds at the end, of all that were taken."""
    digests_agree: bool
    accounting_holds: bool


def spec_of(num_faults: int) -> DataParallel:
    """A round every six seconds, and two for each fault."""
    fragments, every = 5, 30
    return DataParallel(
        clouds=tuple((Member(name),) for name in CLOUDS),
        num_steps=2 * num_faults * every // fragments,
        num_microbatches=4,
        sync_every=every,
        num_fragments=fragments,
        delay_steps=4,
        quorum=2,
        grace_s=5.0,
        save_every_s=30.0,
        wait_s=1e5,
    )


def faults_of(seed: int, num_faults: int, end_s: float) -> list[Disturbance]:
    """So many faults at random times; nothing happens in the last minute, in which all shall meet again."""
    draw = random.Random(seed)
    found: list[Disturbance] = []
    for at_s in sorted(draw.uniform(10.0, end_s - 60.0) for _ in range(num_faults)):
        kind = draw.choice([*CLOUD_FAULTS, *LINK_FAULTS])
        if isinstance(kind, FaultKind):
            duration_s = draw.uniform(*LINK_FAULTS[kind])
            between = draw.choice(list(combinations(CLOUDS, 2)))
            factor = 10.0 if kind is FaultKind.SLOW_DOWN else 1.0
            found.append(Fault(at_s=at_s, kind=kind, between=between, duration_s=duration_s, factor=factor))
        else:
            duration_s, cloud = draw.uniform(*CLOUD_FAULTS[kind]), draw.choice(CLOUDS)
            found.append(CloudFault(at_s=at_s, kind=CloudFaultKind.GONE, cloud=cloud, duration_s=duration_s))
    return found


def soak(seed: int, num_faults: int) -> Figures:
    """Simulate one run with its faults."""
    spec = spec_of(num_faults)
    count = len(CLOUDS)
    times = DataTimes(
        forward_s=(STEP_S / 12,) * count,
        backward_s=(STEP_S / 6,) * count,
        sum_s=0.02,
        outer_s=0.02,
        num_parameters=25_000_000,
        delta_bits=4.25,
    )
    line = Line(down_bps=100e6, up_bps=100e6, latency_s=0.05)
    tally = Tally()
    strategy = simulated_data(spec, times)
    timeline = simulate(
        replace(strategy, scheduler=lambda member: Watched(strategy.scheduler(member), tally)),
        dict.fromkeys(combinations(CLOUDS, 2), line),
        seed=seed,
        faults=faults_of(seed, num_faults, spec.num_steps * STEP_S),
        patience_s=HEARTBEAT_S,
        line_patience_s=HEARTBEAT_S,
    )
    return judge(timeline, spec, num_faults, tally)


@dataclass(slots=True)
class Tally:
    """What all schedulers of a run have tried and done."""

    attempts: set[tuple[int, int]] = field(default_factory=set)
    """In which views a change of which rounds was sent."""
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """A scheduler whose attempts and steps are counted."""

    scheduler: Scheduler
    tally: Tally

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        """Pass the event on."""
        if isinstance(event, Done) and event.work.kind is WorkKind.UPDATE:
            self.tally.num_steps += 1
        actions = self.scheduler.on(event, now_s)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message.facts, Piece):
                self.tally.attempts.add((action.message.facts.view, action.message.step))
        return actions


def judge(timeline: Timeline, spec: DataParallel, num_faults: int, tally: Tally) -> Figures:
    """What the rounds of a run say."""
    rounds = [one.fact for one in timeline.told if isinstance(one.fact, RoundEnded)]
    ends = {one.member: one.fact for one in timeline.told if isinstance(one.fact, DataEnded)}
    agree = len(ends) == len(spec.clouds) and len({one.digest for one in ends.values()}) == 1
    chain = history(rounds, next(iter(ends.values())).digest, spec.num_rounds) if agree else []
    num_tokens = sum(share.num_tokens for one in chain for share in one.shares)
    num_live = sum(len(one.live) for one in chain)
    return Figures(
        num_faults=num_faults,
        committed=len(chain) / spec.num_rounds,
        at_once=len(chain) / max(len(tally.attempts), 1),
        taking_part=sum(len(one.shares) for one in chain) / max(num_live, 1),
        work_kept=num_tokens / (spec.num_fragments * spec.num_microbatches * tally.num_steps),
        digests_agree=agree,
        accounting_holds=agree and accounts(chain, spec),
    )


def history(rounds: Sequence[RoundEnded], digest: str, num_rounds: int) -> list[RoundEnded]:
    """The rounds behind a digest, from the first on; others were given up."""
    known = {(one.number, one.digest): one for one in rounds}
    chain: list[RoundEnded] = []
    for number in reversed(range(num_rounds)):
        chain.append(known[number, digest])
        before = [of for own, of in known if own == number - 1] if number else [""]
        digest = next(of for of in before if _follows(of, chain[-1]))
    return chain[::-1]


def _follows(digest: str, told: RoundEnded) -> bool:
    ledger = Ledger(num_clouds=1, num_fragments=1)
    ledger.replace(told.number, digest, [0])
    ledger.complete(told.number, RoundCommit(view=told.view, shares=told.shares))
    return ledger.knows(told.number + 1, told.digest)


def accounts(chain: Sequence[RoundEnded], spec: DataParallel) -> bool:
    """Whether each share begins where the one before ended, or from where a replaced cloud read again."""
    until: defaultdict[tuple[int, int], int] = defaultdict(int)
    least: defaultdict[int, set[int]] = defaultdict(lambda: {0})
    for told in chain:
        fragment = told.number % spec.num_fragments
        for share in told.shares:
            before = until[share.cloud, fragment]
            is_read_again = share.since <= before and share.since in least[share.cloud]
            if share.since != before and not is_read_again:
                return False
            until[share.cloud, fragment] = share.until
        for cloud in range(len(spec.clouds)):
            least[cloud].add(min(until[cloud, one] for one in range(spec.num_fragments)))
    return True


def main() -> None:
    """Print one table and a JSON line."""
    args = options(__doc__, seeds=20, faults=60)
    found = [soak(seed, args.faults) for seed in range(args.seeds)]
    rows = [
        {
            "seed": str(seed),
            "faults": str(one.num_faults),
            "rounds committed": f"{one.committed:.1%}",
            "at the first attempt": f"{one.at_once:.1%}",
            "live clouds that took part": f"{one.taking_part:.1%}",
            "steps in rounds": f"{one.work_kept:.1%}",
            "digests agree": str(one.digests_agree),
            "accounting holds": str(one.accounting_holds),
        }
        for seed, one in enumerate(found)
    ]
    show(rows, title=f"{len(CLOUDS)} clouds, a round every 6 s, heartbeat time-out {HEARTBEAT_S:g} s")
    finish(
        "data_parallel_soak",
        goals=GOALS,
        committed=statistics.fmean(one.committed for one in found),
        worst_committed=min(one.committed for one in found),
        at_once=statistics.fmean(one.at_once for one in found),
        work_kept=statistics.fmean(one.work_kept for one in found),
        taking_part=statistics.fmean(one.taking_part for one in found),
        worst_taking_part=min(one.taking_part for one in found),
        digests_agree=statistics.fmean(one.digests_agree for one in found),
        accounting_holds=statistics.fmean(one.accounting_holds for one in found),
    )


if __name__ == "__main__":
    main()
